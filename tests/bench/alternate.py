"""Times alternatives in turn and reports medians, spreads and ratios to a peer.

Machines drift: the sides run A B C A B C …, and a ratio is the median of the ratios of one turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    sides: Mapping[str, Callable[[], int]], *, peer: str, rounds: int, unit: str
) -> dict[str, float]:
    """Runs every side `rounds` times after one warm-up; returns each side's median ratio to `peer`.

    A side does its work and returns how many units (for example tokens) it made.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, work in sides.items():
            start = time.perf_counter()
            amount = work()
            if turn > 0:
                rates[name].append(amount / (time.perf_counter() - start))
    ratios = {}
    for name, values in rates.items():
        ratios[name] = statistics.median(
            mine / theirs for mine, theirs in zip(values, rates[peer], strict=True)
        )
        print(
            f"  {name:32} {statistics.median(values):8.1f} {unit}/s"
            f"  ({min(values):.1f} to {max(values):.1f})  {ratios[name]:5.2f} x {peer}",
            flush=True,
        )
    return ratios
