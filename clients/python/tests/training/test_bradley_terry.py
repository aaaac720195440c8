"""The loss of a reward model's scores, beside its formula under autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tandem.training.reward_models import bradley_terry


@pytest.mark.parametrize("center", [0.0, 0.05])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_loss_and_derivatives_are_those_of_the_formula(center, scale):
    generator = np.random.default_rng(3)
    chosen, rejected = (generator.normal(size=6) * scale for _ in range(2))
    margins = np.array([0.0, 0.5, 2.0, 0.0, -1.0, 0.1])
    c, r = (torch.tensor(one, requires_grad=True) for one in (chosen, rejected))
    loss = -logsigmoid(c - r - torch.tensor(margins)).mean() + center * ((c + r) ** 2).mean()
    loss.backward()
    ours = bradley_terry(chosen, rejected, margins, center)
    assert ours.value == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(ours.by_chosen, c.grad, rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(ours.by_rejected, r.grad, rtol=1e-10, atol=1e-300)
    assert ours.metrics["rewards/accuracies"] == np.mean(chosen > rejected)
