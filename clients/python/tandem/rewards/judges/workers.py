"""Calls in threads of this process, and in processes with a thread each."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from tandem.rewards.judges.cases import Case, Failure, Outcome, call, failure_of, too_slow
from tandem.rewards.judges.watch import Watch

# Most threads whose calls were given up and have not returned; no worker replaces a further one.
MOST_ABANDONED = 256


class Placed(Protocol):
    """Something to call for, with the place of its row."""

    @property
    def place(self) -> str:
        """The place, for notes about long calls."""
        ...


Asked = TypeVar("Asked", bound=Placed, contravariant=True)
Answer = TypeVar("Answer", covariant=True)


class Caller(Protocol[Asked, Answer]):
    """The maker of one worker's calls."""

    def __call__(self, case: Asked) -> Answer | Failure:
        """Returns what the call gives, or why it failed."""
        ...

    def prepare(self) -> Failure | None:
        """Makes the caller ready for a call, which takes no time of the call's limit."""
        ...

    def end(self) -> bool:
        """Ends the call that runs, and every later one; False if a call cannot be ended.

        It is called in another thread.
        """
        ...


class InThisProcess:
    """Calls a function in the worker's thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, case: Case) -> Outcome:
        """Returns what the function gives the case."""
        return call(self._function, case)

    def prepare(self) -> None:
        """Does nothing: the function is there."""

    def end(self) -> bool:
        """Returns False: a thread cannot be ended."""
        return False


def settle(future: Future[Any], outcome: Any) -> None:
    """Gives a future its outcome, unless it has one."""
    with suppress(InvalidStateError):
        future.set_result(outcome)


class Workers(Generic[Asked, Answer]):
    """A judge with a number of threads, each of which makes one call at a time.

    A call that reaches its limit is a failure, and another worker replaces the one that made it.
    The call is ended if it can be; one in a thread that waits outside of Python goes on until it
    returns.
    """

    waits = False

    def __init__(
        self,
        count: int,
        make_caller: Callable[[], Caller[Asked, Answer]],
        watch: Watch,
        advice: str = "; `executor: process` can",
    ) -> None:
        """`advice` ends the message about calls that never return."""
        self._advice = advice
        self._count = count
        self._make_caller = make_caller
        self._watch = watch
        self._tasks: queue.SimpleQueue[tuple[Asked, Future[Answer | Failure]] | None]
        self._tasks = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: dict[threading.Thread, Caller[Asked, Answer]] = {}
        # Threads whose call was given up and has not returned.
        self._abandoned: list[threading.Thread] = []
        self._closed = False

    def start(self, cases: Sequence[Asked]) -> list[Future[Answer | Failure]]:
        """Begins to judge; returns the outcome of each case."""
        futures: list[Future[Answer | Failure]] = [Future() for _ in cases]
        with self._lock:
            for case, future in zip(cases, futures, strict=True):
                self._tasks.put((case, future))
                if len(self._workers) < self._count:
                    self._hire()
            self._fail_if_nobody_works()
        return futures

    def finish(self) -> None:
        """Does nothing: the calls run in threads of their own."""

    def close(self) -> None:
        """Ends the workers. A call that can be ended fails, any other is left to itself."""
        with self._lock:
            self._closed = True
            self._fail_waiting("the judge was closed")
            for caller in self._workers.values():
                caller.end()
                self._tasks.put(None)

    def _hire(self) -> None:
        """Starts a worker, unless too many threads are lost. Needs the lock."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if self._closed or len(self._abandoned) >= MOST_ABANDONED:
            return
        caller = self._make_caller()
        # Daemon threads, unlike an executor's: a call that hangs must not hold up the exit.
        thread = threading.Thread(target=self._run, args=(caller,), name="judge", daemon=True)
        self._workers[thread] = caller
        thread.start()

    def _run(self, caller: Caller[Asked, Answer]) -> None:
        me = threading.current_thread()
        # _give_up() raises it here, at the latest when the call has returned.
        with suppress(GivenUp):
            try:
                self._work(me, caller)
            finally:
                with self._lock:
                    self._workers.pop(me, None)
                caller.end()

    def _work(self, me: threading.Thread, caller: Caller[Asked, Answer]) -> None:
        while (task := self._tasks.get()) is not None:
            case, future = task
            try:
                failure = caller.prepare()
            # A script without `if __name__ == "__main__"` cannot start processes, for example.
            except Exception as error:
                failure = failure_of(error)
            if failure is not None:
                settle(future, failure)
                continue
            watched = self._watch.begin(
                case.place, lambda future=future: self._give_up(me, caller, future)
            )
            try:
                outcome = caller(case)
            except GivenUp:
                return
            # A function may raise what is no Exception; here it ends its call alone.
            except BaseException as error:
                outcome = Failure(f"{type(error).__name__} ended the call")
            if not self._watch.end(watched):
                return  # _give_up() says what becomes of the call and of this worker.
            settle(future, outcome)

    def _give_up(
        self,
        thread: threading.Thread,
        caller: Caller[Asked, Answer],
        future: Future[Answer | Failure],
    ) -> None:
        ended = caller.end()
        settle(future, too_slow(self._watch.limit))
        with self._lock:
            # It may have returned meanwhile.
            if self._workers.pop(thread, None) is not None and not ended:
                self._abandoned.append(thread)
                # Ends a call that computes in Python.
                raise_in(thread, GivenUp)
            self._hire()
            self._fail_if_nobody_works()

    def _fail_if_nobody_works(self) -> None:
        """Fails the calls that wait if no worker is left. Needs the lock."""
        if not self._workers:
            self._fail_waiting(
                "the judge was closed"
                if self._closed
                else f"{len(self._abandoned)} earlier calls never returned, and nothing can end "
                f"them{self._advice}"
            )

    def _fail_waiting(self, why: str) -> None:
        """Fails the calls that wait. Needs the lock."""
        with suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    settle(task[1], Failure(why))


class GivenUp(BaseException):
    """Raised in the thread of a call that was given up."""


def raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raises an exception in another thread, as soon as that thread runs Python code."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
