"""Calls of an `async def`, awaited together in one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from tandem.rewards.judges.cases import (
    FAILURES,
    Case,
    Failure,
    Outcome,
    arguments,
    batch_arguments,
    failure_of,
    number_of,
    numbers_of,
    too_slow,
)
from tandem.rewards.judges.watch import Watch
from tandem.rewards.judges.workers import GivenUp, raise_in, settle

# Seconds that cancelled coroutines have to end.
CLOSE_SECONDS = 5.0


class Awaited:
    """A judge that awaits the calls of an `async def` together, in an event loop of its own.

    The loop lives as long as the judge, in a thread of its own. A session that the function opens
    in one step works in the next, and the caller may run an event loop itself. A call that reaches
    its limit is cancelled and fails. A loop that a call blocks is left to itself, and the next
    calls get another one.
    """

    def __init__(
        self, function: Callable[..., Any], workers: int | None, batch: bool, watch: Watch
    ) -> None:
        self.waits = batch
        self._function = function
        self._workers = workers
        self._batch = batch
        self._watch = watch
        self._lock = threading.Lock()
        self._collected: list[tuple[Case, Future[Outcome]]] = []
        self._loop: _Loop | None = None
        self._closed = False

    def start(self, cases: Sequence[Case]) -> list[Future[Outcome]]:
        """Begins to judge, or with `batch` collects the cases; returns the outcome of each."""
        asked: list[tuple[Case, Future[Outcome]]] = [(case, Future()) for case in cases]
        if self._batch:
            self._collected += asked
        else:
            self._begin(asked)
        return [future for _, future in asked]

    def finish(self) -> None:
        """With `batch`, begins the call that judges all cases."""
        asked, self._collected = self._collected, []
        if asked:
            with self._lock:
                loop = self._running()
                loop.run(self._judge_batch(loop, asked))

    def close(self) -> None:
        """Cancels the calls, and ends the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
            self._closed = True
        if loop is not None:
            # A coroutine that cannot be cancelled must not hold up the exit.
            loop.close(CLOSE_SECONDS)
            for _, future in loop.unfinished():
                settle(future, Failure("the judge was closed"))

    def _begin(self, asked: Sequence[tuple[Case, Future[Outcome]]]) -> None:
        with self._lock:
            if self._closed:
                for _, future in asked:
                    settle(future, Failure("the judge was closed"))
                return
            loop = self._running()
            loop.asked += asked
            for one in asked:
                loop.run(self._judge(loop, *one))

    def _running(self) -> _Loop:
        """Returns the loop. Needs the lock."""
        if self._loop is None:
            self._loop = _Loop(self._workers)
        self._loop.asked = self._loop.unfinished()
        return self._loop

    async def _judge(self, loop: _Loop, case: Case, future: Future[Outcome]) -> None:
        async with loop.free:
            give_up = partial(self._give_up, loop, asyncio.current_task(), [future])
            with self._watch.watched(case.place, give_up):
                try:
                    positional, keywords = arguments(case.copied())
                    outcome = number_of(await self._function(*positional, **keywords))
                except FAILURES as error:
                    outcome = failure_of(error)
            if not loop.lost:
                settle(future, outcome)

    async def _judge_batch(
        self, loop: _Loop, asked: Sequence[tuple[Case, Future[Outcome]]]
    ) -> None:
        futures = [future for _, future in asked]
        give_up = partial(self._give_up, loop, asyncio.current_task(), futures)
        with self._watch.watched(f"{len(asked)} responses", give_up):
            outcomes: Sequence[Outcome]
            try:
                positional, details = batch_arguments([case.copied() for case, _ in asked])
                outcomes = numbers_of(await self._function(*positional, **details), len(asked))
            except FAILURES as error:
                outcomes = [failure_of(error)] * len(asked)
        for future, outcome in zip(futures, outcomes, strict=True):
            settle(future, outcome)

    def _give_up(
        self, loop: _Loop, task: asyncio.Task[None], futures: Sequence[Future[Outcome]]
    ) -> None:
        """Ends a call at its limit; called in the thread of the watch."""
        if loop.lost:
            return
        for future in futures:
            settle(future, too_slow(self._watch.limit))
        if loop.cancel(task, CLOSE_SECONDS):
            return
        # The call blocks the loop. The others are made again in another one.
        loop.abandon()
        with self._lock:
            if self._loop is loop:
                self._loop = None
        self._begin(loop.unfinished())


class _Loop:
    """An event loop in a thread.

    Attributes:
        free: bounds the calls that run at once.
        asked: the cases that the loop was given, with their outcomes.
        lost: whether a call blocks the loop.
    """

    free: AbstractAsyncContextManager[Any]

    def __init__(self, workers: int | None) -> None:
        self.asked: list[tuple[Case, Future[Outcome]]] = []
        self.lost = False
        self._workers = workers
        self._runs = threading.Event()
        self._thread = threading.Thread(target=self._run, name="judge-loop", daemon=True)
        self._thread.start()
        self._runs.wait()

    def unfinished(self) -> list[tuple[Case, Future[Outcome]]]:
        """Returns the cases without an outcome."""
        return [one for one in self.asked if not one[1].done()]

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def cancel(self, task: asyncio.Task[None], seconds: float) -> bool:
        """Cancels a task; whether the loop did so within `seconds`."""
        done = threading.Event()

        def cancel() -> None:
            task.cancel()
            done.set()

        self._loop.call_soon_threadsafe(cancel)
        return done.wait(seconds)

    def abandon(self) -> None:
        """Leaves the loop to itself; a call that computes in Python ends."""
        self.lost = True
        raise_in(self._thread, GivenUp)

    def close(self, seconds: float) -> None:
        """Cancels what runs, and waits for the end of the loop for at most `seconds`."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(seconds)

    def _run(self) -> None:
        with suppress(GivenUp):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self.free = asyncio.Semaphore(self._workers) if self._workers else nullcontext()
        self._runs.set()
        await self._closing.wait()
