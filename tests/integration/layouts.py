"""Layouts of the ranks of a server: sections of a cluster file."""

from __future__ import annotations

import os
from typing import Any

HEARTBEAT_SECONDS = 4
STRATEGIES = {
    "zero": {"name": "zero", "stage": 3},
    "tensor": {"name": "megatron", "tensor_model_parallel_size": 2},
    "pipeline": {"name": "megatron", "pipeline_model_parallel_size": 2},
}


def sharing() -> dict[str, Any]:
    """Settings with which ranks share a GPU, if TANDEM_TEST_RANKS_PER_GPU says how many."""
    ranks = os.environ.get("TANDEM_TEST_RANKS_PER_GPU")
    return {"compute": {"ranks_per_gpu": int(ranks)}} if ranks else {}


def ranked(strategy: str = "zero", ranks: int = 2) -> dict[str, Any]:
    """The section of a multi-rank trainer or critic."""
    return {
        "ranks": ranks,
        "strategy": STRATEGIES[strategy] | {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS},
    } | sharing()


def ranked_rollout(senior: int = 2, junior: int = 1) -> dict[str, Any]:
    """The section of a rollout server, with the tensor-parallel size of each model."""
    return {
        "ranks": max(senior, junior),
        "tensor_parallel_size": senior,
        "junior_tensor_parallel_size": junior,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    } | sharing()
