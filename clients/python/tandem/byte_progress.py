"""Progress of work that is measured in bytes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.render import Output

# Seconds between two lines where there is no terminal.
_SECONDS_BETWEEN_LINES = 30.0

# Tells how many bytes are done, of how many.
OnBytes = Callable[[int, int], None]


class ByteCount:
    """Adds bytes up, and tells the sum to `progress`, if there is one.

    Attributes:
        total: number of bytes when all is done.
    """

    def __init__(self, total: int, progress: OnBytes | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self.add(0)

    def add(self, count: int) -> None:
        """Adds the bytes that are newly done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self.total)


class ByteProgress:
    """Shows the progress of a command; a context manager.

    On a terminal a bar, which disappears at the end; else a note every 30 seconds.
    """

    def __init__(
        self, output: Output, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = output
        self._title = title
        self._clock = clock
        self._told = clock()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._output.notes.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=self._output.notes,
                transient=True,
            )
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif (now := self._clock()) - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            self._output.note(f"{self._title}: {done / 1e9:.2f} of {total / 1e9:.2f} GB")
