"""The time that calls of a judge take: a note about a long one, the end of one beyond its limit."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


# Seconds after which a call that runs is told, and between two notes.
NOTE_SECONDS = 30.0
# Seconds that calls have to end once the run was asked to stop.
STOP_SECONDS = 5.0
# Seconds between two looks at whether it was.
_LOOK_SECONDS = 0.5


@dataclass(eq=False)
class WatchedCall:
    """A call that runs.

    Attributes:
        place: where its row stands.
        give_up: ends the call, or leaves it to itself, when it has reached its limit.
        given_up: whether that happened.
        stopped: whether it was given up because the run was asked to stop.
    """

    place: str
    give_up: Callable[[], None]
    started: float = field(default_factory=time.monotonic)
    given_up: bool = False
    stopped: bool = False


class Watch:
    """Watches the calls of one function. Thread-safe.

    Attributes:
        limit: most seconds of a call.
    """

    def __init__(
        self,
        name: str,
        limit: float,
        stopping: Callable[[], bool] | None = None,
    ) -> None:
        """`name` begins the messages about long calls.

        With `stopping`, which says whether the run was asked to stop, calls are given up for that,
        too.
        """
        self.limit = limit
        self._name = name
        self._stopping = stopping
        self._asked_to_stop_at: float | None = None
        self._changed = threading.Condition()
        # In the order of their start, so the first one reaches its limit first.
        self._running: dict[WatchedCall, None] = {}
        self._told_at = -math.inf
        self._thread: threading.Thread | None = None

    def begin(self, place: str, give_up: Callable[[], None]) -> WatchedCall:
        """Watches a call that begins now. `give_up` is called in another thread."""
        call = WatchedCall(place, give_up)
        with self._changed:
            self._running[call] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="judge-watch", daemon=True)
                self._thread.start()
            elif len(self._running) == 1:
                self._changed.notify()
        return call

    def end(self, call: WatchedCall) -> bool:
        """Watches a call no longer; whether it ended before it was given up."""
        with self._changed:
            self._running.pop(call, None)
            return not call.given_up

    @contextmanager
    def watched(self, place: str, give_up: Callable[[], None]) -> Iterator[WatchedCall]:
        """Watches a call for as long as the body runs."""
        call = self.begin(place, give_up)
        try:
            yield call
        finally:
            self.end(call)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                due = self._due()
                if due is None:
                    continue
            due()

    def _due(self) -> Callable[[], None] | None:
        """Returns what is due; waits and returns None if nothing is. Needs the lock."""
        oldest = next(iter(self._running))
        now = time.monotonic()
        seconds = now - oldest.started
        stops = self._stops_at(oldest, now)
        if seconds >= self.limit or now >= stops:
            del self._running[oldest]
            oldest.given_up, oldest.stopped = True, now >= stops
            return oldest.give_up
        if seconds >= NOTE_SECONDS and now - self._told_at >= NOTE_SECONDS:
            self._told_at = now
            return self._telling(oldest, seconds)
        told = max(oldest.started, self._told_at) + NOTE_SECONDS
        until = min(told, oldest.started + self.limit, stops)
        if self._stopping is not None:
            until = min(until, now + _LOOK_SECONDS)
        self._changed.wait(max(0.001, until - now))
        return None

    def _stops_at(self, call: WatchedCall, now: float) -> float:
        """Returns when a call is given up because the run was asked to stop."""
        if self._asked_to_stop_at is None and self._stopping is not None and self._stopping():
            self._asked_to_stop_at = now
        if self._asked_to_stop_at is None:
            return math.inf
        return max(self._asked_to_stop_at, call.started) + STOP_SECONDS

    def _telling(self, oldest: WatchedCall, seconds: float) -> Callable[[], None]:
        late = [one for one in self._running if time.monotonic() - one.started >= NOTE_SECONDS]
        others = f" ({len(late) - 1} other calls have run that long)" if len(late) > 1 else ""
        text = (
            f"{self._name} has run for {seconds:.0f} s for {oldest.place}{others}; it is given up "
            f"after {self.limit:g} s (timeout_seconds)"
        )
        return lambda: _log.info(text)
