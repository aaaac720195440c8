"""Kinds of lanes of a rollout server: layouts of ranks, types and quantisation of its models."""

from __future__ import annotations

from typing import Any

import harness
from family_models import SENIORS
from numerics import Numerics

LANES: dict[str, dict[str, Any]] = {
    "float32": {},
    "two-threads": {"compute": {"num_threads": 2}},
    "bfloat16-int8": {"senior_dtype": "bfloat16", "junior_quantization": "int8"},
    "bfloat16-inputs": {
        "senior_dtype": "bfloat16",
        "senior_activation_dtype": "bfloat16",
        "junior_dtype": "bfloat16",
        "junior_activation_dtype": "bfloat16",
    },
    "int4": {"junior_quantization": "int4"},
    "bfloat16-cache": {"kv_cache_dtype": "bfloat16"},
    "two-ranks": {"ranks": 2, "tensor_parallel_size": 2, "junior_tensor_parallel_size": 2},
    # Seniors of other families than the junior.
    **{kind: {} for kind in SENIORS},
}
# Layouts of two ranks, which hold shards of the senior and of the junior, or of the senior alone.
RANKED = {
    "two-ranks": LANES["two-ranks"],
    "one-rank-junior": {"ranks": 2, "tensor_parallel_size": 2},
}
LONG = {"max_tokens": 90, "temperature": 1.0, "ignore_eos": True}


def section(lanes: str, **rest: Any) -> dict[str, Any]:
    """The section of a rollout server with lanes of this kind."""
    config = (LANES | RANKED)[lanes]
    return Numerics().settings(max_model_len=128, max_batched_tokens=128, **config, **rest)


def short_cache(models: harness.Models, lanes: str) -> int:
    """Bytes of five blocks for each model: two are for scores, and a sequence comes to need two."""
    of_float32 = 5 * (harness.block_bytes(models.senior) + harness.block_bytes(models.junior))
    return of_float32 // 2 if lanes == "bfloat16-cache" else of_float32
