"""The keys of metrics.jsonl: the trainer computes them, but for the times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
# Whole numbers; a report of the trainer holds floating-point numbers alone.
COUNT_KEYS = frozenset({"tokens/prompt", "tokens/response"})
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
    return {key: _written(key, value) for key, value in line.items()}


def _written(key: str, value: float | int | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if key in COUNT_KEYS else value


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
