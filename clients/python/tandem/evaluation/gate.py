"""The gate: what the reward favours before training begins, by author and by pattern.

A policy gradient moves the senior from the answers to a prompt that earn less to those that earn
more. So an experiment can only show that training changes how the senior writes if the reward tells
the ways of writing apart at the start, and one about a junior only if the junior is another model.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tandem.evaluation.answers import Answers, Grades, draw, grade
from tandem.rpc.requests import JUNIOR_ALONE, SENIOR_ALONE
from tandem.session.session import Session
from tandem.settings.run import RunSettings
from tandem.utils.authors import written
from tandem.utils.stats import clustered_mean

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Answers that have something in common: their author, or a pattern.

    Attributes:
        share: of all answers of the author.
        accuracy: None without answers, as the other numbers.
        tokens: mean length of an answer, the tokens of an environment left out.
    """

    answers: int
    share: float
    accuracy: float | None
    reward: float | None
    tokens: float | None


@dataclass(frozen=True)
class Favour:
    """The reward of answers with a pattern, less that of answers to the same prompt without it.

    Attributes:
        prompts: those with answers of both kinds, which alone tell something.
        difference: mean over these prompts; None without any.
        half_width: of its 95 % interval; None with fewer than two prompts.
    """

    prompts: int
    difference: float | None
    half_width: float | None

    @property
    def sign(self) -> int:
        """1 if training moves the senior towards the pattern, -1 away from it, 0 if unknown."""
        if self.difference is None or self.half_width is None:
            return 0
        return (self.difference > self.half_width) - (self.difference < -self.half_width)


@dataclass(frozen=True)
class Gate:
    """The answers that a run starts from, and the reward's preference among them.

    Attributes:
        authors: the answers of senior, junior and both, as the run draws them.
        equal_groups: by author, the share of prompts whose answers have one reward: no gradient.
        patterns: by name, the senior's answers with it and without it.
        favours: by name of the pattern.
        same_model: whether the junior has the senior's weights; None without a junior.
    """

    authors: Mapping[str, Group]
    equal_groups: Mapping[str, float]
    patterns: Mapping[str, tuple[Group, Group]]
    favours: Mapping[str, Favour]
    same_model: bool | None

    def findings(self) -> list[str]:
        """Returns what this says about a run, a sentence each."""
        found = []
        drawn = "both" if "both" in self.authors else "senior"
        if (share := self.equal_groups[drawn]) > 0.5:
            found.append(
                f"{drawn}: the answers to {share:.0%} of the prompts have one reward each, which "
                "gives no gradient"
            )
        for name, favour in self.favours.items():
            if favour.difference is None:
                found.append(
                    f"{name}: no prompt has answers with and without it, so the reward cannot move "
                    "the senior towards it or away from it"
                )
            elif favour.sign == 0:
                found.append(f"{name}: the reward does not tell answers with it from others")
            else:
                way = "towards" if favour.sign > 0 else "away from"
                found.append(
                    f"{name}: training moves the senior {way} it: its answers earn "
                    f"{favour.difference:+.3f} beside others to the same prompt"
                )
        if self.same_model:
            found.append(
                "the junior has the senior's weights: it reads whatever the senior writes, so "
                "tandem can hardly show an effect"
            )
        return found

    def record(self) -> dict[str, Any]:
        """Returns the gate as JSON."""
        return {
            "authors": {
                author: {**vars(group), "equal_groups": self.equal_groups[author]}
                for author, group in self.authors.items()
            },
            "patterns": {
                name: {
                    "with": vars(self.patterns[name][0]),
                    "without": vars(self.patterns[name][1]),
                    "favour": {**vars(favour), "sign": favour.sign},
                }
                for name, favour in self.favours.items()
            },
            "same_model": self.same_model,
            "findings": self.findings(),
        }


def as_in_training(settings: RunSettings) -> RunSettings:
    """Returns the settings with evaluations that draw as the run draws its responses."""
    update = {
        "temperature": settings.sampling.temperature,
        "samples": settings.batch.samples_per_prompt,
        "max_tokens": settings.sampling.max_tokens,
        "speculative": None,
    }
    return settings.model_copy(update={"eval": settings.eval.model_copy(update=update)})


def gate(session: Session) -> Gate:
    """Draws answers to the held-out prompts, as as_in_training() has set, and compares them."""
    weights = session.weights()
    rules: dict[str, Mapping[str, Any]] = {"senior": SENIOR_ALONE}
    if session.settings.tandem.enabled:
        rules |= {"junior": JUNIOR_ALONE, "both": session.settings.tandem.given()}
    answers: dict[str, Answers] = {}
    grades: dict[str, Grades] = {}
    for author, tandem in rules.items():
        with session.progress.phase(f"evaluate, {author}"):
            drawn = draw(session, tandem, weights)
            answers[author] = drawn.answers
            grades[author] = grade(session, drawn)
    graded = {author: _graded(one, grades[author]) for author, one in answers.items()}
    patterns = grades["senior"].patterns
    first = next(itertools.chain(*answers.get("both", answers["senior"])))
    return Gate(
        authors={author: _group(every, every) for author, every in graded.items()},
        equal_groups={author: _equal_groups(one.rewards) for author, one in grades.items()},
        patterns={
            name: _with_and_without(graded["senior"], found) for name, found in patterns.items()
        },
        favours={name: _favour(grades["senior"], found) for name, found in patterns.items()},
        same_model=(
            first.junior_version == first.senior_versions[0].weights.digest
            if first.junior_version
            else None
        ),
    )


class _Graded(NamedTuple):
    """An answer with its grade."""

    correct: bool
    reward: float | None
    tokens: int


def _graded(answers: Answers, grades: Grades) -> list[_Graded]:
    """Returns the answers to all prompts with their grades, one after the other.

    Answers that are missing, because their environment failed, are left out.
    """
    return [
        _Graded(correct, reward, written(one.authorship_mask))
        for group, every, rewards in zip(answers, grades.correct, grades.rewards, strict=True)
        for one, correct, reward in zip(group, every[: len(group)], rewards, strict=True)
    ]


def _group(chosen: Sequence[_Graded], every: Sequence[_Graded]) -> Group:
    """Returns the numbers of the answers that were chosen from every answer."""
    rewards = [one.reward for one in chosen if one.reward is not None]
    return Group(
        answers=len(chosen),
        share=len(chosen) / len(every),
        accuracy=statistics.fmean(one.correct for one in chosen) if chosen else None,
        reward=statistics.fmean(rewards) if rewards else None,
        tokens=statistics.fmean(one.tokens for one in chosen) if chosen else None,
    )


def _with_and_without(
    every: Sequence[_Graded], found: Sequence[Sequence[bool]]
) -> tuple[Group, Group]:
    """Returns the answers in which a pattern is found, and the others."""
    matching, other = _divided(every, itertools.chain(*found))
    return _group(matching, every), _group(other, every)


def _divided(values: Iterable[Value], found: Iterable[bool]) -> tuple[list[Value], list[Value]]:
    """Returns the values for which something was found, and the others."""
    parts: tuple[list[Value], list[Value]] = ([], [])
    for value, matches in zip(values, found, strict=True):
        parts[not matches].append(value)
    return parts


def _equal_groups(rewards: Sequence[Sequence[float | None]]) -> float:
    return sum(len(set(group)) == 1 for group in rewards) / len(rewards)


def _favour(grades: Grades, found: Sequence[Sequence[bool]]) -> Favour:
    differences = []
    for rewards, matches in zip(grades.rewards, found, strict=True):
        matching, other = (
            [reward for reward in part if reward is not None] for part in _divided(rewards, matches)
        )
        if matching and other:
            differences.append(statistics.fmean(matching) - statistics.fmean(other))
    if not differences:
        return Favour(0, None, None)
    return Favour(len(differences), *clustered_mean([[one] for one in differences]))
