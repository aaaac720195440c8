"""Evaluation of the senior alone: accuracy and pass@k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.requests import Prompt
from tandem.schedule import prompt_seed
from tandem.session import Session
from tandem.settings import given
from tandem.stats import pass_at_k, wilson_interval
from tandem.types.v1 import trajectory_pb2


@dataclass
class Evaluation:
    """Result of one evaluation.

    Attributes:
        correct: for every prompt, which samples were correct.
        rewards: for every prompt, the samples' rewards; None where a reward failed, which counts as
            not correct.
        trajectories: for every prompt, the samples.
        pass_at: k → unbiased estimate of pass@k.
    """

    version: int
    correct: list[list[bool]]
    rewards: list[list[float | None]]
    trajectories: list[list[trajectory_pb2.Trajectory]] = field(repr=False)
    pass_at: dict[int, float] = field(default_factory=dict)

    @property
    def prompts(self) -> int:
        """Prompts evaluated."""
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        """Share of correct samples."""
        flat = [value for group in self.correct for value in group]
        return sum(flat) / len(flat)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson; by prompts, hence careful with many samples)."""
        return wilson_interval(round(self.accuracy * self.prompts), self.prompts)

    def summary(self) -> dict[str, Any]:
        """As a line of evals.jsonl."""
        low, high = self.interval
        rewards = [value for group in self.rewards for value in group if value is not None]
        return {
            "mode": "solo",
            "prompts": self.prompts,
            "samples": len(self.correct[0]),
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "reward/mean": sum(rewards) / len(rewards) if rewards else None,
            "reward/failed": sum(map(len, self.rewards)) - len(rewards),
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "version/senior": self.version,
        }


def in_words(summary: Mapping[str, Any]) -> str:
    """A summary as a sentence."""
    passes = "".join(f", pass@{k} {value:.3f}" for k, value in summary["pass_at"].items())
    failed = f", {summary['reward/failed']:,} rewards failed" if summary["reward/failed"] else ""
    samples = f"{summary['samples']:,} sample" + "s" * (summary["samples"] != 1)
    return (
        f"solo accuracy {summary['accuracy']:.3f} (95 % interval {summary['accuracy_low']:.3f} to "
        f"{summary['accuracy_high']:.3f}){passes}; {summary['prompts']:,} prompts, "
        f"{samples} each{failed}"
    )


def evaluate(session: Session) -> Evaluation:
    """Lets the senior alone answer the held-out prompts (all data without `eval.data`).

    What answers are the trainer's weights: rollout servers that are behind get them first.
    """
    settings = session.settings
    dataset = session.eval_data or session.data
    sampling = given(settings.sampling) | {"temperature": settings.eval.temperature}
    if settings.eval.max_tokens is not None:
        sampling["max_tokens"] = settings.eval.max_tokens
    groups = session.generate(
        [
            Prompt(
                token_ids=example.token_ids,
                seed=prompt_seed(settings.seed, 0, index, "eval"),
                num_samples=settings.eval.samples,
                sampling=sampling,
                tandem={"enabled": False},
            )
            for index, example in enumerate(dataset.examples)
        ],
    )
    texts = [[session.codec.decode(t.response_token_ids) for t in group] for group in groups]
    rewards = session.reward(dataset.examples, texts).rewards
    least = settings.reward.correct_at
    correct = [[value is not None and value >= least for value in group] for group in rewards]
    n = settings.eval.samples
    pass_at = {
        k: sum(pass_at_k(n, sum(group), k) for group in correct) / len(correct)
        for k in settings.eval.k
    }
    version = groups[0][0].senior_versions[-1].weights.version
    return Evaluation(version, correct, rewards, groups, pass_at)
