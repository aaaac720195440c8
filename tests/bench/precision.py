"""Settings of the servers by the type that a benchmark computes in."""

from __future__ import annotations

from typing import Any

DTYPES = ("float32", "bfloat16")


def learner(dtype: str) -> dict[str, Any]:
    """The section `compute` of a trainer or critic: linear maps multiply numbers of this type."""
    return {"weight_dtype": dtype, "activation_dtype": dtype}


def lane(name: str, dtype: str) -> dict[str, Any]:
    """The same of the lane `name` of a rollout server."""
    return {f"{name}_dtype": dtype, f"{name}_activation_dtype": dtype}
