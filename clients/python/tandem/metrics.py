"""The keys of metrics.jsonl. The trainer computes most numbers, the client takes the times."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tandem import tracing
from tandem._proto.types.v1 import trajectory_pb2
from tandem.utils.authors import ENVIRONMENT
from tandem.utils.progress import Progress

# The keys of every line of metrics.jsonl, in this order; null where a step has no such number.
KEYS = (
    "step",
    "time_seconds",
    "step/trained",
    "reward/mean",
    "reward/std",
    "reward/min",
    "reward/max",
    "reward/frac_zero_std",
    "reward/failed",
    "reward/timed_out",
    "reward/task_mean",
    "reward/overlong_mean",
    "reward/kl_penalty",
    "batch/groups_drawn",
    "batch/groups_dropped",
    "batch/num_gen_batches",
    "loss/total",
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "loss/junior_kl",
    "loss/distillation",
    "policy/entropy",
    "policy/kl_to_ref",
    "policy/kl_coefficient",
    "policy/junior_kl",
    "distillation/divergence",
    "distillation/teacher_rest",
    "distillation/student_rest",
    "policy/mean_ratio",
    "policy/clip_fraction",
    "policy/ppo_kl",
    "policy/grad_norm",
    "policy/learning_rate",
    "policy/weighted_tokens",
    "policy/dropped_samples",
    "policy/micro_batches",
    "policy/shared_token_fraction",
    "policy/updates",
    "policy/updates_not_finite",
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/max_abs_logprob_diff",
    "mismatch/effective_sample_size",
    "mismatch/masked_fraction",
    "mismatch/rejected_fraction",
    "mismatch/junior/k1",
    "mismatch/junior/k3",
    "mismatch/junior/max_abs_logprob_diff",
    "mismatch/junior/effective_sample_size",
    "tandem/senior_token_fraction",
    "tandem/junior_token_fraction",
    "tandem/switches_per_seq",
    "tandem/tokens_per_sent",
    "tokens/prompt",
    "tokens/response",
    "response/length_mean",
    "response/length_max",
    "response/truncated_fraction",
    "rollout/replicas",
    "rollout/prompts_moved",
    "rollout/prompts_retried",
    "trackers/lines_waiting",
    "time/generate_seconds",
    "time/reward_seconds",
    "time/reference_seconds",
    "time/teachers_seconds",
    "time/train_seconds",
    "time/publish_seconds",
    "time/trajectories_seconds",
    "time/eval_seconds",
    "time/checkpoint_seconds",
    "trajectories/lost",
    "version/senior",
)
# The keys that a critic adds.
CRITIC_KEYS = (
    "critic/loss",
    "critic/clip_fraction",
    "critic/explained_variance",
    "critic/value_mean",
    "critic/return_mean",
    "critic/grad_norm",
    "critic/learning_rate",
    "critic/updates",
    "critic/updates_not_finite",
    "time/critic_seconds",
)
# The keys that an environment adds.
ENVIRONMENT_KEYS = (
    "environment/turns_mean",
    "environment/tokens_mean",
    "environment/tool_calls_mean",
    "environment/tool_errors",
    "environment/parse_errors",
    "environment/failures",
    "environment/timeouts",
    "environment/crashes",
    "environment/floods",
    "environment/stop_finished",
    "environment/stop_turns",
    "environment/stop_tokens",
    "environment/stop_tool_calls",
    "environment/stop_context",
    "environment/stop_time",
    "environment/stop_parse_error",
    "environment/stop_environment",
)
# The keys that an asynchronous run adds.
ASYNC_KEYS = (
    "staleness/mean",
    "staleness/max",
    "idle/rollout",
    "idle/trainer",
    "time/wait_seconds",
)
# The key that an asynchronous run with a critic adds to them.
ASYNC_CRITIC_KEYS = ("idle/critic",)
# The keys that pairs of responses add.
PAIR_KEYS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "loss/chosen_nll",
)
# The keys that `checkpoint.upload` adds.
UPLOAD_KEYS = ("checkpoint/uploads", "checkpoint/upload_failures")
# Keys of whole numbers, which a trainer reports as floating-point numbers.
COUNT_KEYS = frozenset(
    {
        "tokens/prompt",
        "tokens/response",
        "policy/weighted_tokens",
        "policy/dropped_samples",
        "policy/micro_batches",
        "policy/updates",
        "policy/updates_not_finite",
        "critic/updates",
        "critic/updates_not_finite",
    }
)
# Keys that depend on the clock or the disk; all others are the same when a run is repeated.
CLOCK_KEYS = frozenset(
    {
        "rollout/replicas",
        "rollout/prompts_moved",
        "rollout/prompts_retried",
        "trackers/lines_waiting",
        "time_seconds",
        "time/generate_seconds",
        "time/reward_seconds",
        "time/reference_seconds",
        "time/teachers_seconds",
        "time/train_seconds",
        "time/publish_seconds",
        "time/trajectories_seconds",
        "time/eval_seconds",
        "time/checkpoint_seconds",
        "trajectories/lost",
        "idle/rollout",
        "idle/trainer",
        "idle/critic",
        "time/critic_seconds",
        "time/wait_seconds",
        *UPLOAD_KEYS,
    }
)


def step_line(values: Mapping[str, float | int | None]) -> dict[str, Any]:
    """Returns a line of metrics.jsonl: exactly its keys, None for numbers that are not finite.

    With several reward functions the mean of each is among the values, as reward/<name>. A
    speculator adds its own, speculator/<name>, and a mixture of experts router/<name> and
    critic/router_<name>. Distillation adds the divergence from each teacher,
    distillation/divergence/<name>.
    """
    keys = KEYS
    for further in (
        CRITIC_KEYS,
        ENVIRONMENT_KEYS,
        ASYNC_KEYS,
        ASYNC_CRITIC_KEYS,
        PAIR_KEYS,
        UPLOAD_KEYS,
    ):
        keys += further if any(key in values for key in further) else ()
    added = ("reward/", "router/", "critic/router_", "speculator/", "distillation/divergence/")
    # In alphabetical order: a report is a map, whose order no two processes share.
    keys += tuple(sorted(key for key in values if key.startswith(added) and key not in KEYS))
    line = {key: values.get(key) for key in keys}
    return {key: _written(key, value) for key, value in line.items()}


def _written(key: str, value: float | int | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if key in COUNT_KEYS else value


def eval_prefix(line: Mapping[str, Any]) -> str:
    """Returns the prefix of the keys of a line of evals.jsonl beside those of metrics.jsonl."""
    return f"eval/{line['mode']}/"


def numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a line of metrics.jsonl or evals.jsonl but its step, with their names.

    A number in an inner object is named by both keys: pass_at/1.
    """
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "step":
            yield prefix + key, value


def response_metrics(
    groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
    rewards: Sequence[Sequence[float | None]],
) -> dict[str, float | int]:
    """Returns the client's metrics of a step's responses; those of rewards if there is any.

    A group with one reward throughout, or with a single one, has no variance: an estimator that
    compares the responses to a prompt gives it no gradient.
    """
    judged = [[value for value in group if value is not None] for group in rewards]
    known = [group for group in judged if group]
    flat = [value for group in known for value in group]
    responses = [trajectory for group in groups for trajectory in group]
    numbers: dict[str, float | int] = {"reward/failed": len(responses) - len(flat)}
    if flat:
        numbers |= {
            "reward/min": min(flat),
            "reward/max": max(flat),
            "reward/frac_zero_std": sum(min(group) == max(group) for group in known) / len(known),
        }
    return numbers | length_metrics(responses)


def length_metrics(responses: Sequence[trajectory_pb2.Trajectory]) -> dict[str, float | int]:
    """Returns the client's metrics of the lengths of responses; none without a response."""
    if not responses:
        return {}
    # Tokens of an environment count for no length.
    lengths = [
        len(one.response_token_ids) - one.authorship_mask.count(ENVIRONMENT) for one in responses
    ]
    cut = [one.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH for one in responses]
    return {
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "response/truncated_fraction": sum(cut) / len(cut),
    }


def staleness_metrics(
    responses: Iterable[trajectory_pb2.Trajectory], version: int
) -> dict[str, float]:
    """Returns how many versions the tokens of responses lie behind `version`; none without one."""
    behind = [
        (version - run.weights.version, run.count)
        for one in responses
        for run in one.senior_versions
    ]
    tokens = sum(count for _, count in behind)
    if not tokens:
        return {}
    return {
        "staleness/mean": sum(versions * count for versions, count in behind) / tokens,
        "staleness/max": max(versions for versions, _ in behind),
    }


class WorkTime:
    """The time of the blocks that one thread at a time is in; another thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._begun: float | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Counts the time of the block."""
        begun = time.monotonic()
        with self._lock:
            self._begun = begun
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.monotonic() - begun
                self._begun = None

    @property
    def seconds(self) -> float:
        """The time until now, that of a block that runs included."""
        with self._lock:
            running = 0.0 if self._begun is None else time.monotonic() - self._begun
            return self._seconds + running


class IdleShares:
    """The shares of the time in which servers of an asynchronous run had nothing to do."""

    def __init__(self, drawing: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins to count. `drawing` is the time, until now, in which responses were drawn."""
        self._clock = clock
        self._since, self._drawing = clock(), drawing

    def metrics(
        self, drawing: float, training: float, evaluating: float, valuing: float | None = None
    ) -> dict[str, float]:
        """Returns the shares since the last call.

        `drawing` is the time in which responses were drawn until now. `training` and `evaluating`
        are the times of the two since the last call, and `valuing` is that part of `training` in
        which the critic worked and the trainer waited for it; None in a run without a critic.
        """
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        drawn = drawing - self._drawing
        self._since, self._drawing = now, drawing
        shares = {
            "idle/rollout": max(0.0, 1 - (drawn + evaluating) / seconds),
            "idle/trainer": max(0.0, 1 - (training - (valuing or 0.0)) / seconds),
        }
        if valuing is not None:
            shares["idle/critic"] = max(0.0, 1 - valuing / seconds)
        return shares


class StepClock:
    """A clock for the phases of one step, which `progress` shows."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress or Progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`; the block is a span of that name."""
        with self.timed(name), tracing.span(name):
            yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Does the same for a block that has a span of its own."""
        start = time.monotonic()
        try:
            with self.progress.phase(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """Returns the seconds of every phase as "time/<phase>_seconds"."""
        return {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
