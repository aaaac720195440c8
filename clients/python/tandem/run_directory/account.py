"""The trained and the lost work of a run's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2

# Keys of metrics.jsonl that count losses, with their names for people.
_LOSSES = {
    "reward/failed": "responses without a reward",
    "reward/timed_out": "of them because a judge took too long",
    "environment/failures": "episodes whose environment failed",
    "environment/timeouts": "of them because a call took too long",
    "environment/crashes": "of them because a process ended",
    "environment/floods": "of them because of too much memory or output",
    "policy/updates_not_finite": "updates that were not finite",
    "rollout/prompts_retried": "prompts retried after a rollout server failed",
    "trajectories/lost": "trajectory files that could not be written",
}


class RunAccount:
    """Adds up lines of metrics.jsonl, those of earlier starts included.

    Attributes:
        steps: number of steps.
        trained: number of steps that changed weights.
        why: reasons of this start's steps that did not, with their number.
    """

    def __init__(self) -> None:
        self.steps = self.trained = 0
        self.why: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line."""
        self.steps += 1
        # Lines of earlier versions do not say so.
        trained = line.get("step/trained")
        self.trained += 1 if trained is None else trained
        for key in _LOSSES:
            self._losses[key] += line.get(key) or 0

    @property
    def trained_nothing(self) -> bool:
        """Whether steps were done, and none of them changed a weight."""
        return self.steps > 0 and self.trained == 0

    def record(self) -> dict[str, int]:
        """Returns the counts, for `--json`."""
        return {
            "steps_done": self.steps,
            "steps_trained": self.trained,
            **{key: self._losses[key] for key in _LOSSES},
        }

    def __str__(self) -> str:
        """Returns a line for people, which names losses alone where there are any."""
        said = [f"{self.trained} of {self.steps} steps trained"]
        if self.trained < self.steps and self.why:
            reasons = (f"{count} skipped: {why}" for why, count in self.why.most_common())
            said[0] += f" ({'; '.join(reasons)})"
        said += [
            f"{name}: {self._losses[key]:,}" for key, name in _LOSSES.items() if self._losses[key]
        ]
        text = ", ".join(said)
        return f"WARNING: no step changed a weight: {text}" if self.trained_nothing else text


def why_untrained(report: trainer_pb2.StepReport, before: server_pb2.WeightsVersion) -> str | None:
    """Returns why a step left the weights as they were; None if it changed them."""
    if report.skipped:
        return report.skip_reason or "the trainer skipped it"
    if report.weights.version == before.version:
        return "the trainer made no update"
    # Updates were made, and changed no bit.
    if report.weights.digest and report.weights.digest == before.digest:
        if report.metrics.get("policy/learning_rate", 1.0) == 0:
            return "the learning rate was 0"
        if report.metrics.get("policy/grad_norm", 1.0) == 0:
            return "the gradient was 0"
    return None
