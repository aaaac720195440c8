"""What a step reports: the keys of metrics.jsonl and how the client computes its own."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tandem.types.v1 import trajectory_pb2

# Every line of metrics.jsonl has these keys, in this order; null where a step has no such number.
KEYS = (
    "step",
    "time_seconds",
    "reward/mean",
    "reward/std",
    "loss/total",
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "policy/clip_fraction",
    "policy/ppo_kl",
    "policy/grad_norm",
    "policy/learning_rate",
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/max_abs_logprob_diff",
    "tandem/senior_token_fraction",
    "tandem/junior_token_fraction",
    "tandem/switches_per_seq",
    "tandem/tokens_per_sent",
    "tokens/prompt",
    "tokens/response",
    "time/generate_seconds",
    "time/reward_seconds",
    "time/train_seconds",
    "time/publish_seconds",
    "version/senior",
)
# Added by a critic.
CRITIC_KEYS = (
    "critic/loss",
    "critic/clip_fraction",
    "critic/explained_variance",
    "critic/grad_norm",
)
# Values that depend on the clock; everything else is the same when a run is repeated.
CLOCK_KEYS = frozenset(
    {
        "time_seconds",
        "time/generate_seconds",
        "time/reward_seconds",
        "time/train_seconds",
        "time/publish_seconds",
    }
)


def step_line(values: Mapping[str, float | int | None]) -> dict[str, Any]:
    """One line of metrics.jsonl: exactly the documented keys; numbers that are not finite: null."""
    keys = KEYS + (CRITIC_KEYS if any(key in values for key in CRITIC_KEYS) else ())
    line = {key: values.get(key) for key in keys}
    return {
        key: None if value is None or not math.isfinite(value) else value
        for key, value in line.items()
    }


def batch_metrics(
    trajectories: Sequence[trajectory_pb2.Trajectory],
    rewards: Sequence[float],
    sentence_ends: Collection[int],
) -> dict[str, float]:
    """Rewards, authorship and sizes of a batch.

    `sentence_ends`: the sentence strategy's default boundary set. The standard deviation is over
    all samples of the batch, with ddof 1.
    """
    masks = [np.frombuffer(t.authorship_mask, np.uint8) for t in trajectories]
    tokens = sum(map(len, masks))
    senior = float(sum(int(mask.sum()) for mask in masks)) / tokens
    switches = sum(int(np.count_nonzero(np.diff(mask.astype(int)))) for mask in masks)
    ends = frozenset(sentence_ends)
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0,
        "tandem/senior_token_fraction": senior,
        "tandem/junior_token_fraction": 1.0 - senior,
        "tandem/switches_per_seq": switches / len(masks),
        "tandem/tokens_per_sent": tokens / sum(_sentences(t, ends) for t in trajectories),
        "tokens/prompt": sum(len(t.prompt_token_ids) for t in trajectories),
        "tokens/response": tokens,
    }


def _sentences(trajectory: trajectory_pb2.Trajectory, ends: Collection[int]) -> int:
    tokens = trajectory.response_token_ids
    whole = sum(token in ends for token in tokens)
    return whole + (tokens[-1] not in ends)


class StepClock:
    """Seconds of the phases of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """As "time/<phase>_seconds"."""
        return {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
