"""The losses of Tinker's API against autograd in float64 on the formulas of its documentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.openai_server.errors import RequestError
from tandem.tinker_server.losses import loss_of

CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}
N = 40


def numbers(seed=0):
    """Log-probabilities, and numbers of a policy that is some way off."""
    draws = np.random.default_rng(seed)
    logprobs = -draws.exponential(size=N)
    return logprobs, {
        "logprobs": logprobs + 0.3 * draws.normal(size=N),
        "advantages": draws.normal(size=N) * (draws.random(N) > 0.2),
    }


def reference(name, logprobs, given, config):
    """The loss of each token, as the documentation of Tinker defines it."""
    advantages, old = given.get("advantages"), given.get("logprobs")
    ratio = None if old is None else torch.exp(logprobs - old)
    low, high = (
        given.get(bound, config.get(bound, default))
        for bound, default in (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))
    )
    if name == "cross_entropy":
        return -(logprobs * given["weights"])
    if name == "importance_sampling":
        return -(ratio * advantages)
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logprobs * advantages)
    if name == "dro":
        penalty = (logprobs - old) ** 2
        return -(logprobs * advantages - 0.5 * config["beta"] * penalty)
    if name == "gspo":
        counted = given["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - old)[counted].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    clipped = torch.clamp(ratio, low, high)
    return -torch.min(ratio * advantages, clipped * advantages)


CASES = [
    ("cross_entropy", {}, {"weights": np.linspace(-1, 2, N)}),
    ("importance_sampling", {}, {}),
    ("ppo", {}, {}),
    ("ppo", CLIP, {}),
    ("ppo", {}, {name: np.full(N, bound) for name, bound in CLIP.items()}),
    ("cispo", {}, {}),
    ("cispo", CLIP, {}),
    ("gspo", CLIP, {"sequence_ratio_mask": (np.arange(N) > 5).astype(float)}),
    (
        "gspo",
        {"clip_low_threshold": 0.9999, "clip_high_threshold": 1.0001},
        {"sequence_ratio_mask": np.ones(N)},
    ),
    ("dro", {"beta": 0.05}, {}),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "config", "more"), CASES)
def test_value_and_derivatives_are_those_of_autograd(name, config, more, seed):
    logprobs, policy = numbers(seed)
    given = more if name == "cross_entropy" else policy | more
    loss = loss_of(name, config, logprobs, given)
    x = torch.tensor(logprobs, requires_grad=True)
    expected = reference(name, x, {key: torch.tensor(one) for key, one in given.items()}, config)
    expected.sum().backward()
    np.testing.assert_allclose(loss.terms, expected.detach().numpy(), rtol=1e-13)
    np.testing.assert_allclose(loss.value, expected.sum().item(), rtol=1e-12)
    np.testing.assert_allclose(-loss.weights, x.grad.numpy(), rtol=1e-13, atol=1e-15)


def test_clipping_changes_the_loss():
    """Else the cases above would not tell a clipped loss from another."""
    logprobs, policy = numbers()
    whole = loss_of("importance_sampling", {}, logprobs, policy)
    for name in ("ppo", "cispo"):
        loss = loss_of(name, CLIP, logprobs, policy)
        assert not np.allclose(loss.weights, whole.weights)
    assert (loss_of("ppo", CLIP, logprobs, policy).weights == 0).sum() > (
        policy["advantages"] == 0
    ).sum()


def test_without_weights_each_is_one():
    logprobs, _ = numbers()
    assert loss_of("cross_entropy", {}, logprobs, {}).value == pytest.approx(-logprobs.sum())


REFUSED = [
    ("ppo", {}, {"logprobs": np.zeros(N)}, "loss_fn_inputs.advantages: is required"),
    ("ppo", {"beta": 1.0}, None, "loss_fn_config.beta: not a setting of ppo"),
    ("ppo", {"clip_low_threshold": "a"}, None, "clip_low_threshold: must be a number"),
    ("gspo", {}, None, "loss_fn_inputs.sequence_ratio_mask: is required"),
    ("dro", {}, None, "loss_fn_config.beta: is required"),
    ("cross_entropy", {}, None, "not an input of cross_entropy"),
    ("stable_reinforce", {}, None, "'stable_reinforce': needs records"),
    ("custom", {}, None, "'custom': is run by the SDK"),
    ("other", {}, None, "'other': unknown; served are cross_entropy, "),
    ("importance_sampling", {}, {"logprobs": np.full(N, -1e4)}, "is not finite"),
]


@pytest.mark.parametrize(("name", "config", "given", "says"), REFUSED)
def test_what_is_missing_or_unknown_is_refused_by_name(name, config, given, says):
    logprobs, policy = numbers()
    if given is not None and "finite" in says:
        given = policy | given
    with pytest.raises(RequestError, match=says):
        loss_of(name, config, logprobs, policy if given is None else given)


def test_gspo_clip_ranges_and_a_marked_token_are_required():
    logprobs, policy = numbers()
    mask = {"sequence_ratio_mask": np.zeros(N)}
    with pytest.raises(RequestError, match="clip_low_threshold: is required by gspo"):
        loss_of("gspo", {}, logprobs, policy | mask)
    with pytest.raises(RequestError, match="marks no token"):
        loss_of("gspo", CLIP, logprobs, policy | mask)
    both = {"clip_low_threshold": np.full(N, 0.9)}
    with pytest.raises(RequestError, match="is also in loss_fn_inputs"):
        loss_of("ppo", CLIP, logprobs, policy | both)
