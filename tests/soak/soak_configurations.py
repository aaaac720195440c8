"""The configurations of the rollout server in which it is soaked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import harness
from numerics import Numerics

MAX_MODEL_LEN = 256
# Blocks of 64 tokens for each model: a score and two sequences of MAX_MODEL_LEN tokens.
SHORT_CACHE_BLOCKS = 12


@dataclass(frozen=True)
class Configuration:
    """Settings of a rollout server.

    Attributes:
        numerics: how closely the replies to one request must agree.
        settings: settings of its section, beside those that all configurations share.
        limits: settings of the soaked server alone, which answers do not depend on.
        short_cache: whether the KV cache is too small for the sequences that run.
    """

    name: str
    numerics: Numerics = field(default_factory=Numerics)
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    short_cache: bool = True

    def soaked(self, models: harness.Models) -> dict[str, Any]:
        """Returns the section of the server that many clients call."""
        section = self._section() | {"max_num_seqs": 12, "max_batched_tokens": 100}
        if self.short_cache:
            section["kv_cache_bytes"] = SHORT_CACHE_BLOCKS * (
                harness.block_bytes(models.senior) + harness.block_bytes(models.junior)
            )
        return section | self.limits

    def alone(self) -> dict[str, Any]:
        """Returns the section of a server that computes alike, one sequence at a time."""
        return self._section() | {"max_num_seqs": 1}

    def _section(self) -> dict[str, Any]:
        section = self.numerics.settings(**self.settings)
        return section | {"max_model_len": MAX_MODEL_LEN}


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("float32", short_cache=False),
        Configuration("float32-two-threads", settings={"compute": {"num_threads": 2}}),
        Configuration(
            "bfloat16-int8",
            settings={"senior_dtype": "bfloat16", "junior_quantization": "int8"},
        ),
        Configuration(
            "int4-short-junior",
            settings={"junior_quantization": "int4", "junior_max_model_len": 200},
            limits={"max_batched_tokens": 17, "max_num_seqs": 5},
        ),
        Configuration(
            "two-ranks",
            settings={"ranks": 2, "tensor_parallel_size": 2, "junior_tensor_parallel_size": 2},
        ),
        Configuration("aten", numerics=Numerics(kernels="aten")),
    )
}
