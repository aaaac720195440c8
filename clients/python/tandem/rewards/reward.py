"""The reward of a response: the weighted sum of what builtins and the user's functions give it."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.data.dataset import Example
from tandem.errors import ConfigError, RewardError
from tandem.rewards.calls import Judge, judge_of, why_not_called
from tandem.rewards.judges.cases import Case, Failure, Outcome, declared_details, failure_of
from tandem.rewards.judges.collected import OneByOne
from tandem.rewards.judges.responses import Response
from tandem.rewards.judges.watch import STOP_SECONDS, Watch
from tandem.rewards.loading import file_of, load_function
from tandem.rewards.math_answers import final_answer, final_number, gsm8k
from tandem.rewards.server import RewardServer
from tandem.settings.bounds import MAX_REWARD
from tandem.settings.run import (
    ENVIRONMENT_REWARD,
    OverlongBufferSettings,
    RewardFunctionSettings,
    RewardSettings,
)
from tandem.utils.interrupt import StopRequested
from tandem.utils.optional import optional_module
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


# The builtins that `answer_pattern` is for.
READING_PATTERNS = ("exact_match", "reasoning_gym")
# The builtin `math` computes at length, and is called in processes as a user's function would be.
_MATH = "tandem.rewards.math_answers:math"

# Characters of a prompt or a response that an error shows.
_SHOWN = 1000
# Seconds between two looks at whether the run was asked to stop.
_LOOK_SECONDS = 0.5
# Exceptions that only a changed function ends: an outage causes none of them.
_WRITTEN_WRONG = ("NameError", "ModuleNotFoundError", "SyntaxError")
# Parameters of the reward functions of other trainers: those of TRL, and verl's.
_FOREIGN = {"prompts", "completions", "responses", "completion_ids", "solution_str", "ground_truth"}
_SIGNATURES = (
    "`def reward(prompt, response, answer, **row) -> float` judges one response (**row takes all "
    "other columns); with `batch: true`, `def rewards(prompts, responses, rows) -> list[float]` "
    "judges all of a step"
)


@dataclass(frozen=True)
class Judged:
    """Rewards of several responses to several prompts.

    Attributes:
        rewards: by prompt, the rewards of its responses in order; None where a function failed.
        scores: by the name of a function, what it gave each response, without its weight.
        failures: for every call that failed a message with row, prompt, response and traceback.
        timed_out: number of responses for which a call was given up because of its time limit.
    """

    rewards: list[list[float | None]]
    scores: dict[str, list[list[float | None]]]
    failures: list[str]
    timed_out: int = 0


class Reward:
    """The functions that judge responses, and the weighted sum of what they give: the reward.

    close() ends the threads and processes of the functions.

    Attributes:
        files: the source files of the functions; builtins, and functions whose file Python does
            not know, have none.
        servers: the reward models among the functions by their names, which open() connects.
        progress: is told how many responses are judged.
        stopping: whether the run was asked to stop. Responses that are not judged STOP_SECONDS
            later are given up.
    """

    def __init__(self, *functions: RewardFunctionSettings) -> None:
        """Loads the functions.

        Raises ConfigError for one that cannot be loaded or does not suit its settings.
        """
        self.progress = Progress()
        self.stopping: Callable[[], bool] = lambda: False
        self._functions: list[_Function] = []
        try:
            for place, settings in enumerate(functions):
                single = isinstance(settings, RewardSettings)
                field = "reward" if single else f"rewards.{place}"
                make_watch = partial(self._watch, settings, field)
                self._functions.append(_Function(settings, field, make_watch))
        except ConfigError:
            self.close()
            raise
        self.files = [one.file for one in self._functions if one.file is not None]
        self.servers = {one.name: one.server for one in self._functions if one.server is not None}

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError for a row that a function cannot be called with.

        A row may lack a column that a function wants, or have one that it does not take.
        """
        for function in self._functions:
            function.check(examples)

    def warnings(self, examples: Sequence[Example]) -> list[str]:
        """Returns what is not wrong with the rows, but rarely meant."""
        return [text for one in self._functions if (text := one.warning(examples))]

    def __call__(
        self, examples: Sequence[Example], responses: Sequence[Sequence[Response | str]]
    ) -> Judged:
        """Judges the responses to every example; raises what Judging.result() raises."""
        judging = self.judging()
        for index, (example, group) in enumerate(zip(examples, responses, strict=True)):
            judging.add(index, example, group)
        return judging.result()

    def judging(self) -> Judging:
        """Returns a judging of responses that are added as they come."""
        return Judging(self._functions, lambda: self.stopping(), self.progress)

    def close(self) -> None:
        """Ends the threads and processes of the functions."""
        for function in self._functions:
            function.close()

    def _watch(
        self,
        settings: RewardFunctionSettings,
        field: str,
        *,
        stops: bool = False,
    ) -> Watch:
        name = f"{field}.function: {settings.function}"
        stopping = (lambda: self.stopping()) if stops else None
        return Watch(name, settings.limit_seconds, stopping)


@dataclass(frozen=True)
class _Asked:
    """The responses to one example, and what the functions say of them.

    Attributes:
        outcomes: by function, the outcome for each response.
    """

    example: Example
    responses: Sequence[Response]
    outcomes: dict[_Function, list[Future[Outcome]]]


class Judging:
    """The judging of several groups of responses, which are added as they come.

    Functions that are called in threads, processes or an event loop begin at once; those that need
    the thread of the caller, or all responses, are called in result().
    """

    def __init__(
        self, functions: Sequence[_Function], stopping: Callable[[], bool], progress: Progress
    ) -> None:
        self._functions = functions
        self._stopping = stopping
        self._progress = progress
        self._asked: dict[int, _Asked] = {}

    def add(self, index: int, example: Example, responses: Sequence[Response | str]) -> None:
        """Adds the responses to an example, which are number `index` of the results."""
        group = [Response(one) if isinstance(one, str) else one for one in responses]
        self._asked[index] = asked = _Asked(example, group, {})
        for function in self._functions:
            if not function.waits:
                asked.outcomes[function] = function.start(example, group)

    def result(self) -> Judged:
        """Returns the rewards in the order of the numbers, once all responses are judged.

        Raises:
            RewardError: a function failed whose `on_error` does not say to skip it.
            ConfigError: a function is written wrong, or a builtin cannot judge an example.
            StopRequested: the run was asked to stop, and a call does not end.
        """
        groups = [one for _, one in sorted(self._asked.items())]
        for function in self._functions:
            for one in groups if function.waits else ():
                one.outcomes[function] = function.start(one.example, one.responses)
            function.finish()
        asked = [(one.example, response.text) for one in groups for response in one.responses]
        environments = [response.environment for one in groups for response in one.responses]
        outcomes = [
            [future for one in groups for future in one.outcomes[function]]
            for function in self._functions
        ]
        self._wait([future for futures in outcomes for future in futures])
        failures: list[str] = []
        results = [[future.result() for future in futures] for futures in outcomes]
        values = [
            function.values(asked, given, failures)
            for function, given in zip(self._functions, results, strict=True)
        ]
        sums = [
            self._sum(asked[i], [one[i] for one in values], environments[i], failures)
            for i in range(len(asked))
        ]
        late = sum(
            any(isinstance(one, Failure) and one.timed_out for one in given)
            for given in zip(*results, strict=True)
        )

        def grouped(flat: Sequence[float | None]) -> list[list[float | None]]:
            rest = iter(flat)
            return [[next(rest) for _ in one.responses] for one in groups]

        scores = {
            function.name: grouped(given)
            for function, given in zip(self._functions, values, strict=True)
        }
        return Judged(grouped(sums), scores, failures, late)

    def _sum(
        self,
        asked: tuple[Example, str],
        values: Sequence[float | None],
        environment: Outcome | None,
        failures: list[str],
    ) -> float | None:
        """Returns the weighted sum for a response, None where a value is missing.

        None, too, where its environment failed. A sum beyond the trainer's bound is a failure like
        that of a function.
        """
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if isinstance(environment, Failure):
            failures.append(
                f"environment: {environment.what}\n{_shown(*asked)}\n{environment.trace}".rstrip()
            )
            return None
        total = sum(one.weight * value for one, value in zip(self._functions, known, strict=True))
        if abs(total) <= MAX_REWARD:
            return total
        message = (
            f"rewards: the weighted sum {total:g} is out of range: a trainer accepts "
            f"{-MAX_REWARD:g} to {MAX_REWARD:g}\n{_shown(*asked)}"
        )
        if not all(one.skips for one in self._functions):
            raise RewardError(message)
        failures.append(message)
        return None

    def _wait(self, futures: Sequence[Future[Outcome]]) -> None:
        """Waits for the outcomes, for a moment only once the run was asked to stop."""
        asked_at: float | None = None
        pending = set(futures)
        self._progress.expect(len(pending))
        while pending:
            done, pending = wait(pending, timeout=_LOOK_SECONDS)
            self._progress.advance(len(done))
            if pending and self._stopping():
                asked_at = asked_at or time.monotonic()
                if time.monotonic() - asked_at >= STOP_SECONDS:
                    raise StopRequested(f"{len(pending)} responses were not judged")


class _Function:
    """One function, builtin or the user's; `field` is where it stands in the settings."""

    def __init__(
        self, settings: RewardFunctionSettings, field: str, make_watch: Callable[..., Watch]
    ) -> None:
        self.name = settings.shown_name
        self.weight = settings.weight
        self._is_environment = settings.function == ENVIRONMENT_REWARD
        # An environment that fails ends no run.
        self.skips = settings.on_error == "skip" or self._is_environment
        self.file: Path | None = None
        self._settings = settings
        self._field = field
        self._builtin = None if settings.server is not None else _builtin(settings, field)
        if settings.function == "math":
            optional_module("math_verify", f"{field}.function: math", "math-verify")
            settings = settings.model_copy(update={"function": _MATH, "executor": "process"})
        self._details: tuple[str, ...] = ()
        self.server: RewardServer | None = None
        if settings.server is not None:
            self.server = RewardServer(settings.server, field, settings.limit_seconds)
            return
        # Builtins compute and do not wait, so they are called without threads.
        self._collected = OneByOne(None, make_watch(stops=True))
        self._judge: Judge = self._collected
        if self._builtin is None and not self._is_environment:
            self._function = load_function(
                settings.function, settings.python_path, f"{field}.function"
            )
            self.file = None if settings.function == _MATH else file_of(self._function)
            self._details = declared_details(self._function)
            self._judge = judge_of(self._function, settings, field, make_watch)

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError for a row that the function cannot be called with."""
        if self._is_environment or self.server is not None:
            return
        if self._builtin is not None:
            needs = {"reasoning_gym": _scorer, "gsm8k": _number, "none": _nothing}.get(
                self._settings.function, _answer
            )
            for example in examples:
                needs(example, self._field)
            return
        seen: set[frozenset[str]] = set()
        for example in examples:
            if (columns := frozenset(example.row)) not in seen:
                seen.add(columns)
                self._check_columns(example)

    def warning(self, examples: Sequence[Example]) -> str:
        """Returns a warning where exact_match compares more than a final answer; "" elsewhere."""
        if self._settings.function != "exact_match" or self.server is not None:
            return ""
        odd = [
            example.place
            for example in examples
            if "\n" in (text := str(example.row.get("answer", "")).strip())
            or final_answer(text) is not None
        ]
        if not odd:
            return ""
        return (
            f"warning: {self._field}.function: exact_match compares the whole `answer`, which "
            f"spans lines or marks a final answer in {len(odd):,} of {len(examples):,} rows (the "
            f"first: {odd[0]}); gsm8k and math compare the final answers"
        )

    def start(self, example: Example, responses: Sequence[Response]) -> list[Future[Outcome]]:
        """Begins to judge the responses to an example; returns the outcome of each."""
        if self.server is not None:
            return self.server.start(responses)
        if self._is_environment:
            return [_given(one.environment) for one in responses]
        if self._builtin is not None:
            return [
                self._collected.add(example.place, partial(self._builtin, example, one.text))
                for one in responses
            ]
        return self._judge.start([self._case(example, one) for one in responses])

    @property
    def waits(self) -> bool:
        """Whether nothing is called before finish()."""
        return self.server is not None or self._judge.waits

    def finish(self) -> None:
        """Makes the calls that need the thread of the caller, or all responses."""
        (self.server or self._judge).finish()

    def values(
        self,
        asked: Sequence[tuple[Example, str]],
        outcomes: Sequence[Outcome],
        failures: list[str],
    ) -> list[float | None]:
        """Returns the numbers among the outcomes; adds to `failures` a message for every None.

        Raises RewardError or ConfigError for a failure that is not to be skipped.
        """
        failed = [
            (outcome, self._message(outcome, *one))
            for outcome, one in zip(outcomes, asked, strict=True)
            if isinstance(outcome, Failure)
        ]
        if failed and not self.skips:
            [(first, message), *others] = failed
            more = f"\n{len(others)} other calls failed too" if others else ""
            skip = f"{self._field}.on_error: skip leaves such responses out of the step; "
            kind = ConfigError if first.what.startswith(_WRITTEN_WRONG) else RewardError
            raise kind(
                message + more,
                hint=("" if first.is_mistake else skip)
                + (
                    f"{self._field}.workers: 1 calls the function in the main thread"
                    if self.server is None
                    else f"{self._field}.server names the server"
                ),
            )
        failures += [message for _, message in failed]
        return [None if isinstance(one, Failure) else one for one in outcomes]

    def close(self) -> None:
        """Ends the threads and processes of the function, and its connection."""
        (self.server or self._judge).close()

    def _check_columns(self, example: Example) -> None:
        if taken := next((name for name in self._details if name in example.row), None):
            raise ConfigError(
                f"{self._field}.function: {self._settings.function} has a parameter {taken!r}, "
                f"which the run fills, and {example.place} has a column of that name",
                hint=f"data.columns: {{OTHER: {taken}}} renames the column",
            )
        case = self._case(example, Response(""))
        problem = why_not_called(self._function, case, self._settings.batch)
        foreign = self._foreign()
        if problem is None and not foreign:
            return
        hint = _SIGNATURES
        if foreign:
            hint = f"it is called differently than in TRL or verl: {hint}"
        raise ConfigError(
            f"{self._field}.function: {self._settings.function} cannot be called for "
            f"{example.place}: {problem or foreign}",
            hint=f"{hint}; docs/guides/rewards.md",
        )

    def _foreign(self) -> str | None:
        """Returns that the function wants what other trainers give it, None if it does not."""
        if self._settings.batch:
            return None
        try:
            names = inspect.signature(self._function).parameters
        except (TypeError, ValueError):
            return None
        first = [name for name in list(names)[:2] if name in _FOREIGN]
        return f"its parameter {first[0]!r} is neither `prompt` nor `response`" if first else None

    def _case(self, example: Example, response: Response) -> Case:
        details = {name: response.detail(name) for name in self._details}
        return Case(example.row, response.text, details, example.place)

    def _message(self, failure: Failure, example: Example, response: str) -> str:
        asked = f"function: {self._settings.function}"
        if self.server is not None:
            asked = f"server: {self.server.address}"
        return (
            f"{self._field}.{asked}: {failure.what}\n{_shown(example, response)}\n{failure.trace}"
        ).rstrip()


def _shown(example: Example, response: str) -> str:
    """Returns the lines about a response in an error."""
    return (
        f"  row: {example.place}\n  prompt: {_short(example.text)}\n  response: {_short(response)}"
    )


def overlong_punishment(length: int, max_tokens: int, buffer: OverlongBufferSettings) -> float:
    """Returns what a response of `length` tokens adds to its reward: 0, or less if it is too long.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) with L_max = `max_tokens` and
    L_cache = `buffer.len`, times `buffer.penalty_factor`.
    """
    expected = max_tokens - buffer.len
    return buffer.penalty_factor * max(-1.0, min(0.0, (expected - length) / buffer.len))


def answer_extractor(pattern: str | None) -> Callable[[str], str]:
    """Returns the function that picks the answer out of a response.

    The answer is the last match of `pattern` (its first group, if it has one); without a pattern it
    is the response without surrounding space.
    """
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.MULTILINE)

    def extract(text: str) -> str:
        matches = list(compiled.finditer(text))
        return (matches[-1][compiled.groups and 1] or "") if matches else ""

    return extract


def _builtin(
    settings: RewardFunctionSettings, field: str
) -> Callable[[Example, str], Outcome] | None:
    """Returns the builtin judge that the settings name, None for a function of the user's."""
    extract = answer_extractor(settings.answer_pattern)
    if settings.function == "exact_match":
        return lambda example, response: float(extract(response) == _answer(example, field))
    if settings.function == "none":
        return lambda _, __: 0.0
    if settings.function == "gsm8k":
        return lambda example, response: gsm8k(response, _answer(example, field, "gsm8k"))
    if settings.function == "reasoning_gym":
        return lambda example, response: _gym_score(example, extract(response), field)
    return None


def _answer(example: Example, field: str, function: str = "exact_match") -> str:
    """Returns the row's answer as text: 5 is "5"."""
    answer = example.row.get("answer")
    if not isinstance(answer, str | int | float):
        raise ConfigError(
            f"{field}.function: {function} needs an `answer`, text or a number, in every row: "
            f"{example.place}",
            hint="data.columns: {answer: COLUMN} names another column",
        )
    return str(answer).strip()


def _nothing(example: Example, field: str) -> None:
    """Accepts every row."""


def _number(example: Example, field: str) -> None:
    """Raises ConfigError for a row whose answer has no number to compare with."""
    answer = _answer(example, field, "gsm8k")
    if final_number(answer) is None:
        raise ConfigError(
            f"{field}.function: gsm8k: {example.place}: the answer {_short(answer)} has no number",
            hint="`math` compares other answers, `exact_match` text",
        )


def _scorer(example: Example, field: str) -> Any:
    if example.scorer is None:
        raise ConfigError(f"{field}.function: reasoning_gym needs data.reasoning_gym")
    return example.scorer


def _gym_score(example: Example, answer: str, field: str) -> Outcome:
    scorer = _scorer(example, field)
    try:
        entry = copy.deepcopy(example.row["entry"])
        return float(scorer.score_answer(answer=answer or None, entry=entry))
    # The model wrote the answer, so the task's judge may fail to read it.
    except Exception as error:
        return failure_of(error)


def _given(outcome: Outcome | None) -> Future[Outcome]:
    """Returns the outcome of an environment, which is known; a failure tells _sum()."""
    future: Future[Outcome] = Future()
    future.set_result(Failure("no environment gave a reward") if outcome is None else outcome)
    return future


def _short(text: str) -> str:
    more = f" … {len(text)} characters" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN]) + more
