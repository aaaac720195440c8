"""The types that a benchmark computes in, and the settings of the servers by them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
# Instruction sets that multiply numbers in bfloat16.
_FLAGS = {"avx512_bf16", "amx_bf16"}


def native() -> tuple[str, ...]:
    """Returns the types for whose products this CPU has instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return DTYPES if _FLAGS & set(flags.split()) else DTYPES[:1]


def add_dtypes(parser: argparse.ArgumentParser) -> None:
    """Adds --dtypes: float32, which is always measured, and by default what else is native."""
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(dict.fromkeys(("float32", *text.split(",")))),
        default=native(),
        help="types to measure beside float32; by default bfloat16 where the CPU multiplies it",
    )


def learner(dtype: str) -> dict[str, Any]:
    """The section `compute` of a trainer or critic: linear maps multiply numbers of this type."""
    return {"weight_dtype": dtype, "activation_dtype": dtype}


def lane(name: str, dtype: str) -> dict[str, Any]:
    """The same of the lane `name` of a rollout server."""
    return {f"{name}_dtype": dtype, f"{name}_activation_dtype": dtype}
