"""Calls in the thread that waits for the results, in most runs the main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

from tandem.rewards.judges.cases import (
    FAILURES,
    Case,
    Outcome,
    batch_arguments,
    call,
    failure_of,
    numbers_of,
    too_slow,
)
from tandem.rewards.judges.watch import Watch, WatchedCall
from tandem.rewards.judges.workers import GivenUp, raise_in, settle
from tandem.utils.interrupt import StopRequested

# Ends a call in the main thread. Time limits of the function's own take SIGALRM.
_SIGNAL = signal.SIGVTALRM
_MOMENT_SECONDS = 0.001


class OneByOne:
    """A judge that makes its calls in finish(), one after the other.

    A call that reaches its limit is ended as soon as it runs Python code; outside of Python it goes
    on. StopRequested is raised when the run is asked to stop.
    """

    waits = True

    def __init__(self, function: Callable[..., Any] | None, watch: Watch) -> None:
        """`function` judges the cases of start()."""
        self._function = function
        self._watch = watch
        self._calls: list[tuple[str, Callable[[], Outcome], Future[Outcome]]] = []

    def start(self, cases: Sequence[Case]) -> list[Future[Outcome]]:
        """Collects the cases; returns the outcome of each."""
        assert self._function is not None
        return [self.add(case.place, partial(call, self._function, case)) for case in cases]

    def add(self, place: str, make: Callable[[], Outcome]) -> Future[Outcome]:
        """Collects a call for the row at `place`; returns its outcome."""
        future: Future[Outcome] = Future()
        self._calls.append((place, make, future))
        return future

    def finish(self) -> None:
        """Makes the calls."""
        calls, self._calls = self._calls, []
        for place, make, future in calls:
            settle(future, _limited(self._watch, place, make, too_slow(self._watch.limit)))

    def close(self) -> None:
        """Does nothing: no call runs."""


class InOneCall:
    """A judge that makes one call for all cases in finish(), under the rules of OneByOne."""

    waits = True

    def __init__(self, function: Callable[..., Any], watch: Watch) -> None:
        self._function = function
        self._watch = watch
        self._asked: list[tuple[Case, Future[Outcome]]] = []

    def start(self, cases: Sequence[Case]) -> list[Future[Outcome]]:
        """Collects the cases; returns the outcome of each."""
        asked: list[tuple[Case, Future[Outcome]]] = [(case, Future()) for case in cases]
        self._asked += asked
        return [future for _, future in asked]

    def finish(self) -> None:
        """Makes the call."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        cases = [case for case, _ in asked]
        late: list[Outcome] = [too_slow(self._watch.limit)] * len(cases)
        outcomes = _limited(
            self._watch, f"{len(cases)} responses", partial(self._judge, cases), late
        )
        for (_, future), outcome in zip(asked, outcomes, strict=True):
            settle(future, outcome)

    def close(self) -> None:
        """Does nothing: no call runs."""

    def _judge(self, cases: Sequence[Case]) -> list[Outcome]:
        try:
            positional, details = batch_arguments([case.copied() for case in cases])
            return numbers_of(self._function(*positional, **details), len(cases))
        except FAILURES as error:
            return [failure_of(error)] * len(cases)


# The call that runs in the main thread, while it may be ended.
_current: WatchedCall | None = None


def _limited(watch: Watch, place: str, make: Callable[[], Any], late: Any) -> Any:
    """Returns what `make` returns, or `late` if it is given up because of its limit."""
    global _current
    if threading.current_thread() is not threading.main_thread():
        return _limited_in_thread(watch, place, make, late)
    # It stays: a signal may arrive when its call has ended.
    signal.signal(_SIGNAL, _end_current)
    main = threading.get_ident()
    with watch.watched(place, lambda: signal.pthread_kill(main, _SIGNAL)) as watched:
        try:
            _current = watched
            return make()
        except GivenUp:
            if watched.stopped:
                raise StopRequested from None
            return late
        finally:
            _current = None


def _limited_in_thread(watch: Watch, place: str, make: Callable[[], Any], late: Any) -> Any:
    """Does what _limited() does in a thread that is not the main one, which gets no signals."""
    thread = threading.current_thread()
    watched = watch.begin(place, lambda: raise_in(thread, GivenUp))
    try:
        result = make()
        if watch.end(watched):
            return result
        # The exception is on its way, and must not be raised in what comes next.
        while True:
            time.sleep(_MOMENT_SECONDS)
    except GivenUp:
        if watched.stopped:
            raise StopRequested from None
        return late


def _end_current(number: int, frame: FrameType | None) -> None:
    global _current
    if _current is not None and _current.given_up:
        _current = None
        raise GivenUp
