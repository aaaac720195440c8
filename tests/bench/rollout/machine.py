"""This machine: its CPU, and the limits that a run measures."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

# Instruction sets that kernels choose by.
_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_READ_BYTES = 1 << 30
_PRODUCT_SIZE = 2048


def describe() -> str:
    """Returns the CPU's model, the number of cores and its instruction sets."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    held = " ".join(flag for flag in _FLAGS if flag in flags) or "none of " + " ".join(_FLAGS)
    cores = len(os.sched_getaffinity(0))
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    return (
        f"{fields.get('model name', 'unknown CPU')}, {cores} cores: {held}\n"
        f"load {os.getloadavg()[0]:.1f}; OMP_WAIT_POLICY of the peers: {policy}"
    )


class Limits:
    """The highest rates that this machine reaches, measured at several times of a run."""

    def __init__(self) -> None:
        self._words = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
        rows = torch.ones(_READ_BYTES // 4)
        self._matrix = rows.view(_READ_BYTES // 4 // 16384, 16384)
        self._reads: list[float] = []
        self._products: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}

    def measure(self) -> None:
        """Measures once more."""
        vector = torch.ones(self._matrix.shape[1])
        threads = torch.get_num_threads()
        reads = []
        # libtorch has no function that only reads. A sum of integers and a product with a vector
        # reach the highest rates; which one leads depends on the machine.
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            reads += [_rate(_READ_BYTES, self._words.sum)]
            reads += [_rate(_READ_BYTES, lambda: torch.mv(self._matrix, vector))]
        torch.set_num_threads(threads)
        self._reads.append(max(reads))
        for dtype, rates in self._products.items():
            # Without instructions for bfloat16 its products take hundreds of times longer.
            size = _PRODUCT_SIZE if dtype == torch.float32 else _PRODUCT_SIZE // 4
            square = torch.randn(size, size).to(dtype)
            rates.append(_rate(2 * size**3, lambda m=square: m @ m))

    @property
    def read_bytes(self) -> float:
        """Bytes per second of the fastest read of 1 GiB of memory, median."""
        return statistics.median(self._reads)

    def product_flops(self, dtype: str) -> float:
        """Operations per second of the fastest square products for inputs of this type, median.

        Those of bfloat16 are at least those of float32, to which inputs can be widened.
        """
        wide = statistics.median(self._products[torch.float32])
        return max(wide, statistics.median(self._products[getattr(torch, dtype)]))

    def print(self) -> None:
        """Prints the limits with their ranges."""
        sizes = {torch.float32: _PRODUCT_SIZE, torch.bfloat16: _PRODUCT_SIZE // 4}
        print("\nlimits of the machine, median (range) over the run")
        print(f"  memory read {_billions(self._reads)} GB/s")
        for dtype, rates in self._products.items():
            name = str(dtype).removeprefix("torch.")
            print(f"  products of {name}, {sizes[dtype]}²: {_billions(rates)} GFLOP/s")


def _rate(amount: int, work: Callable[[], object]) -> float:
    work()
    begin = time.perf_counter()
    work()
    return amount / (time.perf_counter() - begin)


def _billions(values: list[float]) -> str:
    low, high = min(values) / 1e9, max(values) / 1e9
    return f"{statistics.median(values) / 1e9:.1f} ({low:.1f} to {high:.1f})"
