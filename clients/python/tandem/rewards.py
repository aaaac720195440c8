"""Rewards: a Python function of the user's, or a builtin, that judges responses.

`reward(prompt, response, **row) -> float` judges one response. Many calls run at once, in threads
or processes; those of an `async def` are awaited together. With `batch` one call of
`rewards(prompts, responses, rows)` judges them all. Results stand in the order of the responses,
whichever call ends first.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any, Protocol

from tandem.data import Example
from tandem.errors import ConfigError
from tandem.settings import RewardSettings

# Calls that run at once in threads unless the settings say otherwise: they wait, mostly.
DEFAULT_THREADS = 16
# What coroutines may take to end when they are cancelled.
CLOSE_SECONDS = 5.0
# Characters of a prompt or a response in an error.
_SHOWN = 1000


@dataclass(frozen=True)
class Judged:
    """Rewards of several responses to several prompts.

    Attributes:
        rewards: for every prompt those of its responses, in order; None where a reward failed.
        failures: what happened, for every None in order: row, prompt, response and traceback.
    """

    rewards: list[list[float | None]]
    failures: list[str]


@dataclass(frozen=True)
class _Case:
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
class _Failure:
    """Why a function gave no reward; may come from another process."""

    what: str
    trace: str = ""


_Outcome = float | _Failure


class _Judge(Protocol):
    def __call__(self, cases: Sequence[_Case]) -> list[_Outcome]: ...

    def close(self) -> None: ...


class Reward:
    """The reward that the settings name. close() ends its threads and processes.

    Raises ConfigError for a function that cannot be loaded or does not suit the settings.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._builtin = _builtin(settings)
        self._judge = None if self._builtin else _judge_of(settings)

    def __call__(self, examples: Sequence[Example], responses: Sequence[Sequence[str]]) -> Judged:
        """Judges the responses to every example.

        Raises ConfigError for a reward that failed, unless `on_error` says to skip it, and for an
        example that a builtin cannot judge.
        """
        asked = [
            (example, response)
            for example, group in zip(examples, responses, strict=True)
            for response in group
        ]
        if self._judge is None:
            assert self._builtin is not None
            outcomes: list[_Outcome] = [self._builtin(*one) for one in asked]
        else:
            outcomes = self._judge([_Case(example.row, response) for example, response in asked])
        failures = [
            self._failure(outcome, *one)
            for outcome, one in zip(outcomes, asked, strict=True)
            if isinstance(outcome, _Failure)
        ]
        if failures and self._settings.on_error == "fail":
            others = f"\n{len(failures) - 1} other calls failed too" if len(failures) > 1 else ""
            raise ConfigError(
                failures[0] + others,
                hint="reward.on_error: skip leaves such responses out of the step; "
                "reward.workers: 1 calls the function in the main thread",
            )
        flat = iter(None if isinstance(one, _Failure) else one for one in outcomes)
        return Judged([list(itertools.islice(flat, len(group))) for group in responses], failures)

    def close(self) -> None:
        """Ends what the reward started."""
        if self._judge is not None:
            self._judge.close()

    def _failure(self, failure: _Failure, example: Example, response: str) -> str:
        return (
            f"reward.function: {self._settings.function}: {failure.what}\n"
            f"  row: {example.place}\n"
            f"  prompt: {_short(example.text)}\n"
            f"  response: {_short(response)}\n{failure.trace}"
        ).rstrip()


def answer_extractor(pattern: str | None) -> Callable[[str], str]:
    """The last match of `pattern` (its first group, if any), or the stripped text without one."""
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.MULTILINE)

    def extract(text: str) -> str:
        matches = list(compiled.finditer(text))
        return (matches[-1][compiled.groups and 1] or "") if matches else ""

    return extract


def load_function(name: str, folder: Path) -> Callable[..., Any]:
    """The function that "module:function" or "path/file.py:function" names.

    Imports find what is installed, then what lies in `folder` and beside the file.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"reward.function: {name!r} is none of exact_match, reasoning_gym, "
            "module:function, path/file.py:function"
        )
    file = folder / source if source.endswith(".py") else None
    folders = [folder] if file is None else [folder, file.parent]
    # At the end: nothing in them may hide a module.
    sys.path += [path for path in map(str, map(Path.resolve, folders)) if path not in sys.path]
    try:
        function = getattr(
            importlib.import_module(source) if file is None else _run(file), attribute
        )
    # The file is the user's: importing it may raise anything, a SyntaxError for example.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function: {name}: {type(error).__name__}: {error}",
            hint=None
            if file
            else f"modules are looked up among the installed ones and in {folder}",
        ) from error
    if not callable(function):
        raise ConfigError(f"reward.function: {name} is not a function")
    return function


class _InThreads:
    """Calls a function in threads, or with one worker in the calling thread."""

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        self._function = function
        self._workers = workers

    def __call__(self, cases: Sequence[_Case]) -> list[_Outcome]:
        outcomes: list[_Outcome] = [_Failure("its thread ended")] * len(cases)
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
        self._processes = ProcessPoolExecutor(
            settings.workers or os.cpu_count(),
            multiprocessing.get_context("spawn"),
            _start_process,
            (settings.function, settings.python_path),
        )

    def __call__(self, cases: Sequence[_Case]) -> list[_Outcome]:
        try:
            return list(self._processes.map(_call_in_process, cases))
        except BrokenProcessPool:
            raise ConfigError(
                f"reward.function: {self._name}: a process of it died",
                hint="it may be out of memory, or the function ends its process",
            ) from None

    def close(self) -> None:
        self._processes.shutdown(wait=False, cancel_futures=True)


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

    def __call__(self, cases: Sequence[_Case]) -> list[_Outcome]:
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

    async def _judge_each(self, cases: Sequence[_Case]) -> list[_Outcome]:
        free = asyncio.Semaphore(self._workers or max(1, len(cases)))

        async def judge(case: _Case) -> _Outcome:
            async with free:
                try:
                    return _number(await self._function(case.prompt, case.response, **case.columns))
                except (Exception, SystemExit) as error:
                    return _failure_of(error)

        return await asyncio.gather(*map(judge, cases))

    async def _judge_batch(self, cases: Sequence[_Case]) -> list[_Outcome]:
        try:
            return _numbers(await self._function(*_columns(cases)), len(cases))
        except (Exception, SystemExit) as error:
            return [_failure_of(error)] * len(cases)


class _InOneCall:
    """Lets a function judge all responses at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, cases: Sequence[_Case]) -> list[_Outcome]:
        try:
            return _numbers(self._function(*_columns(cases)), len(cases))
        except (Exception, SystemExit) as error:
            return [_failure_of(error)] * len(cases)

    def close(self) -> None:
        pass


def _judge_of(settings: RewardSettings) -> _Judge:
    function = load_function(settings.function, settings.python_path)
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


def _builtin(settings: RewardSettings) -> Callable[[Example, str], _Outcome] | None:
    """The judge that the settings name if it is one of ours. They compute: threads do not help."""
    extract = answer_extractor(settings.answer_pattern)
    if settings.function == "exact_match":
        return lambda example, response: float(extract(response) == _answer(example))
    if settings.function == "reasoning_gym":
        return lambda example, response: _gym_score(example, extract(response))
    return None


def _columns(cases: Sequence[_Case]) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    return (
        [case.prompt for case in cases],
        [case.response for case in cases],
        [case.row for case in cases],
    )


def _call(function: Callable[..., Any], case: _Case) -> _Outcome:
    try:
        return _number(function(case.prompt, case.response, **case.columns))
    # The function is the user's: it may raise anything, and sys.exit() is no way out of a run.
    except (Exception, SystemExit) as error:
        return _failure_of(error)


def _number(value: Any) -> _Outcome:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    return number if math.isfinite(number) else _Failure(f"{value!r} is not a finite number")


def _numbers(values: Any, count: int) -> list[_Outcome]:
    outcomes = [_number(value) for value in values]
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} rewards for {count} responses")
    return outcomes


def _failure_of(error: BaseException) -> _Failure:
    # The first frame is ours.
    trace = error.__traceback__ and error.__traceback__.tb_next
    return _Failure(
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(type(error), error, trace)),
    )


def _short(text: str) -> str:
    more = f" … {len(text)} characters" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN]) + more


def _answer(example: Example) -> str:
    if "answer" not in example.row:
        raise ConfigError(
            f"reward.function: exact_match needs an `answer` in every row: {example.place}"
        )
    return str(example.row["answer"]).strip()


def _gym_score(example: Example, answer: str) -> _Outcome:
    if example.scorer is None:
        raise ConfigError("reward.function: reasoning_gym needs data.reasoning_gym")
    try:
        return float(example.scorer.score_answer(answer=answer or None, entry=example.row["entry"]))
    # The answer is the model's: the task may fail to read it.
    except Exception as error:
        return _failure_of(error)


def _run(file: Path) -> ModuleType:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle, for example, look a class's module up by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _module_name(file: Path) -> str:
    """A name for the file's module that no import statement can mean."""
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()
    return f"reward file {digest}"


# In a process of _InProcesses: what it calls.
_function: Callable[..., Any]


def _start_process(name: str, folder: Path) -> None:
    global _function
    # A signal may go to the whole group: the run ends its step, and then this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    _function = load_function(name, folder)


def _end_with_parent() -> None:
    # A run that is killed closes no pool.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call_in_process(case: _Case) -> _Outcome:
    return _call(_function, case)
