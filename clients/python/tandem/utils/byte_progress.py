"""Counts of work that is measured in bytes; Progress.bytes_done is one that they may be told to."""

from __future__ import annotations

from collections.abc import Callable

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
