"""The ways to call a user's reward function.

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
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from tandem.errors import ConfigError
from tandem.reward_function import load_function
from tandem.settings import MAX_REWARD, RewardFunctionSettings

# Calls in threads that run at once by default: reward functions mostly wait.
DEFAULT_THREADS = 16
# Exceptions of a function that count as a failed call. sys.exit() in a function does not end the
# run, and neither does a task that the function itself cancels.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
# Exceptions that point to a mistake in the function, which is to be corrected, not skipped.
MISTAKES = (NameError, ImportError, AttributeError, TypeError, SyntaxError)
# Seconds that cancelled coroutines have to end.
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """One response with its row, as a function gets them."""

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
    """The reason why a call gave no reward; picklable, for it may come from another process.

    Attributes:
        what: the reason in one line.
        trace: the traceback; "" where nothing was raised.
        is_mistake: whether the function is to be corrected (MISTAKES).
    """

    what: str
    trace: str = ""
    is_mistake: bool = False


Outcome = float | Failure


class Judge(Protocol):
    """One way to call a function."""

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        """Returns what the function gives each case, in their order."""
        ...

    def close(self) -> None:
        """Ends the threads and processes that the judge started."""
        ...


def judge_of(function: Callable[..., Any], settings: RewardFunctionSettings, field: str) -> Judge:
    """Returns the judge that calls `function` in the way that the settings name.

    `field` is where the settings stand in the file ("reward", "rewards.0"). Raises ConfigError for
    a function that does not suit the settings.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        if settings.executor == "process":
            raise ConfigError(
                f"{field}.executor: {settings.function} is async: its calls are awaited in one "
                "thread, not run in processes"
            )
        return _Awaited(function, settings.workers, settings.batch)
    if settings.batch:
        return _InOneCall(function)
    if settings.executor == "process":
        return _InProcesses(settings, field)
    return _InThreads(function, settings.workers or DEFAULT_THREADS)


def why_not_called(function: Callable[..., Any], row: dict[str, Any], batch: bool) -> str | None:
    """Returns why Python would refuse to call the function for a row, None if it would not."""
    case = Case(row, "")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions written in C have no signature.
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
        # Daemon threads, unlike an executor's: a call that hangs must not hold up the exit.
        threads = [Thread(target=work, daemon=True) for _ in cases[: self._workers]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def close(self) -> None:
        pass


class _InProcesses:
    """Calls a function in processes; each process loads the function itself."""

    def __init__(self, settings: RewardFunctionSettings, field: str) -> None:
        self._name = f"{field}.function: {settings.function}"
        # Processes are spawned, for gRPC does not survive a fork.
        context = multiprocessing.get_context("spawn")
        # Nothing is sent through the pipe. The processes end when close(), or the end of this
        # process, closes our end.
        theirs, self._ours = context.Pipe(duplex=False)
        self._processes = ProcessPoolExecutor(
            settings.workers or os.cpu_count(),
            context,
            _start_process,
            (settings.function, settings.python_path, f"{field}.function", theirs),
        )

    def __call__(self, cases: Sequence[Case]) -> list[Outcome]:
        try:
            return list(self._processes.map(_call_in_process, cases))
        except BrokenProcessPool:
            raise ConfigError(
                f"{self._name}: one of its processes died",
                hint="the machine may be out of memory, or the function ends its process",
            ) from None

    def close(self) -> None:
        self._processes.shutdown(wait=False, cancel_futures=True)
        # The pool would wait for calls that run, and one that hangs must not hold up the exit.
        self._ours.close()


class _Awaited:
    """Awaits the calls of an `async def` together, all in one event loop.

    The loop lives as long as the reward, in a thread of its own. A session that the function opens
    in one step works in the next, and the caller may run an event loop itself.
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
        # A coroutine that cannot be cancelled must not hold up the exit.
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


# The function that a process of _InProcesses calls; set in that process alone.
_function: Callable[..., Any]


def _start_process(name: str, folder: Path, field: str, pipe: Connection) -> None:
    global _function
    # Signals may reach the whole process group. The run ends its step first, then this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Thread(target=_end_when_closed, args=(pipe,), daemon=True).start()
    _function = load_function(name, folder, field)


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
        # float() would accept the text "5".
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return Failure(f"{value!r} is not a finite number")
    if abs(number) > MAX_REWARD:
        return Failure(
            f"{value!r} is out of range: a trainer takes {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return number


def _numbers(values: Any, count: int) -> list[Outcome]:
    # Arrays of numpy and torch are sequences too, without being a Sequence.
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise TypeError(f"rewards must be a list of numbers, not {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} responses")
    return [_number(value) for value in values]


def failure_of(error: BaseException) -> Failure:
    """Returns the failure for an exception, with the traceback of the function's own frames."""
    # The first frame is the caller's, in this file.
    trace = error.__traceback__ and error.__traceback__.tb_next
    return Failure(
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(type(error), error, trace)),
        isinstance(error, MISTAKES),
    )
