"""The coefficient of the KL to the reference policy, from step to step."""

from __future__ import annotations

from tandem.checkpoints import SavedState
from tandem.settings import RunSettings
from tandem.trainer.v1 import trainer_pb2

# Most that one step counts the KL as off its target, as a share of it.
_MOST_OFF = 0.2


def first_kl_coefficient(settings: RunSettings, state: SavedState | None) -> float | None:
    """Of a run that begins, or goes on from `state`; None in one without a KL."""
    if settings.kl_control is not None and state is not None and state.kl_coefficient is not None:
        return state.kl_coefficient
    return settings.objective.kl_coefficient or None


def next_kl_coefficient(
    settings: RunSettings, value: float | None, report: trainer_pb2.StepReport, samples: int
) -> float | None:
    """What the step after one of `samples` responses takes, which took `value`.

    With `kl_control` the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section
    2.2), of the KL in nats that is the sum over a response's tokens with a weight and the mean over
    the responses. Without it, and after a step that was skipped, `value`.
    """
    control = settings.kl_control
    if control is None or value is None or report.skipped:
        return value
    metrics = dict(report.metrics)
    responses = samples - metrics["policy/dropped_samples"]
    tokens = metrics["policy/weighted_tokens"] / (settings.objective.num_epochs or 1)
    kl = metrics["policy/kl_to_ref"] * tokens / responses
    off = min(max(kl / control.target - 1, -_MOST_OFF), _MOST_OFF)
    return value * (1 + off * responses / control.horizon)
