"""Losses of pairs of a chosen and a rejected response: DPO and its relatives.

Each is a function of the log-probabilities of both responses, sums over their tokens. The trainer
learns a loss by its derivatives: with the weights -dL/dlogp its cross-entropy has the gradient of
L, at the log-probabilities where they were taken (ADR 105). Numbers are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.settings.run import DpoSettings

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Pairs:
    """The log-probabilities of N pairs, in nats, sums over the tokens of each response, [N].

    Attributes:
        chosen: of the chosen responses under the model in training.
        rejected: of the rejected ones.
        ref_chosen: of the chosen responses under the reference policy; zeros without one.
        ref_rejected: of the rejected ones.
        chosen_tokens: number of tokens of each chosen response.
        rejected_tokens: of each rejected one.
    """

    chosen: Numbers
    rejected: Numbers
    ref_chosen: Numbers
    ref_rejected: Numbers
    chosen_tokens: Numbers
    rejected_tokens: Numbers

    @property
    def chosen_ratios(self) -> Numbers:
        """Log of the ratio of the model to the reference, of each chosen response."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Numbers:
        """Log of the ratio of the model to the reference, of each rejected response."""
        return self.rejected - self.ref_rejected


@dataclass(frozen=True)
class PairLoss:
    """The loss of a batch of pairs.

    Attributes:
        value: the mean over the pairs, with the cross-entropy of `rpo_alpha`.
        chosen_weights: [N], -dL/dlogp of each token of a chosen response.
        rejected_weights: [N], of each token of a rejected one.
        metrics: what metrics.jsonl shows of the batch.
    """

    value: float
    chosen_weights: Numbers
    rejected_weights: Numbers
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Losses:
    """The losses of pairs, with their derivatives by the two log-probabilities, [N]."""

    values: Numbers
    by_chosen: Numbers
    by_rejected: Numbers


def pair_loss(pairs: Pairs, settings: DpoSettings) -> PairLoss:
    """Returns the loss of `settings` for a batch of pairs, and its derivatives."""
    losses = LOSSES[settings.loss_type](pairs, settings)
    count = len(losses.values)
    value = float(losses.values.mean())
    chosen_weights = -losses.by_chosen / count
    metrics = _metrics(pairs, settings)
    if settings.rpo_alpha:
        tokens = pairs.chosen_tokens.sum()
        metrics["loss/chosen_nll"] = float(-pairs.chosen.sum() / tokens)
        value += settings.rpo_alpha * metrics["loss/chosen_nll"]
        chosen_weights = chosen_weights + settings.rpo_alpha / tokens
    return PairLoss(value, chosen_weights, -losses.by_rejected / count, metrics)


def _metrics(pairs: Pairs, settings: DpoSettings) -> dict[str, float]:
    chosen, rejected = pairs.chosen_ratios, pairs.rejected_ratios
    if settings.loss_type == "simpo":
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    margins = settings.beta * (chosen - rejected)
    return {
        "rewards/chosen": float(settings.beta * chosen.mean()),
        "rewards/rejected": float(settings.beta * rejected.mean()),
        "rewards/margins": float(margins.mean()),
        "rewards/accuracies": float((margins > 0).mean()),
        "logps/chosen": float(pairs.chosen.mean()),
        "logps/rejected": float(pairs.rejected.mean()),
    }


def _log_sigmoid(x: Numbers) -> Numbers:
    return -np.logaddexp(0.0, -x)


def _sigmoid(x: Numbers) -> Numbers:
    return np.exp(_log_sigmoid(x))


def _of_difference(values: Numbers, slopes: Numbers, settings: DpoSettings) -> _Losses:
    """Returns losses of z = beta * (chosen - rejected), given their derivatives by z."""
    return _Losses(values, settings.beta * slopes, -settings.beta * slopes)


def _difference(pairs: Pairs, settings: DpoSettings) -> Numbers:
    return settings.beta * (pairs.chosen_ratios - pairs.rejected_ratios)


def _smoothed(z: Numbers, epsilon: float) -> tuple[Numbers, Numbers]:
    """Returns -(1 - epsilon) log sigmoid(z) - epsilon log sigmoid(-z), and its derivative."""
    values = -(1 - epsilon) * _log_sigmoid(z) - epsilon * _log_sigmoid(-z)
    return values, -(1 - epsilon) * _sigmoid(-z) + epsilon * _sigmoid(z)


def _sigmoid_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """DPO (arXiv 2305.18290, equation 7); with label_smoothing cDPO, as Mitchell noted."""
    values, slopes = _smoothed(_difference(pairs, settings), settings.label_smoothing)
    return _of_difference(values, slopes, settings)


def _normalised(pairs: Pairs, values: Numbers, by_difference: Numbers) -> _Losses:
    """Returns losses of the difference of means over tokens, given their derivatives by it."""
    return _Losses(
        values, by_difference / pairs.chosen_tokens, -by_difference / pairs.rejected_tokens
    )


def _mean_difference(pairs: Pairs) -> Numbers:
    """Returns the difference of the means over the tokens, in nats per token."""
    return pairs.chosen_ratios / pairs.chosen_tokens - pairs.rejected_ratios / pairs.rejected_tokens


def _sigmoid_norm_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """DPO of means over tokens (Tulu 3, arXiv 2411.15124, equation 6)."""
    values, slopes = _smoothed(settings.beta * _mean_difference(pairs), 0.0)
    return _normalised(pairs, values, settings.beta * slopes)


def _simpo_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """SimPO (arXiv 2405.14734, equation 6)."""
    z = settings.beta * _mean_difference(pairs) - settings.simpo_gamma
    values, slopes = _smoothed(z, 0.0)
    return _normalised(pairs, values, settings.beta * slopes)


def _ipo_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """IPO (arXiv 2310.12036, equation 17) of means over tokens, as its authors compute it."""
    error = _mean_difference(pairs) - 1 / (2 * settings.beta)
    return _normalised(pairs, error**2, 2 * error)


def _hinge_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """The hinge of SLiC (arXiv 2305.10425) on DPO's difference, as in RSO (arXiv 2309.06657)."""
    z = _difference(pairs, settings)
    return _of_difference(np.maximum(0.0, 1 - z), np.where(z < 1, -1.0, 0.0), settings)


def _robust_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """Robust DPO, unbiased under labels that are flipped (arXiv 2403.00409)."""
    z, epsilon = _difference(pairs, settings), settings.label_smoothing
    scale = 1 / (1 - 2 * epsilon)
    values = -(1 - epsilon) * _log_sigmoid(z) + epsilon * _log_sigmoid(-z)
    slopes = -(1 - epsilon) * _sigmoid(-z) - epsilon * _sigmoid(z)
    return _of_difference(scale * values, scale * slopes, settings)


def _exo_pair_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """EXO of pairs (arXiv 2402.00856, equation 16)."""
    z, epsilon = _difference(pairs, settings), settings.label_smoothing
    right, wrong = np.log1p(-epsilon), np.log(epsilon)
    q, other = _sigmoid(z), _sigmoid(-z)
    values = q * (_log_sigmoid(z) - right) + other * (_log_sigmoid(-z) - wrong)
    return _of_difference(values, q * other * (z - right + wrong), settings)


def _nca_pair_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """NCA of pairs (arXiv 2402.05369)."""
    chosen, rejected = settings.beta * pairs.chosen_ratios, settings.beta * pairs.rejected_ratios
    values = -_log_sigmoid(chosen) - (_log_sigmoid(-chosen) + _log_sigmoid(-rejected)) / 2
    by_chosen = _sigmoid(chosen) / 2 - _sigmoid(-chosen)
    return _Losses(values, settings.beta * by_chosen, settings.beta * _sigmoid(rejected) / 2)


def _bco_pair_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """BCO of pairs (arXiv 2404.04656), without its moving mean."""
    chosen, rejected = settings.beta * pairs.chosen_ratios, settings.beta * pairs.rejected_ratios
    values = -_log_sigmoid(chosen) - _log_sigmoid(-rejected)
    return _Losses(values, -settings.beta * _sigmoid(-chosen), settings.beta * _sigmoid(rejected))


def _sppo_hard_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """SPPO with probabilities of 1 and 0 (arXiv 2405.00675, equation 4.7)."""
    winner = pairs.chosen_ratios - 0.5 / settings.beta
    loser = pairs.rejected_ratios + 0.5 / settings.beta
    return _Losses(winner**2 + loser**2, 2 * winner, 2 * loser)


def _apo_zero_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """APO-zero (arXiv 2408.06266, equation 7)."""
    chosen, rejected = (
        _sigmoid(settings.beta * pairs.chosen_ratios),
        _sigmoid(settings.beta * pairs.rejected_ratios),
    )
    return _Losses(
        1 - chosen + rejected,
        -settings.beta * chosen * (1 - chosen),
        settings.beta * rejected * (1 - rejected),
    )


def _apo_down_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """APO-down (arXiv 2408.06266, equation 8)."""
    chosen = _sigmoid(settings.beta * pairs.chosen_ratios)
    right = _sigmoid(_difference(pairs, settings))
    by_chosen, by_difference = chosen * (1 - chosen), right * (1 - right)
    return _Losses(
        chosen + 1 - right,
        settings.beta * (by_chosen - by_difference),
        settings.beta * by_difference,
    )


def _discopop_loss(pairs: Pairs, settings: DpoSettings) -> _Losses:
    """DiscoPOP, log-ratio modulated (arXiv 2406.08414, equation 5)."""
    z, tau = _difference(pairs, settings), settings.discopop_tau
    mixed, other = _sigmoid(z / tau), _sigmoid(-z / tau)
    # exp(-z) alone overflows where the mixture leaves nothing of it.
    exponential = np.exp(_log_sigmoid(z / tau) - z)
    values = -_log_sigmoid(z) * other + exponential
    slopes = (
        -_sigmoid(-z) * other
        + _log_sigmoid(z) * mixed * other / tau
        + exponential * (other / tau - 1)
    )
    return _of_difference(values, slopes, settings)


# The losses by `dpo.loss_type`.
LOSSES: dict[str, Callable[[Pairs, DpoSettings], _Losses]] = {
    "sigmoid": _sigmoid_loss,
    "sigmoid_norm": _sigmoid_norm_loss,
    "hinge": _hinge_loss,
    "ipo": _ipo_loss,
    "robust": _robust_loss,
    "exo_pair": _exo_pair_loss,
    "nca_pair": _nca_pair_loss,
    "bco_pair": _bco_pair_loss,
    "sppo_hard": _sppo_hard_loss,
    "apo_zero": _apo_zero_loss,
    "apo_down": _apo_down_loss,
    "discopop": _discopop_loss,
    "simpo": _simpo_loss,
}
