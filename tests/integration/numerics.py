"""The devices, types and kernels that servers and models are tested with.

With the CPU kernels, laws hold to the bit, and so they do with the kernels of a GPU and products of
fixed rows. Other operations of ATen are not batch-invariant: the bits of a row depend on the batch.
TANDEM_TEST_DEVICE, TANDEM_TEST_DTYPE, TANDEM_TEST_KERNELS and TANDEM_TEST_PRODUCT_ROWS choose one
configuration; without them, all that a CPU can run are tested.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Numerics:
    """One way to compute, and how closely its results must agree."""

    device: str = "cpu"
    dtype: str = "float32"
    kernels: str = "auto"
    product_rows: int = 0

    @property
    def name(self) -> str:
        """How tests are called that compute so."""
        rows = [f"rows{self.product_rows}"] if self.product_rows else []
        return "-".join([self.device, self.dtype, self.kernels, *rows])

    @property
    def exact(self) -> bool:
        """Whether the bits of a row do not depend on its batch."""
        on_cpu = (self.device, self.dtype, self.kernels) == ("cpu", "float32", "auto")
        return on_cpu or self.product_rows > 0

    @property
    def bfloat16(self) -> bool:
        """Whether the models compute in bfloat16."""
        return self.dtype == "bfloat16"

    @property
    def atol(self) -> float:
        """Largest difference of two log-probs of one token; at least twice what was measured."""
        return 0.0 if self.exact else {"float32": 5e-5, "bfloat16": 0.15}[self.dtype]

    @property
    def reference_atol(self) -> float:
        """Largest difference of a log-prob at temperature 1 from that of float32 transformers."""
        return {"float32": 2e-4, "bfloat16": 0.4}[self.dtype]

    @property
    def common_tokens(self) -> float:
        """Least fraction of the tokens of some samples that come before the first difference.

        It depends on libtorch's kernels for the CPU: with ATen 0.995 was measured with AVX-512, and
        in bfloat16 0.26 with AVX2.
        """
        return 1.0 if self.exact else {"float32": 0.97, "bfloat16": 0.15}[self.dtype]

    def settings(self, **rest: Any) -> dict[str, Any]:
        """The section of a server in a cluster file, with the settings `rest`."""
        compute = {"num_threads": 1} | asdict(self) | rest.pop("compute", {})
        return {"compute": compute} | rest


def configurations() -> list[Numerics]:
    """The configuration that the environment names, or all that the CPU runs."""
    chosen = {
        field.name: type(field.default)(value)
        for field in fields(Numerics)
        if (value := os.environ.get(f"TANDEM_TEST_{field.name.upper()}"))
    }
    if chosen:
        return [Numerics(**chosen)]
    return [Numerics(), Numerics(kernels="aten"), Numerics(kernels="aten", dtype="bfloat16")]
