"""Ctrl-C: it ends a run at once while nothing can be lost; later the first one asks for a stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopRequested(Exception):  # noqa: N818
    """Work was given up because the run was asked to stop; steps before it are not lost."""


class Interrupt:
    """A context manager over SIGINT and SIGTERM, which it treats alike.

    Either raises KeyboardInterrupt, so that everything that is open gets closed. After defer() the
    first one only sets `requested` and calls `on_request`; the second raises.
    """

    def __init__(self, on_request: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._deferred = False
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """Makes the first signal from now on only set `requested`."""
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._deferred:
            raise KeyboardInterrupt
        self.requested = True
        if self._on_request is not None:
            self._on_request()
