"""The losses of Tinker's API, as functions of the log-probabilities of a datum's targets.

Each is a sum over the datum's tokens. The trainer learns a loss by its derivatives: with the
weights -dL/dlogp its cross-entropy has the gradient of L, at the log-probabilities where they were
taken. Numbers are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.openai_server.errors import RequestError

Numbers = np.ndarray[Any, np.dtype[np.float64]]

# Bounds of the ratio that PPO and CISPO have by default.
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CLIP_FIELDS = tuple(_CLIP)


@dataclass(frozen=True)
class Loss:
    """The loss of one datum.

    Attributes:
        terms: [N], in nats; their sum is the loss.
        weights: [N], -dL/dlogp of each target.
    """

    terms: Numbers
    weights: Numbers

    @property
    def value(self) -> float:
        """The loss, in nats."""
        return float(np.sum(self.terms))


@dataclass(frozen=True)
class _Kind:
    """A loss: its numbers for each token, those that may be left out, and those of its config."""

    compute: Callable[[Numbers, Mapping[str, Any]], Loss]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    defaults: Mapping[str, float] | None = None


def loss_of(
    name: str, config: Mapping[str, float | str], logprobs: Numbers, inputs: Mapping[str, Numbers]
) -> Loss:
    """Returns the loss `name` of a datum.

    `logprobs` [N] are those of the targets under the current weights, `inputs` [N] the other
    numbers of the datum. Raises RequestError, which names the field, for a loss, a number or a
    setting that does not exist or is missing, and for a loss that is not finite.
    """
    kind = kind_of(name)
    for field in config:
        if field not in kind.config:
            raise RequestError(f"loss_fn_config.{field}: not a setting of {name}", field)
    for field in inputs:
        if field not in (*kind.required, *kind.optional):
            raise RequestError(f"loss_fn_inputs.{field}: not an input of {name}", field)
    for field in kind.required:
        if field not in inputs:
            raise RequestError(f"loss_fn_inputs.{field}: is required by {name}", field)
    settings: dict[str, Any] = dict(kind.defaults or {})
    for field, value in config.items():
        if isinstance(value, str):
            raise RequestError(f"loss_fn_config.{field}: must be a number", field)
        if field in inputs:
            raise RequestError(f"loss_fn_config.{field}: is also in loss_fn_inputs", field)
        settings[field] = value
    for field in kind.config:
        if field not in settings and field not in inputs:
            raise RequestError(f"loss_fn_config.{field}: is required by {name}", field)
    with np.errstate(over="ignore", invalid="ignore"):
        loss = kind.compute(logprobs, settings | dict(inputs))
        # Weights travel as float32.
        weighs = np.all(np.abs(loss.weights) <= np.finfo(np.float32).max)
        finite = weighs and np.isfinite(loss.value)
    if not finite:
        raise RequestError(f"loss_fn: {name} is not finite")
    return loss


def kind_of(name: str) -> _Kind:
    """Returns a loss; raises RequestError for one that is not served."""
    if name in _KINDS:
        return _KINDS[name]
    why = _REFUSED.get(name, "unknown")
    raise RequestError(
        f"loss_fn: {name!r}: {why}; served are {', '.join(_KINDS)}",
        "loss_fn",
        code="unsupported_parameter",
    )


def _cross_entropy(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    weights = given.get("weights", np.ones_like(logprobs))
    return Loss(-weights * logprobs, weights)


def _importance_sampling(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    """REINFORCE with the ratio to the sampler: -r A, whose derivative is -r A again."""
    weights = np.exp(logprobs - given["logprobs"]) * given["advantages"]
    return Loss(-weights, weights)


def _clipped(ratio: Numbers, given: Mapping[str, Any]) -> Loss:
    """-min(r A, clip(r) A), with a derivative where the ratio itself is the smaller one."""
    whole = ratio * given["advantages"]
    cut = np.clip(ratio, *(given[field] for field in _CLIP_FIELDS)) * given["advantages"]
    return Loss(-np.minimum(whole, cut), np.where(whole <= cut, whole, 0.0))


def _ppo(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    """PPO (arXiv 1707.06347)."""
    return _clipped(np.exp(logprobs - given["logprobs"]), given)


def _cispo(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    """CISPO (arXiv 2506.13585): -clip(r) A logp, without a derivative of the ratio."""
    ratio = np.exp(logprobs - given["logprobs"])
    weights = np.clip(ratio, *(given[field] for field in _CLIP_FIELDS)) * given["advantages"]
    return Loss(-weights * logprobs, weights)


def _gspo(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    """GSPO-token (arXiv 2507.18071): PPO with the ratio of the whole sequence for each token."""
    counted = given["sequence_ratio_mask"] != 0
    if not counted.any():
        raise RequestError(
            "loss_fn_inputs.sequence_ratio_mask: marks no token", "sequence_ratio_mask"
        )
    ratio = np.exp(np.mean((logprobs - given["logprobs"])[counted]))
    return _clipped(np.full_like(logprobs, ratio), given)


def _dro(logprobs: Numbers, given: Mapping[str, Any]) -> Loss:
    """DRO (arXiv 2405.19107): -(logp A - beta / 2 (logp - q)^2)."""
    away = logprobs - given["logprobs"]
    value = logprobs * given["advantages"] - 0.5 * given["beta"] * away**2
    return Loss(-value, given["advantages"] - given["beta"] * away)


_POLICY = ("logprobs", "advantages")
_KINDS = {
    "cross_entropy": _Kind(_cross_entropy, (), ("weights",)),
    "importance_sampling": _Kind(_importance_sampling, _POLICY),
    "ppo": _Kind(_ppo, _POLICY, _CLIP_FIELDS, _CLIP_FIELDS, _CLIP),
    "cispo": _Kind(_cispo, _POLICY, _CLIP_FIELDS, _CLIP_FIELDS, _CLIP),
    # No default: its paper clips a thousand times closer than PPO.
    "gspo": _Kind(_gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP_FIELDS, _CLIP_FIELDS),
    "dro": _Kind(_dro, _POLICY, (), ("beta",)),
}
# Losses of the API that are not served, and why.
_REFUSED = {
    "stable_reinforce": "needs records of the sampler that rollout servers do not make",
    "custom": "is run by the SDK, not by this server (forward_backward_custom with a callable)",
}
