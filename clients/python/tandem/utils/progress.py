"""The work that a command is doing at the moment: its phase, counts and rate.

Whoever works tells a Progress; a display reads it when it draws. So telling costs next to nothing,
and nobody who works knows where it is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.utils.words import duration

Clock = Callable[[], float]

# Phases that metrics.jsonl and people call differently.
_WORDS = {"eval": "evaluate", "checkpoint": "save"}


@dataclass
class _Phase:
    name: str
    begun: float
    done: int = 0
    total: int = 0
    tokens: int = 0
    in_bytes: bool = False


class Progress:
    """The phase that runs, with what is done of it. Thread-safe.

    Attributes:
        beside: of work in another thread, which line() tells too.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.beside: Progress | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: list[_Phase] = []
        self._head = ""

    def begin(self, head: str) -> None:
        """Names what the phases from now on belong to: "step 3"."""
        with self._lock:
            self._head = head

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Makes the block a phase. Inside of another one it is shown in the other's place."""
        one = _Phase(_WORDS.get(name, name), self._clock())
        with self._lock:
            self._phases.append(one)
        try:
            yield
        finally:
            with self._lock:
                self._phases.remove(one)

    def expect(self, total: int) -> None:
        """Starts to count in the phase that runs: `total` things are to be done."""
        with self._lock:
            if self._phases:
                one = self._phases[-1]
                one.done, one.total, one.tokens, one.in_bytes = 0, total, 0, False
                one.begun = self._clock()

    def advance(self, count: int = 1, tokens: int = 0) -> None:
        """Adds to what is done of the phase that runs."""
        with self._lock:
            if self._phases:
                self._phases[-1].done += count
                self._phases[-1].tokens += tokens

    def counted(self, done: int, total: int) -> None:
        """Says how many things of the phase that runs are done, for work that tells no changes."""
        with self._lock:
            if self._phases:
                self._phases[-1].done, self._phases[-1].total = done, total

    def bytes_done(self, done: int, total: int) -> None:
        """Says how many bytes of the phase that runs are done."""
        with self._lock:
            if self._phases:
                one = self._phases[-1]
                one.done, one.total, one.in_bytes = done, total, True

    def line(self) -> str:
        """Returns the work in words: "step 3: generate 37/64, 1.2k tok/s, 12s"; "" for none.

        The work beside it follows a semicolon.
        """
        beside = self.beside.line() if self.beside is not None else ""
        return "; ".join(filter(None, [self._own_line(), beside]))

    def _own_line(self) -> str:
        with self._lock:
            if not self._phases:
                return ""
            one, head = self._phases[-1], self._head
            seconds = max(0.0, self._clock() - one.begun)
            said = [f"{head}: {one.name}" if head else one.name]
            if one.total and one.in_bytes:
                said[0] += f" {_bytes(one.done)} of {_bytes(one.total)}"
            elif one.total:
                said[0] += f" {one.done:,}/{one.total:,}"
            if seconds > 0 and one.tokens:
                said.append(f"{_short(one.tokens / seconds)} tok/s")
            elif seconds > 0 and one.in_bytes and one.done:
                said.append(f"{_bytes(one.done / seconds)}/s")
        return ", ".join([*said, duration(seconds)])


class ProgressLines:
    """Prints the line of a Progress every `seconds` while it works; a context manager.

    For logs and pipes: work that is shorter prints nothing.
    """

    def __init__(
        self,
        progress: Progress,
        say: Callable[[str], None],
        seconds: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._progress = progress
        self._say = say
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def tick(self) -> None:
        """Prints the line if it is time to."""
        now = self._clock()
        if now - self._last < self._seconds:
            return
        self._last = now
        if line := self._progress.line():
            self._say(line)

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds)):
            self.tick()


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"
