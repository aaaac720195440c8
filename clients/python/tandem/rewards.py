"""Rewards: builtins, or a Python function of the user's, that judge responses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tandem.reward_function import load_function
from tandem.settings import OverlongBufferSettings, RewardSettings

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


class Reward:
    """The reward that the settings name. close() ends its threads and processes.

    Raises ConfigError for a function that cannot be loaded or does not suit the settings.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._builtin = _builtin(settings)
        self._judge: Judge | None = None
        if self._builtin is None:
            self._function = load_function(settings.function, settings.python_path)
            self._judge = judge_of(self._function, settings)

    def check(self, examples: Sequence[Example]) -> None:
        """ConfigError for a row that cannot be judged: a column that lacks, or one too many."""
        if self._builtin is not None:
            needs = _answer if self._settings.function == "exact_match" else _scorer
            for example in examples:
                needs(example)
            return
        seen: set[frozenset[str]] = set()
        for example in examples:
            if (columns := frozenset(example.row)) in seen:
                continue
            seen.add(columns)
            problem = why_not_called(self._function, example.row, self._settings.batch)
            if problem is not None:
                raise ConfigError(
                    f"reward.function: {self._settings.function} cannot be called for "
                    f"{example.place}: {problem}",
                    hint="docs/rewards.md shows what it is called with; **row takes all columns",
                )

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
            outcomes: list[Outcome] = [self._builtin(*one) for one in asked]
        else:
            outcomes = self._judge([Case(example.row, response) for example, response in asked])
        failures = [
            self._failure(outcome, *one)
            for outcome, one in zip(outcomes, asked, strict=True)
            if isinstance(outcome, Failure)
        ]
        if failures and self._settings.on_error == "fail":
            others = f"\n{len(failures) - 1} other calls failed too" if len(failures) > 1 else ""
            raise ConfigError(
                failures[0] + others,
                hint="reward.on_error: skip leaves such responses out of the step; "
                "reward.workers: 1 calls the function in the main thread",
            )
        flat = iter(None if isinstance(one, Failure) else one for one in outcomes)
        return Judged([list(itertools.islice(flat, len(group))) for group in responses], failures)

    def close(self) -> None:
        """Ends what the reward started."""
        if self._judge is not None:
            self._judge.close()

    def _failure(self, failure: Failure, example: Example, response: str) -> str:
        return (
            f"reward.function: {self._settings.function}: {failure.what}\n"
            f"  row: {example.place}\n"
            f"  prompt: {_short(example.text)}\n"
            f"  response: {_short(response)}\n{failure.trace}"
        ).rstrip()


def overlong_punishment(length: int, max_tokens: int, buffer: OverlongBufferSettings) -> float:
    """What is added to the reward of a response of `length` tokens: 0, or less if it is too long.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) with L_max = `max_tokens` and
    L_cache = `buffer.len`, times `buffer.penalty_factor`.
    """
    expected = max_tokens - buffer.len
    return buffer.penalty_factor * max(-1.0, min(0.0, (expected - length) / buffer.len))


def answer_extractor(pattern: str | None) -> Callable[[str], str]:
    """The last match of `pattern` (its first group, if any), or the stripped text without one."""
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.MULTILINE)

    def extract(text: str) -> str:
        matches = list(compiled.finditer(text))
        return (matches[-1][compiled.groups and 1] or "") if matches else ""

    return extract


def _builtin(settings: RewardSettings) -> Callable[[Example, str], Outcome] | None:
    """The judge that the settings name if it is one of ours. They compute: threads do not help."""
    extract = answer_extractor(settings.answer_pattern)
    if settings.function == "exact_match":
        return lambda example, response: float(extract(response) == _answer(example))
    if settings.function == "reasoning_gym":
        return lambda example, response: _gym_score(example, extract(response))
    return None


def _answer(example: Example) -> str:
    if "answer" not in example.row:
        raise ConfigError(
            f"reward.function: exact_match needs an `answer` in every row: {example.place}"
        )
    return str(example.row["answer"]).strip()


def _scorer(example: Example) -> Any:
    if example.scorer is None:
        raise ConfigError("reward.function: reasoning_gym needs data.reasoning_gym")
    return example.scorer


def _gym_score(example: Example, answer: str) -> Outcome:
    scorer = _scorer(example)
    try:
        return float(scorer.score_answer(answer=answer or None, entry=example.row["entry"]))
    # The answer is the model's: the task may fail to read it.
    except Exception as error:
        return failure_of(error)


def _short(text: str) -> str:
    more = f" … {len(text)} characters" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN]) + more
