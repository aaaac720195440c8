"""The ways to call a reward function of the user's.

`reward(prompt, response, **row) -> float` judges one response. Many calls run at once, in threads
or processes; those of an `async def` are awaited together. With `batch` one call of
`rewards(prompts, responses, rows)` judges them all. Results stand in the order of the responses,
whichever call ends first.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from tandem.errors import ConfigError
from tandem.reward_function import load_function
from tandem.settings import RewardSettings

# Calls that run at once in threads unless the settings say otherwise: they wait, mostly.
DEFAULT_THREADS = 16
# What a function may raise without ending the run: sys.exit() is no way out of one, and a task that
# it cancels is its own.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
# What coroutines may take to end when they are cancelled.
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """What a function gets to know of one response."""

    row: dict[str, Any]
    response: str

    @property
    def prompt(self) -> Any:
        """The row's text, or its messages where it has no text."""
        return self.row.get("prompt", self.row.get("messages"))

    @property
    def columns(self) -> dict[str, Any]:
        """The row as keyword arguments beside `prompt` and `response`."""
        return {
            "row_response" if name == "response" else name: value
            for name, value in self.row.items()
            if name != "prompt"
        }


@dataclass(frozen=True)
class Failure:
    """Why a function gave no reward; may come from another process."""

    what: str
    trace: str = ""


Outcome = float | Failure


class Judge(Protocol):
    """One way to call a function."""

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        """What the function gives each case, in their order."""
        ...

    def close(self) -> None:
        """Ends the threads and processes that it started."""
        ...


def judge_of(function: Callable[..., Any], settings: RewardSettings) -> Judge:
    """The way that the settings name to call their function.

    Raises ConfigError for a function that does not suit the settings.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        if settings.executor == "process":
            raise ConfigError(
                f"reward.executor: {settings.function} is async: its calls are awaited in one "
                "thread, not run in processes"
            )
        return _Awaited(function, settings.workers, settings.batch)
    if settings.batch:
        return _InOneCall(function)
    if settings.executor == "process":
        return _InProcesses(settings)
    return _InThreads(function, settings.workers or DEFAULT_THREADS)


def why_not_called(function: Callable[..., Any], row: dict[str, Any], batch: bool) -> str | None:
    """What is wrong with the function's parameters for a row, in Python's words."""
    case = Case(row, "")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions written in C do not tell.
        return None
    try:
        if batch:
            signature.bind(*_columns([case]))
        else:
            signature.bind(case.prompt, case.response, **case.columns)
    except TypeError as error:
        return str(error)
    return None


class _InThreads:
    """Calls a function in threads, or with one worker in the calling thread."""

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        self._function = function
        self._workers = workers

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        outcomes: list[Outcome] = [Failure("its thread ended")] * len(cases)
        places = iter(range(len(cases)))

        def work() -> None:
            for place in places:
                outcomes[place] = _call(self._function, cases[place])

        if self._workers == 1:
            work()
            return outcomes
        # Daemons, which an executor's threads are not: a call that hangs must not hold up an exit.
        threads = [Thread(target=work, daemon=True) for _ in cases[: self._workers]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def close(self) -> None:
        pass


class _InProcesses:
    """Calls a function in processes, which load it themselves."""

    def __init__(self, settings: RewardSettings) -> None:
        self._name = settings.function
        # Not forked: gRPC does not survive it.
        context = multiprocessing.get_context("spawn")
        # Nothing is sent. close() closes our end, or the end of this process does.
        theirs, self._ours = context.Pipe(duplex=False)
        self._processes = ProcessPoolExecutor(
            settings.workers or os.cpu_count(),
            context,
            _start_process,
            (settings.function, settings.python_path, theirs),
        )

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        try:
            return list(self._processes.map(_call_in_process, cases))
        except BrokenProcessPool:
            raise ConfigError(
                f"reward.function: {self._name}: a process of it died",
                hint="it may be out of memory, or the function ends its process",
            ) from None

    def close(self) -> None:
        self._processes.shutdown(wait=False, cancel_futures=True)
        # The pool waits for calls that run: one that hangs must not hold up an exit.
        self._ours.close()


class _Awaited:
    """Awaits the calls of an `async def` together, all in one event loop.

    The loop lives as long as the reward, in a thread of its own: what the function opens in one
    step works in the next, and the caller may have a loop itself.
    """

    def __init__(self, function: Callable[..., Any], workers: int | None, batch: bool) -> None:
        self._function = function
        self._workers = workers
        self._batch = batch
        self._runs = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._runs.wait()

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        judged = self._judge_batch(cases) if self._batch else self._judge_each(cases)
        return asyncio.run_coroutine_threadsafe(judged, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        # What does not let itself be cancelled must not hold up an exit.
        self._thread.join(CLOSE_SECONDS)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._runs.set()
        await self._closing.wait()

    async def _judge_each(self, cases: Sequence[Case]) -> list[Outcome]:
        free = asyncio.Semaphore(self._workers or max(1, len(cases)))

        async def judge(case: Case) -> Outcome:
            async with free:
                try:
                    return _number(await self._function(case.prompt, case.response, **case.columns))
                except FAILURES as error:
                    return failure_of(error)

        return await asyncio.gather(*map(judge, cases))

    async def _judge_batch(self, cases: Sequence[Case]) -> list[Outcome]:
        try:
            return _numbers(await self._function(*_columns(cases)), len(cases))
        except FAILURES as error:
            return [failure_of(error)] * len(cases)


class _InOneCall:
    """Lets a function judge all responses at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        try:
            return _numbers(self._function(*_columns(cases)), len(cases))
        except FAILURES as error:
            return [failure_of(error)] * len(cases)

    def close(self) -> None:
        pass


# In a process of _InProcesses: what it calls.
_function: Callable[..., Any]


def _start_process(name: str, folder: Path, pipe: Connection) -> None:
    global _function
    # A signal may go to the whole group: the run ends its step, and then this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Thread(target=_end_when_closed, args=(pipe,), daemon=True).start()
    _function = load_function(name, folder)


def _end_when_closed(pipe: Connection) -> None:
    pipe.poll(None)
    os._exit(1)


def _call_in_process(case: Case) -> Outcome:
    return _call(_function, case)


def _columns(cases: Sequence[Case]) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    return (
        [case.prompt for case in cases],
        [case.response for case in cases],
        [case.row for case in cases],
    )


def _call(function: Callable[..., Any], case: Case) -> Outcome:
    try:
        return _number(function(case.prompt, case.response, **case.columns))
    except FAILURES as error:
        return failure_of(error)


def _number(value: Any) -> Outcome:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    return number if math.isfinite(number) else Failure(f"{value!r} is not a finite number")


def _numbers(values: Any, count: int) -> list[Outcome]:
    outcomes = [_number(value) for value in values]
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} rewards for {count} responses")
    return outcomes


def failure_of(error: BaseException) -> Failure:
    """What a function raised, with the traceback of its own frames."""
    # The first frame is ours.
    trace = error.__traceback__ and error.__traceback__.tb_next
    return Failure(
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(type(error), error, trace)),
    )
