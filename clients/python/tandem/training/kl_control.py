"""The coefficient of the KL to the reference policy, from step to step."""

from __future__ import annotations

from tandem._proto.trainer.v1 import trainer_pb2
from tandem.run_directory.checkpoints import SavedState
from tandem.settings.run import RunSettings

# Bound of the relative error of a step's KL, up and down.
_ERROR_CLIP = 0.2


def first_kl_coefficient(settings: RunSettings, state: SavedState | None) -> float | None:
    """Returns the coefficient of a run that begins or continues from `state`; None without a KL."""
    if settings.kl_control is not None and state is not None and state.kl_coefficient is not None:
        return state.kl_coefficient
    return settings.objective.kl_coefficient or None


def next_kl_coefficient(
    settings: RunSettings, value: float | None, report: trainer_pb2.StepReport, samples: int
) -> float | None:
    """Returns the coefficient after a step of `samples` responses that had the coefficient `value`.

    With `kl_control` it follows the proportional controller of Ziegler et al. 2019 (arXiv
    1909.08593, section 2.2). The KL that it steers is in nats: a sum over the weighted tokens of a
    response, and a mean over the responses. Without `kl_control`, and after a step that was
    skipped, it is `value`.
    """
    control = settings.kl_control
    if control is None or value is None or report.skipped:
        return value
    metrics = dict(report.metrics)
    responses = samples - metrics["policy/dropped_samples"]
    tokens = metrics["policy/weighted_tokens"] / (settings.objective.num_epochs or 1)
    kl = metrics["policy/kl_to_ref"] * tokens / responses
    error = min(max(kl / control.target - 1, -_ERROR_CLIP), _ERROR_CLIP)
    return value * (1 + error * responses / control.horizon)
