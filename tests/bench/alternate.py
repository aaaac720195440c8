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

    def take_turns(self, sides: Mapping[str, Callable[[], int]], rounds: int) -> None:
        """Runs every side `rounds` times after a warm-up.

        A side does its work and returns how many units it made.
        """
        for _ in range(rounds + 1):
            for name, work in sides.items():
                self.start()
                self.stop(name, work())

    def report(self) -> dict[str, float]:
        """Prints a line per side; returns each side's median ratio to the peer."""
        ratios = {name: self.ratio(name, self._peer) for name in self._timings}
        for name, ratio in ratios.items():
            rates, cpu = self._rates(name), [t.cpu_seconds for t in self._timings[name][1:]]
            print(
                f"  {name:24} {statistics.median(rates):8.1f} {self._unit}/s"
                f"  ({min(rates):.1f} to {max(rates):.1f})  {ratio:5.2f} x {self._peer}"
                f"  {statistics.median(t.seconds for t in self._timings[name][1:]):6.2f} s"
                f"  {statistics.median(cpu):6.2f} CPU s ({min(cpu):.2f} to {max(cpu):.2f})",
                flush=True,
            )
        return ratios

    def ratio(self, name: str, peer: str) -> float:
        """Returns the median over rounds of a side's rate relative to a peer's."""
        pairs = zip(self._rates(name), self._rates(peer), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def fastest(self, names: Iterable[str]) -> str:
        """Returns the side with the highest median rate."""
        return max(names, key=lambda name: statistics.median(self._rates(name)))

    def report_bar(self, name: str, peer: str, bar: float) -> None:
        """Prints whether a side has `bar` times the rate of a peer, with the ratio in CPU time."""
        ratio, cpu = self.ratio(name, peer), 1 / self.cpu_ratios(peer)[name]
        verdict = "met" if ratio >= bar else "MISSED"
        print(f"  {name} by {peer}: {ratio:.2f} (CPU time {cpu:.2f}), bar {bar}: {verdict}")

    def cpu_ratios(self, peer: str | None = None) -> dict[str, float]:
        """Returns each side's CPU seconds relative to a peer's, the median over rounds.

        Other load on the machine disturbs them less than it does the rates.
        """
        of_peer = [timing.cpu_seconds for timing in self._timings[peer or self._peer][1:]]
        return {
            name: statistics.median(
                mine.cpu_seconds / theirs for mine, theirs in zip(timings[1:], of_peer, strict=True)
            )
            for name, timings in self._timings.items()
        }

    def _rates(self, name: str) -> list[float]:
        return [timing.rate for timing in self._timings[name][1:]]

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
    """Compares sides that alternate (Comparison.take_turns), and reports."""
    comparison = Comparison(peer=peer, unit=unit, pids=pids)
    comparison.take_turns(sides, rounds)
    return comparison.report()
