"""The devices, types and kernels that the servers are tested with.

On the CPU's own kernels laws hold to the bit. The operations that a GPU runs give a row other bits
in another batch. TANDEM_TEST_DEVICE, TANDEM_TEST_DTYPE and TANDEM_TEST_KERNELS choose one
configuration; without them the CPU runs all.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Numerics:
    """How the models compute, and what may be expected of it."""

    device: str = "cpu"
    dtype: str = "float32"
    kernels: str = "auto"

    @property
    def exact(self) -> bool:
        """A row's bits do not depend on what it was computed with."""
        return (self.device, self.dtype, self.kernels) == ("cpu", "float32", "auto")

    @property
    def atol(self) -> float:
        """Between two log-probs of one token, twice what was measured and more."""
        return 0.0 if self.exact else {"float32": 5e-5, "bfloat16": 0.15}[self.dtype]

    @property
    def reference_atol(self) -> float:
        """Between a log-prob at temperature 1 and one of transformers in float32."""
        return {"float32": 2e-4, "bfloat16": 0.4}[self.dtype]

    @property
    def common_tokens(self) -> float:
        """Share of tokens before the first that differs, over some samples."""
        return {"float32": 1.0, "bfloat16": 0.6}[self.dtype]

    def settings(self, **rest: Any) -> dict[str, Any]:
        """The section of a server."""
        compute = {"num_threads": 1} | asdict(self) | rest.pop("compute", {})
        return {"compute": compute} | rest


def configurations() -> list[Numerics]:
    """The one that the environment names, or all that the CPU runs."""
    names = [field.name for field in fields(Numerics)]
    chosen = {n: v for n in names if (v := os.environ.get(f"TANDEM_TEST_{n.upper()}"))}
    if chosen:
        return [Numerics(**chosen)]
    return [Numerics(), Numerics(kernels="aten"), Numerics(kernels="aten", dtype="bfloat16")]
