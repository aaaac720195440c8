"""The reward of a response: the weighted sum of what builtins and the user's functions give it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.data import Example
from tandem.errors import ConfigError
from tandem.reward_calls import (
    Case,
    Failure,
    Judge,
    Outcome,
    failure_of,
    judge_of,
    why_not_called,
)
from tandem.reward_function import file_of, load_function
from tandem.settings import (
    MAX_REWARD,
    OverlongBufferSettings,
    RewardFunctionSettings,
    RewardSettings,
)

# Characters of a prompt or a response that an error shows.
_SHOWN = 1000


@dataclass(frozen=True)
class Judged:
    """Rewards of several responses to several prompts.

    Attributes:
        rewards: by prompt, the rewards of its responses in order; None where a function failed.
        scores: by the name of a function, what it gave each response, without its weight.
        failures: for every call that failed a message with row, prompt, response and traceback.
    """

    rewards: list[list[float | None]]
    scores: dict[str, list[list[float | None]]]
    failures: list[str]


class Reward:
    """The functions that judge responses, and the weighted sum of what they give: the reward.

    close() ends the threads and processes of the functions.

    Attributes:
        files: the source files of the functions; builtins, and functions whose file Python does
            not know, have none.
    """

    def __init__(self, *functions: RewardFunctionSettings) -> None:
        """Loads the functions.

        Raises ConfigError for one that cannot be loaded or does not suit its settings.
        """
        self._functions: list[_Function] = []
        try:
            for place, settings in enumerate(functions):
                single = isinstance(settings, RewardSettings)
                field = "reward" if single else f"rewards.{place}"
                self._functions.append(_Function(settings, field))
        except ConfigError:
            self.close()
            raise
        self.files = [one.file for one in self._functions if one.file is not None]

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError for a row that a function cannot be called with.

        A row may lack a column that a function wants, or have one that it does not take.
        """
        for function in self._functions:
            function.check(examples)

    def __call__(self, examples: Sequence[Example], responses: Sequence[Sequence[str]]) -> Judged:
        """Judges the responses to every example.

        Raises ConfigError for a function that failed, unless its `on_error` says to skip it, and
        for an example that a builtin cannot judge.
        """
        asked = [
            (example, response)
            for example, group in zip(examples, responses, strict=True)
            for response in group
        ]
        failures: list[str] = []
        scores = {one.name: one.judge(asked, failures) for one in self._functions}
        weights = [one.weight for one in self._functions]
        sums = [_weighted_sum(weights, values) for values in zip(*scores.values(), strict=True)]

        def grouped(values: Sequence[float | None]) -> list[list[float | None]]:
            flat = iter(values)
            return [list(itertools.islice(flat, len(group))) for group in responses]

        by_name = {name: grouped(values) for name, values in scores.items()}
        return Judged(grouped(sums), by_name, failures)

    def close(self) -> None:
        """Ends the threads and processes of the functions."""
        for function in self._functions:
            function.close()


class _Function:
    """One function, builtin or the user's; `field` is where it stands in the settings."""

    def __init__(self, settings: RewardFunctionSettings, field: str) -> None:
        self.name = settings.shown_name
        self.weight = settings.weight
        self.file: Path | None = None
        self._settings = settings
        self._field = field
        self._builtin = _builtin(settings, field)
        self._judge: Judge | None = None
        if self._builtin is None:
            self._function = load_function(
                settings.function, settings.python_path, f"{field}.function"
            )
            self.file = file_of(self._function)
            self._judge = judge_of(self._function, settings, field)

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError for a row that the function cannot be called with."""
        if self._builtin is not None:
            needs = _answer if self._settings.function == "exact_match" else _scorer
            for example in examples:
                needs(example, self._field)
            return
        seen: set[frozenset[str]] = set()
        for example in examples:
            if (columns := frozenset(example.row)) in seen:
                continue
            seen.add(columns)
            problem = why_not_called(self._function, example.row, self._settings.batch)
            if problem is not None:
                raise ConfigError(
                    f"{self._field}.function: {self._settings.function} cannot be called for "
                    f"{example.place}: {problem}",
                    hint="docs/rewards.md shows what it is called with; **row takes all columns",
                )

    def judge(
        self, asked: Sequence[tuple[Example, str]], failures: list[str]
    ) -> list[float | None]:
        """Returns what it gives each response; adds to `failures` a message for every None."""
        if self._judge is None:
            assert self._builtin is not None
            outcomes: list[Outcome] = [self._builtin(*one) for one in asked]
        else:
            outcomes = self._judge([Case(example.row, response) for example, response in asked])
        failed = [
            (outcome, self._message(outcome, *one))
            for outcome, one in zip(outcomes, asked, strict=True)
            if isinstance(outcome, Failure)
        ]
        if failed and self._settings.on_error == "fail":
            [(first, message), *others] = failed
            more = f"\n{len(others)} other calls failed too" if others else ""
            skip = f"{self._field}.on_error: skip leaves such responses out of the step; "
            raise ConfigError(
                message + more,
                hint=("" if first.is_mistake else skip)
                + f"{self._field}.workers: 1 calls the function in the main thread",
            )
        failures += [message for _, message in failed]
        return [None if isinstance(one, Failure) else one for one in outcomes]

    def close(self) -> None:
        """Ends the threads and processes of the function."""
        if self._judge is not None:
            self._judge.close()

    def _message(self, failure: Failure, example: Example, response: str) -> str:
        return (
            f"{self._field}.function: {self._settings.function}: {failure.what}\n"
            f"  row: {example.place}\n"
            f"  prompt: {_short(example.text)}\n"
            f"  response: {_short(response)}\n{failure.trace}"
        ).rstrip()


def _weighted_sum(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Returns the reward of a response, None where a value is missing.

    Raises ConfigError for a sum beyond the trainer's bound.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    total = sum(weight * value for weight, value in zip(weights, known, strict=True))
    if abs(total) > MAX_REWARD:
        raise ConfigError(
            f"rewards: the weighted sum {total:g} is out of range: a trainer takes "
            f"{-MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return total


def overlong_punishment(length: int, max_tokens: int, buffer: OverlongBufferSettings) -> float:
    """Returns what a response of `length` tokens gets beside its reward: 0, or less if too long.

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
    """Returns the builtin judge that the settings name, None for a function of the user's.

    Builtins compute and do not wait, so they are called without threads.
    """
    extract = answer_extractor(settings.answer_pattern)
    if settings.function == "exact_match":
        return lambda example, response: float(extract(response) == _answer(example, field))
    if settings.function == "reasoning_gym":
        return lambda example, response: _gym_score(example, extract(response), field)
    return None


def _answer(example: Example, field: str) -> str:
    """Returns the row's answer as text: 5 is "5"."""
    answer = example.row.get("answer")
    if not isinstance(answer, str | int | float):
        raise ConfigError(
            f"{field}.function: exact_match needs an `answer`, text or a number, in every row: "
            f"{example.place}",
            hint="data.columns: {answer: COLUMN} names another column",
        )
    return str(answer).strip()


def _scorer(example: Example, field: str) -> Any:
    if example.scorer is None:
        raise ConfigError(f"{field}.function: reasoning_gym needs data.reasoning_gym")
    return example.scorer


def _gym_score(example: Example, answer: str, field: str) -> Outcome:
    scorer = _scorer(example, field)
    try:
        return float(scorer.score_answer(answer=answer or None, entry=example.row["entry"]))
    # The model wrote the answer, so the task's judge may fail to read it.
    except Exception as error:
        return failure_of(error)


def _short(text: str) -> str:
    more = f" … {len(text)} characters" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN]) + more
