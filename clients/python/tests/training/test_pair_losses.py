"""Losses of pairs and their derivatives, beside their formulas under autograd in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import logsigmoid

from tandem.settings.run import PAIR_LOSSES, DpoSettings
from tandem.training.pair_losses import LOSSES, Pairs, pair_loss

BETA, EPSILON = 0.3, 0.1
LENGTHS = ([5, 3, 11, 1, 40], [2, 7, 9, 4, 1])
SETTINGS = {"robust": EPSILON, "exo_pair": EPSILON}


def settings_of(loss_type: str, **changes) -> DpoSettings:
    fields = {"loss_type": loss_type, "beta": BETA, "label_smoothing": SETTINGS.get(loss_type, 0.0)}
    return DpoSettings(**{**fields, **changes})


def some_pairs(scale: float = 1.0) -> Pairs:
    """Five pairs on both sides of every bend of the losses; log ratios of up to +-20 `scale`."""
    generator = np.random.default_rng(3)
    chosen_tokens, rejected_tokens = (np.array(one, dtype=np.float64) for one in LENGTHS)
    chosen, rejected = (generator.uniform(-60, -20, 5) for _ in range(2))
    noise = [generator.uniform(-20, 20, 5) * scale for _ in range(2)]
    return Pairs(
        chosen, rejected, chosen + noise[0], rejected + noise[1], chosen_tokens, rejected_tokens
    )


def formula(name: str, c, r, pairs: Pairs, settings: DpoSettings) -> torch.Tensor:
    """The losses of the pairs, as the papers write them, of log-probabilities `c` and `r`."""
    beta, epsilon = settings.beta, settings.label_smoothing
    x, y = c - torch.tensor(pairs.ref_chosen), r - torch.tensor(pairs.ref_rejected)
    means = x / torch.tensor(pairs.chosen_tokens) - y / torch.tensor(pairs.rejected_tokens)
    z, u, v = beta * (x - y), beta * x, beta * y
    right, wrong = torch.sigmoid(z), torch.sigmoid(-z)
    mixed = torch.sigmoid(z / settings.discopop_tau)
    both = -(1 - epsilon) * logsigmoid(z), -epsilon * logsigmoid(-z)
    return {
        "sigmoid": lambda: both[0] + both[1],
        "sigmoid_norm": lambda: -logsigmoid(beta * means),
        "simpo": lambda: -logsigmoid(beta * means - settings.simpo_gamma),
        "hinge": lambda: torch.relu(1 - z),
        "ipo": lambda: (means - 1 / (2 * beta)) ** 2,
        "robust": lambda: (both[0] - both[1]) / (1 - 2 * epsilon),
        "exo_pair": lambda: (
            right * (logsigmoid(z) - math.log(1 - epsilon))
            + wrong * (logsigmoid(-z) - math.log(epsilon))
        ),
        "nca_pair": lambda: -logsigmoid(u) - 0.5 * logsigmoid(-u) - 0.5 * logsigmoid(-v),
        "bco_pair": lambda: -logsigmoid(u) - logsigmoid(-v),
        "sppo_hard": lambda: (x - 0.5 / beta) ** 2 + (y + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(u) + torch.sigmoid(v),
        "apo_down": lambda: torch.sigmoid(u) + 1 - torch.sigmoid(u - v),
        "discopop": lambda: -logsigmoid(z) * (1 - mixed) + torch.exp(-z) * mixed,
    }[name]()


def without_reference(pairs: Pairs) -> Pairs:
    zeros = np.zeros(5)
    return Pairs(
        pairs.chosen, pairs.rejected, zeros, zeros, pairs.chosen_tokens, pairs.rejected_tokens
    )


def test_settings_and_losses_have_the_same_names():
    assert tuple(LOSSES) == PAIR_LOSSES


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("rpo_alpha", [0.0, 0.7])
def test_loss_and_derivatives_are_those_of_the_formula(name, rpo_alpha, subtests):
    variants = [("plain", some_pairs(), {}), ("without a reference", None, {})]
    if name == "sigmoid":
        variants.append(("smoothed", some_pairs(), {"label_smoothing": EPSILON}))
    for label, pairs, changes in variants:
        with subtests.test(label):
            pairs = pairs or without_reference(some_pairs())
            settings = settings_of(name, rpo_alpha=rpo_alpha, **changes)
            c, r = (torch.tensor(one, requires_grad=True) for one in (pairs.chosen, pairs.rejected))
            losses = formula(name, c, r, pairs, settings)
            loss = losses.mean() - rpo_alpha * c.sum() / sum(LENGTHS[0])
            loss.backward()
            ours = pair_loss(pairs, settings)
            assert ours.value == pytest.approx(loss.item(), rel=1e-12)
            np.testing.assert_allclose(-ours.chosen_weights, c.grad, rtol=1e-10, atol=1e-14)
            np.testing.assert_allclose(-ours.rejected_weights, r.grad, rtol=1e-10, atol=1e-14)
            assert np.abs(ours.chosen_weights).max() > 1e-6


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_far_from_the_reference_everything_is_finite(name):
    ours = pair_loss(some_pairs(scale=1e4), settings_of(name))
    assert math.isfinite(ours.value)
    assert np.isfinite(ours.chosen_weights).all() and np.isfinite(ours.rejected_weights).all()


def test_metrics_have_the_meaning_that_trl_gives_them():
    pairs = some_pairs()
    metrics = pair_loss(pairs, settings_of("sigmoid", rpo_alpha=1.0)).metrics
    chosen = BETA * (pairs.chosen - pairs.ref_chosen)
    rejected = BETA * (pairs.rejected - pairs.ref_rejected)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).mean(),
            "logps/chosen": pairs.chosen.mean(),
            "logps/rejected": pairs.rejected.mean(),
            "loss/chosen_nll": -pairs.chosen.sum() / sum(LENGTHS[0]),
        }
    )
    assert 0 < metrics["rewards/accuracies"] < 1


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"loss_type": "kto"}, "loss_type"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "does not apply to hinge"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"loss_type": "exo_pair"}, "above 0 for exo_pair"),
        ({"loss_type": "simpo", "reference_logprobs": "model"}, "does not apply to simpo"),
        ({"simpo_gamma": 1.0}, "simpo_gamma only applies to simpo"),
        ({"discopop_tau": 1.0}, "discopop_tau only applies to discopop"),
        ({"beta": 0.0}, "beta"),
        ({"rpo_alpha": -1.0}, "rpo_alpha"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, told):
    with pytest.raises(ValidationError, match=told):
        DpoSettings(**fields)
