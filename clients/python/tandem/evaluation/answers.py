"""Answers to the held-out prompts, and their grades."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.data.dataset import Example
from tandem.environments.episode import Takeover
from tandem.environments.run_environment import trajectories_of
from tandem.errors import RewardError
from tandem.models.tokenizer import TextCodec
from tandem.rewards.judges.cases import Outcome
from tandem.rewards.judges.responses import Response as JudgedResponse
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.run_directory.episodes import EpisodeKey, NoRecord
from tandem.run_directory.trajectories.record import Response
from tandem.session.episodes import draw_episodes, episode_metrics, failures_without_response
from tandem.session.session import Session
from tandem.settings.run import EvalMode
from tandem.utils.stats import pass_at_k, wilson_interval

# The samples of every prompt.
Answers = list[list[trajectory_pb2.Trajectory]]


@dataclass(frozen=True)
class Drawn:
    """Answers to the held-out prompts that are not graded yet.

    Attributes:
        environments: what the environment of each answer gave; None without episodes.
        numbers: the keys of evals.jsonl that only episodes have.
    """

    answers: Answers
    environments: Sequence[Sequence[Outcome | None]] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grades:
    """The grades of the answers to a set of prompts.

    Attributes:
        correct: by prompt, whether each sample is correct; missing ones come last.
        rewards: by prompt, the samples' rewards; None where a reward failed, which counts as not
            correct.
        pass_at: k → unbiased estimate of pass@k.
        scores: by reward function the samples' scores by prompt; None where it failed.
        patterns: by name of `eval.patterns`, whether it is found in each prompt's samples.
    """

    correct: list[list[bool]]
    rewards: list[list[float | None]]
    pass_at: dict[int, float]
    scores: Mapping[str, Sequence[Sequence[float | None]]] = field(default_factory=dict)
    patterns: Mapping[str, Sequence[Sequence[bool]]] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Share of correct samples."""
        flat = [value for group in self.correct for value in group]
        return sum(flat) / len(flat)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy; the trials are the prompts, not the samples."""
        prompts = len(self.correct)
        return wilson_interval(round(self.accuracy * prompts), prompts)

    def summary(self) -> dict[str, Any]:
        """Returns the keys of evals.jsonl that concern grades."""
        low, high = self.interval
        rewards = [value for group in self.rewards for value in group if value is not None]
        return {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "reward/mean": sum(rewards) / len(rewards) if rewards else None,
            "reward/failed": sum(map(len, self.rewards)) - len(rewards),
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            **{
                f"pattern/{name}": sum(map(sum, found)) / sum(map(len, found))
                for name, found in self.patterns.items()
            },
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of one mode.

    Attributes:
        mode: the mode.
        answers: the trajectories that were evaluated.
        grades: None where the answers are not judged (legibility).
        numbers: the keys of evals.jsonl that only this mode has.
        junior_logprobs: of the answers' tokens by prompt and sample, where the junior read them.
    """

    mode: EvalMode
    answers: Answers = field(repr=False)
    grades: Grades | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    junior_logprobs: Sequence[Sequence[np.ndarray]] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def version(self) -> int:
        """The version of the senior's weights."""
        first = next(itertools.chain(*self.answers))
        return first.senior_versions[-1].weights.version

    def summary(self) -> dict[str, Any]:
        """Returns the line of evals.jsonl, without its step."""
        return {
            "mode": self.mode,
            "prompts": len(self.answers),
            "samples": max(map(len, self.answers)),
            **({} if self.grades is None else self.grades.summary()),
            **self.numbers,
            "version/senior": self.version,
        }

    def responses(self, examples: Sequence[Example], codec: TextCodec) -> Iterator[Response]:
        """Yields the answers as a run keeps them; `examples` are the rows of their prompts."""
        for prompt, (example, group) in enumerate(zip(examples, self.answers, strict=True)):
            row = example.shown_row
            for sample, trajectory in enumerate(group):
                yield Response(
                    trajectory,
                    text=codec.decode(trajectory.response_token_ids),
                    reward=None if self.grades is None else self.grades.rewards[prompt][sample],
                    scores={
                        name: scores[prompt][sample]
                        for name, scores in (self.grades.scores if self.grades else {}).items()
                    },
                    group_id=f"eval/prompt-{prompt}",
                    place=example.shown_place,
                    row=row,
                    junior_logprobs=(
                        None
                        if self.junior_logprobs is None
                        else self.junior_logprobs[prompt][sample]
                    ),
                )


def draw(
    session: Session,
    tandem: Mapping[str, Any],
    weights: server_pb2.WeightsVersion,
    takeovers: Mapping[EpisodeKey, Takeover] | None = None,
) -> Drawn:
    """Draws answers to the held-out prompts by these weights, which must be the trainer's.

    The answers are episodes in a run with an environment. `tandem` has the fields of TandemConfig.
    All modes draw with the same seeds. `takeovers` has the episodes in which another model takes
    over, by prompt and sample.

    Raises RewardError if no episode could begin.
    """
    prompts = prompts_of(session, tandem)
    if session.environment is None:
        return Drawn(session.generate(prompts, weights))
    requests = dict(enumerate(zip(prompts, held_out(session), strict=True)))
    drawn = draw_episodes(session, 0, requests, weights, NoRecord(), takeovers=takeovers)
    episodes = list(itertools.chain(*drawn))
    answers = [trajectories_of(group) for group in drawn]
    if not any(answers):
        raise RewardError(
            f"no episode of the evaluation began\n{failures_without_response(episodes)[0]}"
        )
    gave = [[one.reward for one in group if one.trajectory is not None] for group in drawn]
    return Drawn(answers, gave, episode_metrics(episodes))


def prompts_of(session: Session, tandem: Mapping[str, Any]) -> list[Prompt]:
    """Returns the requests for answers to the held-out prompts, in their order."""
    settings = session.settings
    sampling = session.sampling | {"temperature": settings.eval.temperature}
    if settings.eval.max_tokens is not None:
        sampling["max_tokens"] = settings.eval.max_tokens
    return [
        Prompt(
            token_ids=example.token_ids,
            seed=prompt_seed(settings.seed, 0, index, "eval"),
            num_samples=settings.eval.samples,
            sampling=sampling,
            tandem=tandem,
            speculative=settings.eval_speculative.fields(),
            vision_inputs=example.vision_inputs,
        )
        for index, example in enumerate(held_out(session))
    ]


def grade(session: Session, drawn: Drawn, lengths: Sequence[Sequence[int]] | None = None) -> Grades:
    """Judges the answers to every held-out prompt, or their first tokens, as many as `lengths`.

    An answer that is missing, because its environment failed before it began, is not correct.
    """
    settings, answers = session.settings, drawn.answers
    ends = lengths or [[len(one.response_token_ids) for one in group] for group in answers]
    gave_all = drawn.environments or [[None] * len(group) for group in answers]
    responses = [
        [
            JudgedResponse(
                session.codec.decode(one.response_token_ids[:end]),
                one,
                length=end,
                environment=gave,
            )
            for one, end, gave in zip(*group, strict=True)
        ]
        for group in zip(answers, ends, gave_all, strict=True)
    ]
    with session.progress.phase("evaluate, judge"):
        judged = session.reward(held_out(session), responses)
    rewards = judged.rewards
    least = settings.reward.correct_at
    n = settings.eval.samples
    correct = [
        [value is not None and value >= least for value in group] + [False] * (n - len(group))
        for group in rewards
    ]
    pass_at = {
        k: sum(pass_at_k(n, sum(group), k) for group in correct) / len(correct)
        for k in settings.eval.k
    }
    patterns = {
        name: [[bool(re.search(pattern, one.text)) for one in group] for group in responses]
        for name, pattern in settings.eval.patterns.items()
    }
    return Grades(correct, rewards, pass_at, judged.scores, patterns)


def held_out(session: Session) -> Sequence[Example]:
    """Returns the held-out rows: those of `eval.data`, without it all data."""
    return (session.eval_data or session.data).examples
