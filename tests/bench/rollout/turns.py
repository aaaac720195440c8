"""Sides that generate in turn, and the time that they take.

Machines drift, so the sides run A B C A B C …, and a ratio is the median over rounds of the ratio
within a round.
"""

from __future__ import annotations

import enum
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
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
        return f"{counted(self.sequences)}, {self.prompt_tokens} + {self.new_tokens} tokens"


def counted(sequences: int) -> str:
    """Returns "1 sequence", "4 sequences"."""
    return f"{sequences} sequence" + "s" * (sequences != 1)


class Phase(enum.Enum):
    """A part of a turn: up to the first new token of every sequence, from there, or both."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    WHOLE = enum.auto()


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

    def took(self, phase: Phase) -> Moment:
        """Returns the time of a phase."""
        if phase is Phase.PREFILL:
            return self.prefill
        if phase is Phase.DECODE:
            return self.decode
        return Moment(
            self.prefill.seconds + self.decode.seconds,
            self.prefill.cpu_seconds + self.decode.cpu_seconds,
        )

    def rate(self, phase: Phase) -> float:
        """Returns tokens per second: those of the prompts in the prefill, else new ones."""
        tokens = {
            Phase.PREFILL: self.job.prompt_tokens,
            # The prefill makes the first one.
            Phase.DECODE: self.job.new_tokens - 1,
            Phase.WHOLE: self.job.new_tokens,
        }[phase]
        return self.job.sequences * tokens / self.took(phase).seconds


class Side(Protocol):
    """A program that generates."""

    def run(self, job: Job) -> Turn:
        """Does the job, and returns its time."""


@dataclass(frozen=True)
class Ratio:
    """The rate of a side by that of its peer.

    Attributes:
        value: by the clock.
        cpu: by CPU time, which other work on the machine disturbs less.
    """

    value: float
    cpu: float

    @property
    def inverse(self) -> Ratio:
        """The time of the side by that of its peer."""
        return Ratio(1 / self.value, 1 / self.cpu)


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

    def rate(self, name: str, phase: Phase) -> float:
        """Returns the median of a side's rate."""
        return statistics.median(turn.rate(phase) for turn in self._turns[name])

    def fastest(self, names: Iterable[str], phase: Phase) -> str | None:
        """Returns the side with the highest median rate; None if no side of `names` ran."""
        ran = [name for name in names if name in self]
        return max(ran, key=lambda name: self.rate(name, phase), default=None)

    def ratio(self, name: str, peer: str, phase: Phase) -> Ratio:
        """Compares the rates of a side and its peer."""
        pairs = list(zip(self._turns[name], self._turns[peer], strict=True))
        return Ratio(
            statistics.median(mine.rate(phase) / theirs.rate(phase) for mine, theirs in pairs),
            # A short phase may take less than a tick of the kernel's clock.
            sum(theirs.took(phase).cpu_seconds for _, theirs in pairs)
            / max(1e-3, sum(mine.took(phase).cpu_seconds for mine, _ in pairs)),
        )

    def print(self) -> None:
        """Prints rates and times of each side: the median, the range, CPU seconds."""
        print(f"\n{self.job}")
        for name, turns in self._turns.items():
            print(
                f"  {name:28}"
                f" prefill {_spread([turn.rate(Phase.PREFILL) for turn in turns])} tokens/s"
                f" {_median(turn.prefill.cpu_seconds for turn in turns):7.2f} CPU s,"
                f" decode {_spread([turn.rate(Phase.DECODE) for turn in turns])} tokens/s"
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
