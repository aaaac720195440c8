"""The ways to call a user's reward function.

`reward(prompt, response, **row) -> float` judges one response. Many calls run at once, in threads
or processes; those of an `async def` are awaited together. With `batch` one call of
`rewards(prompts, responses, rows)` judges them all. Outcomes stand in the order of the responses,
whichever call ends first.

A call gets copies of its row, so no call depends on what another one did to its arguments. A call
that takes longer than its limit, or whose process dies, fails only its own response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from tandem.errors import ConfigError
from tandem.rewards.judges.cases import Case, Outcome, arguments, batch_arguments
from tandem.rewards.judges.collected import InOneCall, OneByOne
from tandem.rewards.judges.coroutines import Awaited
from tandem.rewards.judges.process import InProcess
from tandem.rewards.judges.watch import Watch
from tandem.rewards.judges.workers import InThisProcess, Workers
from tandem.settings.run import RewardFunctionSettings
from tandem.utils.cpu_count import usable_cpus

# Calls in threads that run at once by default: reward functions mostly wait.
DEFAULT_THREADS = 16


class Judge(Protocol):
    """One way to call a function."""

    @property
    def waits(self) -> bool:
        """Whether nothing is called before finish(); cases then come in the order of the data."""
        ...

    def start(self, cases: Sequence[Case]) -> list[Future[Outcome]]:
        """Begins to judge, or collects the cases for finish(); returns the outcome of each."""
        ...

    def finish(self) -> None:
        """Makes the calls that need the thread of the caller, or all cases at once."""
        ...

    def close(self) -> None:
        """Ends the threads and processes that the judge started."""
        ...


def judge_of(
    function: Callable[..., Any],
    settings: RewardFunctionSettings,
    field: str,
    make_watch: Callable[..., Watch],
) -> Judge:
    """Returns the judge that calls `function` in the way that the settings name.

    `field` is where the settings stand in the file ("reward", "rewards.0"). `make_watch` makes a
    Watch; with `stops` one for calls in the thread of the caller. Raises ConfigError for a function
    that does not suit the settings.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        if settings.executor == "process":
            raise ConfigError(
                f"{field}.executor: {settings.function} is async: its calls are awaited in one "
                "thread, not run in processes"
            )
        return Awaited(function, settings.workers, settings.batch, make_watch())
    if settings.batch:
        return InOneCall(function, make_watch(stops=True))
    if settings.executor == "process":
        make = partial(InProcess, settings.function, settings.python_path, f"{field}.function")
        return Workers(settings.workers or usable_cpus(), make, make_watch())
    if settings.workers == 1:
        return OneByOne(function, make_watch(stops=True))
    make = partial(InThisProcess, function)
    return Workers(settings.workers or DEFAULT_THREADS, make, make_watch())


def why_not_called(function: Callable[..., Any], case: Case, batch: bool) -> str | None:
    """Returns why Python would refuse to call the function for a case, None if it would not."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions written in C have no signature.
        return None
    try:
        positional, keywords = batch_arguments([case]) if batch else arguments(case)
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None
