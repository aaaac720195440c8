"""Bytes that the project's GPU kernels read and write, computed from how they are written.

`moved` counts what a launch's blocks read from memory or its cache and write there, with every
repetition; `least` counts every number once. A kernel whose repetitions a cache serves moves less
from memory. Shapes: attention and layers decode 64 sequences of 1,024 tokens of a model of
Qwen2.5-7B's shape in bfloat16; experts are those of Qwen3-30B-A3B, whose 128 experts get 64 rows
each; the loss has 8,192 rows of 152,064 float32 logits.
"""

from __future__ import annotations

from collections.abc import Callable

ROWS, KEYS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 1024, 3584, 28, 4, 128, 18944
SPLIT = 128  # kPagedSplitKeys
TILE = 64  # kTile of grouped.cu
EXPERTS, EXPERT_ROWS, EXPERT_IN, EXPERT_OUT = 128, 64, 2048, 1536  # gate and up
LOSS_ROWS, VOCABULARY = 8192, 152064
HALF, FLOAT = 2, 4  # bytes of a number

Bytes = tuple[float, float]  # moved, least


def attention(number: int) -> Bytes:
    """Keys and values once for the 7 query heads of each; a partial result for each split."""
    queries = outputs = ROWS * HEADS * HEAD_DIM * number
    cache = ROWS * KEYS * KV_HEADS * HEAD_DIM * 2 * number
    return queries + cache + partials(), queries + cache + outputs


def partials() -> float:
    """Highest score, sum, and float32 outputs, for each split, row and head."""
    return ROWS * KEYS / SPLIT * HEADS * (HEAD_DIM + 2) * FLOAT


def fold(number: int) -> Bytes:
    """The partial results once."""
    once = partials() + ROWS * HEADS * HEAD_DIM * number
    return once, once


def cache_write(number: int) -> Bytes:
    """Keys and values of the rows, and where they belong."""
    once = ROWS * (KV_HEADS * HEAD_DIM * 2 * 2 * number + 2 * 8)
    return once, once


def gated(number: int) -> Bytes:
    """Gates and ups once."""
    once = ROWS * WIDTH * 3 * number
    return once, once


def rms_norm(number: int) -> Bytes:
    """Rows twice, and the weight for each row."""
    row = HIDDEN * number
    return ROWS * 4 * row, ROWS * 2 * row + row


def rotary(number: int) -> Bytes:
    """Every number with its pair."""
    row = HEADS * HEAD_DIM * number
    angles = HEAD_DIM // 2 * 2 * FLOAT
    return ROWS * (3 * row + HEADS * 2 * angles), ROWS * (2 * row + angles)


def logit_statistics(_: int) -> Bytes:
    """Logits once."""
    once = LOSS_ROWS * VOCABULARY * FLOAT
    return once, once


def logit_gradient(_: int) -> Bytes:
    """Logits once, and gradients of float32 in their place."""
    once = LOSS_ROWS * VOCABULARY * 2 * FLOAT
    return once, once


def grouped_linear(number: int) -> Bytes:
    """A tile of 64 rows and 64 outputs reads its rows and its outputs' weights."""
    tiles = EXPERTS * (EXPERT_ROWS / TILE) * (EXPERT_OUT / TILE)
    written = EXPERTS * EXPERT_ROWS * EXPERT_OUT * number
    weights = EXPERTS * EXPERT_IN * EXPERT_OUT * number
    rows = EXPERTS * EXPERT_ROWS * EXPERT_IN * number
    return tiles * 2 * TILE * EXPERT_IN * number + written, weights + rows + written


def grouped_gradient(number: int) -> Bytes:
    """A tile of 64 outputs and 64 inputs reads their columns of all rows, and adds to float32."""
    tiles = EXPERTS * (EXPERT_OUT / TILE) * (EXPERT_IN / TILE)
    sums = EXPERTS * EXPERT_OUT * EXPERT_IN * 2 * FLOAT
    rows = EXPERTS * EXPERT_ROWS * (EXPERT_OUT + EXPERT_IN) * number
    return tiles * 2 * TILE * EXPERT_ROWS * number + sums, rows + sums


KERNELS: dict[str, Callable[[int], Bytes]] = {
    "PagedAttention": attention,
    "CacheWrite": cache_write,
    "FoldPartials": fold,
    "Gated": gated,
    "GroupedLinear": grouped_linear,
    "GroupedGradient": grouped_gradient,
    "LogitGradient": logit_gradient,
    "LogitStatistics": logit_statistics,
    "RmsNorm": rms_norm,
    "Rotary": rotary,
}


def by_least(kernel: str, number: int) -> float:
    """Returns the bytes that a kernel moves, by the least that it could."""
    moved, least = KERNELS[kernel](number)
    return moved / least
