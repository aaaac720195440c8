"""Times alternatives in turn and reports medians, spreads, ratios to a peer and CPU time.

Machines drift, so the sides run A B C A B C …, and a ratio is the median over rounds of the ratio
within a round. CPU seconds are summed over this process and the processes `pids`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """The work of one side in one turn, and the time it took."""

    amount: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.amount / self.seconds


class Comparison:
    """Timings of sides that work in turns; the first turn of each is a warm-up, not counted."""

    def __init__(self, *, peer: str, unit: str, pids: Iterable[int]) -> None:
        self._peer = peer
        self._unit = unit
        self._pids = list(pids)
        self._timings: dict[str, list[Timing]] = {}
        self._start = (0.0, 0.0)

    def start(self) -> None:
        """Begins the turn of a side."""
        self._start = (time.perf_counter(), self._cpu_seconds())

    def stop(self, name: str, amount: int) -> None:
        """Ends the turn of side `name`, which made `amount` units (for example tokens)."""
        seconds, cpu = time.perf_counter() - self._start[0], self._cpu_seconds() - self._start[1]
        self._timings.setdefault(name, []).append(Timing(amount, seconds, cpu))

    def report(self) -> dict[str, float]:
        """Prints a line per side; returns each side's median ratio to the peer."""
        ratios = {}
        peer = [timing.rate for timing in self._timings[self._peer][1:]]
        for name, timings in self._timings.items():
            counted = timings[1:]
            rates = [timing.rate for timing in counted]
            ratios[name] = statistics.median(
                mine / theirs for mine, theirs in zip(rates, peer, strict=True)
            )
            print(
                f"  {name:24} {statistics.median(rates):8.1f} {self._unit}/s"
                f"  ({min(rates):.1f} to {max(rates):.1f})  {ratios[name]:5.2f} x {self._peer}"
                f"  {statistics.median(t.seconds for t in counted):6.2f} s"
                f"  {statistics.median(t.cpu_seconds for t in counted):6.2f} CPU s",
                flush=True,
            )
        return ratios

    def cpu_ratios(self) -> dict[str, float]:
        """Returns each side's CPU seconds relative to the peer's, the median over rounds.

        Other load on the machine disturbs them less than it does the rates.
        """
        peer = [timing.cpu_seconds for timing in self._timings[self._peer][1:]]
        return {
            name: statistics.median(
                mine.cpu_seconds / theirs for mine, theirs in zip(timings[1:], peer, strict=True)
            )
            for name, timings in self._timings.items()
        }

    def _cpu_seconds(self) -> float:
        return time.process_time() + sum(map(_cpu_seconds_of, self._pids))


def _cpu_seconds_of(pid: int) -> float:
    # utime and stime are fields 12 and 13 behind the command's name, which may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alternate(
    sides: Mapping[str, Callable[[], int]],
    *,
    peer: str,
    rounds: int,
    unit: str,
    pids: Iterable[int],
) -> dict[str, float]:
    """Runs every side `rounds` times after a warm-up, and reports.

    A side does its work and returns how many units it made.
    """
    comparison = Comparison(peer=peer, unit=unit, pids=pids)
    for _ in range(rounds + 1):
        for name, work in sides.items():
            comparison.start()
            comparison.stop(name, work())
    return comparison.report()
