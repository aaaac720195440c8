"""Sides that generate in turn, and the time that they take.

Machines drift, so the sides run A B C A B C …, and a ratio is the median over rounds of the ratio
within a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Job:
    """The work of a turn: sequences, tokens of each prompt, tokens written after each prompt."""

    sequences: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        count = f"{self.sequences} sequence" + "s" * (self.sequences != 1)
        return f"{count}, {self.prompt_tokens} + {self.new_tokens} tokens"


@dataclass(frozen=True)
class Moment:
    """The clock, and the CPU seconds of some processes."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls, pids: Iterable[int] = ()) -> Moment:
        """Returns the present moment of this process and `pids`."""
        cpu = time.process_time() + sum(map(_cpu_seconds_of, pids))
        return cls(time.perf_counter(), cpu)

    def __sub__(self, earlier: Moment) -> Moment:
        return Moment(self.seconds - earlier.seconds, self.cpu_seconds - earlier.cpu_seconds)


@dataclass(frozen=True)
class Turn:
    """The time of one job.

    Attributes:
        prefill: from the request to the first new token of every sequence.
        decode: from there to the last token.
        authors: with tandem, the authorship masks of the responses (1: senior).
    """

    job: Job
    prefill: Moment
    decode: Moment
    authors: Sequence[bytes] = ()

    @property
    def whole(self) -> Moment:
        """From the request to the last token."""
        return Moment(
            self.prefill.seconds + self.decode.seconds,
            self.prefill.cpu_seconds + self.decode.cpu_seconds,
        )

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts per second."""
        return self.job.sequences * self.job.prompt_tokens / self.prefill.seconds

    @property
    def decode_rate(self) -> float:
        """New tokens per second. The prefill makes the first token of a sequence."""
        return self.job.sequences * (self.job.new_tokens - 1) / self.decode.seconds

    @property
    def whole_rate(self) -> float:
        """New tokens per second from the request on."""
        return self.job.sequences * self.job.new_tokens / self.whole.seconds


class Side(Protocol):
    """A program that generates."""

    def run(self, job: Job) -> Turn:
        """Does the job, and returns its time."""


Rate = Callable[[Turn], float]


class Turns:
    """The turns of sides that alternate; the first of each is a warm-up and not counted."""

    def __init__(self, sides: Mapping[str, Side], job: Job, rounds: int) -> None:
        self.job = job
        self._turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for count in range(rounds + 1):
            for name, side in sides.items():
                turn = side.run(job)
                if count > 0:
                    self._turns[name].append(turn)

    def __contains__(self, name: str) -> bool:
        return name in self._turns

    def of(self, name: str) -> list[Turn]:
        """Returns a side's turns."""
        return self._turns[name]

    def rate(self, name: str, rate: Rate) -> float:
        """Returns the median of a side's rate."""
        return statistics.median(map(rate, self._turns[name]))

    def fastest(self, names: Iterable[str], rate: Rate) -> str | None:
        """Returns the side with the highest median rate; None if no side of `names` ran."""
        ran = [name for name in names if name in self]
        return max(ran, key=lambda name: self.rate(name, rate), default=None)

    def ratio(self, name: str, peer: str, rate: Rate) -> float:
        """Returns a side's rate by its peer's."""
        return statistics.median(
            rate(mine) / rate(theirs)
            for mine, theirs in zip(self._turns[name], self._turns[peer], strict=True)
        )

    def print(self) -> None:
        """Prints rates and times of each side: the median, the range, CPU seconds."""
        print(f"\n{self.job}")
        for name, turns in self._turns.items():
            print(
                f"  {name:28}"
                f" prefill {_spread([turn.prefill_rate for turn in turns])} tokens/s"
                f" {_median(turn.prefill.cpu_seconds for turn in turns):7.2f} CPU s,"
                f" decode {_spread([turn.decode_rate for turn in turns])} tokens/s"
                f" {_median(turn.decode.cpu_seconds for turn in turns):7.2f} CPU s",
                flush=True,
            )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> str:
    return f"{_median(values):8.1f} ({min(values):.1f} to {max(values):.1f})"


def _cpu_seconds_of(pid: int) -> float:
    # utime and stime are fields 12 and 13 behind the command's name, which may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
