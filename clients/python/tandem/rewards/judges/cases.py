"""The questions to a judge and its answers.

The processes of judges import this module, so it imports little.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tandem.settings.bounds import MAX_REWARD

# Exceptions of a function that count as a failed call where KeyboardInterrupt must pass. sys.exit()
# in a function does not end the run, and neither does a task that the function itself cancels.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
# Exceptions that point to a mistake in the function, which is to be corrected, not skipped.
MISTAKES = (NameError, ImportError, AttributeError, TypeError, SyntaxError)
# Arguments beside the prompt, the response and the columns that a function gets if it declares a
# parameter of this name.
DETAILS = (
    "prompt_token_ids",
    "response_token_ids",
    "authorship_mask",
    "finish_reason",
    "step",
)
# Characters of a value that a message shows.
_SHOWN = 200
# Most characters of an exception's message, and the last ones of its traceback, that are kept.
_MOST_MESSAGE, _MOST_TRACE = 1 << 12, 1 << 14


@dataclass(frozen=True)
class Case:
    """One response with its row, as a function gets them.

    Attributes:
        row: the columns of the row. A call gets a copy of them: what a function does to its
            arguments reaches no other call.
        response: the text to judge.
        details: the arguments of DETAILS that the function asks for.
        place: where the row stands.
    """

    row: dict[str, Any]
    response: str
    details: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def prompt(self) -> Any:
        """The row's text, or its messages where it has no text."""
        return self.row.get("prompt", self.row.get("messages"))

    @property
    def columns(self) -> dict[str, Any]:
        """The row as keyword arguments, in addition to `prompt` and `response`."""
        return {
            "row_response" if name == "response" else name: value
            for name, value in self.row.items()
            if name != "prompt"
        }

    def copied(self) -> Case:
        """Returns the case with a copy of its row and details."""
        return Case(copy.deepcopy(self.row), self.response, dict(self.details), self.place)


class TooMuchError(ValueError):
    """More text, or more bytes, than a call may give."""


class FailureKind(StrEnum):
    """The kind of a call's failure.

    An exception or a value that is refused (error), the time limit (timeout), the end of its
    process (crash), or too much memory, text or bytes (flood).
    """

    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"
    FLOOD = "flood"


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
    kind: FailureKind = FailureKind.ERROR

    @property
    def timed_out(self) -> bool:
        """Whether the call was given up because of its time limit."""
        return self.kind == FailureKind.TIMEOUT


Outcome = float | Failure


def too_slow(limit: float) -> Failure:
    """Returns the failure of a call that was given up after `limit` seconds."""
    return Failure(f"no answer within {limit:g} s (timeout_seconds)", kind=FailureKind.TIMEOUT)


def declared_details(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of DETAILS that a function has as parameters of its own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return ()
    named = {
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    return tuple(name for name in DETAILS if name in named)


def batch_arguments(
    cases: Sequence[Case],
) -> tuple[tuple[list[Any], list[str], list[dict[str, Any]]], dict[str, Any]]:
    """Returns the arguments of rewards(prompts, responses, rows) for several cases.

    The details are lists with an entry for each response, but for the step, which is the same.
    """
    details: dict[str, Any] = {
        name: [case.details[name] for case in cases] for name in (cases[0].details if cases else ())
    }
    if "step" in details:
        details["step"] = details["step"][0]
    positional = (
        [case.prompt for case in cases],
        [case.response for case in cases],
        [case.row for case in cases],
    )
    return positional, details


def arguments(case: Case) -> tuple[tuple[Any, str], dict[str, Any]]:
    """Returns the arguments of reward(prompt, response, **row) for a case."""
    return (case.prompt, case.response), {**case.columns, **case.details}


def call(function: Callable[..., Any], case: Case) -> Outcome:
    """Calls a function for a copy of the case."""
    try:
        positional, keywords = arguments(case.copied())
        return number_of(function(*positional, **keywords))
    except FAILURES as error:
        return failure_of(error)


def number_of(value: Any) -> Outcome:
    """Returns what a function gave as a number, or the reason why it is none."""
    try:
        # float() would accept the text "5".
        number = math.nan if isinstance(value, str | bytes) else float(value)
    # A tensor on a device that is lost raises an error of its own, for example.
    except Exception:
        number = math.nan
    if not math.isfinite(number):
        return Failure(f"{_shown(value)} is not a finite number")
    if abs(number) > MAX_REWARD:
        return Failure(
            f"{_shown(value)} is out of range: a trainer accepts {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return number


def numbers_of(values: Any, count: int) -> list[Outcome]:
    """Returns what a function gave for several responses as numbers.

    Raises TypeError or ValueError if that is not a list of as many values.
    """
    # Arrays of numpy and torch are sequences too, without being a Sequence.
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise TypeError(f"rewards must be a list of numbers, not {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} responses")
    return [number_of(value) for value in values]


def failure_of(error: BaseException) -> Failure:
    """Returns the failure for an exception, with the traceback of the function's own frames."""
    # The first frame is the caller's, in this file.
    trace = error.__traceback__ and error.__traceback__.tb_next
    try:
        said = str(error)
        lines = "".join(traceback.format_exception(type(error), error, trace))
    # The error is a class of the user's, and may fail to say what it is.
    except Exception:
        said, lines = "its message cannot be shown", ""
    if len(said) > _MOST_MESSAGE:
        said = f"{said[:_MOST_MESSAGE]} … {len(said):,} characters"
    return Failure(
        f"{type(error).__name__}: {said}",
        lines[-_MOST_TRACE:],
        isinstance(error, MISTAKES),
        FailureKind.FLOOD if isinstance(error, MemoryError | TooMuchError) else FailureKind.ERROR,
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} … {len(text)} characters"
