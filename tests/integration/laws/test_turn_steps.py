"""Steps on responses in turns beside an oracle of `transformers` in float64.

Every loss and every gradient is compared in the second step on a batch, whose weights are not those
that wrote it: ratios are clipped. What an environment said is read and passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from gradients import BARE_GRADIENT, assert_gradients, gradients_in, gradients_of
from harness import TANDEM, flat, logprobs, mask, prompts, tokens
from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.utils.authors import ENVIRONMENT
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig
from turns import episodes

JUNIOR, SENIOR = 0, 1
CLIP, VALUE_CLIP = 0.2, 0.2
# The first step moves every weight by about this much.
OPTIMIZER = BARE_GRADIENT | {"learning_rate": 3e-3}
# Measured: losses 2e-6, gradients 3e-6.
LOSS, GRADIENT = {"rel": 2e-5, "abs": 2e-6}, 2e-5


@dataclass(frozen=True)
class Servers:
    """A trainer, whose reference model is the junior, perhaps a critic, and a batch of episodes."""

    trainer: TrainerClient
    critic: CriticClient | None
    samples: list[PolicySample]
    directory: Path

    def step(self, number: int, objective: dict[str, Any]) -> dict[str, float]:
        """Makes a step on the batch; returns its metrics."""
        report = self.trainer.train_step(
            self.samples,
            run_id="r",
            step=number,
            expected_version=number - 1,
            objective=objective | {"max_staleness": 1},
        ).report
        assert not report.skipped, report.skip_reason
        return dict(report.metrics)

    def saved(self, client: TrainerClient | CriticClient, name: str) -> str:
        """A checkpoint of a server."""
        role = "critic" if client is self.critic else "trainer"
        return client.save_checkpoint(str(self.directory / role), name)


@contextmanager
def servers(models: harness.Models, directory: Path, critic: Path | None = None) -> Iterator:
    """Starts the servers and draws nine episodes, three for a prompt."""
    learner = {"optimizer": OPTIMIZER}
    with (
        harness.cluster(
            directory / "cluster",
            models,
            trainer=learner | {"reference_model": str(models.junior)},
            critic=None if critic is None else learner | {"model": str(critic)},
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        groups = episodes(
            rollout, prompts(3, TANDEM["word"], num_samples=3, return_other_logprobs=True)
        )
        samples = [
            PolicySample(one, f"g{g}", reward=float(i * (g + 1)))
            for g, group in enumerate(groups)
            for i, one in enumerate(group)
        ]
        assert {author for one in flat(groups) for author in mask(one)} == {0, 1, 2}
        if critic is None:
            yield Servers(trainer, None, samples, directory)
            return
        with harness.critic_client(running) as client:
            yield Servers(trainer, client, samples, directory)


def policy_of(directory: Path | str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def chosen(model: torch.nn.Module, one: trajectory_pb2.Trajectory) -> torch.Tensor:
    """The log-probability of every response token, [T]."""
    ids = torch.tensor([[*one.prompt_token_ids, *tokens(one)]])
    rows = model(ids).logits[0, len(one.prompt_token_ids) - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(tokens(one))), torch.tensor(tokens(one))]


def policy_terms(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    samples: list[PolicySample],
    advantages: list[torch.Tensor],
    weights: dict[int, float],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The policy loss, the mean k3 towards the reference, and the fraction of clipped tokens."""
    losses, kls, clipped, count = [], [], 0, 0
    for sample, advantage in zip(samples, advantages, strict=True):
        one = sample.trajectory
        weight = torch.tensor([weights[author] for author in mask(one)], dtype=torch.float64)
        old = torch.from_numpy(logprobs(one, "senior").astype(np.float64))
        # An environment's tokens have no log-probability of a model.
        old = torch.where(weight > 0, old, 0.0)
        logps = torch.where(weight > 0, chosen(model, one), 0.0)
        ratio = torch.exp(logps - old)
        plain, cut = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        losses.append(-(weight * torch.minimum(plain, cut)).sum())
        with torch.no_grad():
            theirs = torch.where(weight > 0, chosen(reference, one), 0.0)
        distance = logps - theirs
        kls.append((weight * (torch.exp(-distance) - 1 + distance)).sum())
        clipped += int(((cut < plain) & (weight > 0)).sum())
        count += int((weight > 0).sum())
    return sum(losses) / count, sum(kls) / count, clipped / count


def leave_one_out(samples: list[PolicySample]) -> list[torch.Tensor]:
    """Returns advantages of all tokens: -1.5 r, 0, 1.5 r for the rewards 0, r, 2 r of a group."""
    rewards = [sample.reward for sample in samples]
    others = [sum(rewards[g : g + 3]) - reward for g in (0, 3, 6) for reward in rewards[g : g + 3]]
    return [
        torch.full((len(tokens(sample.trajectory)),), sample.reward - other / 2)
        for sample, other in zip(samples, others, strict=True)
    ]


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("junior_weight", [0.0, 0.5])
def test_a_step_on_episodes_is_that_of_float64(models, tmp_path, junior_weight, kl):
    objective = {
        "advantage_estimator": "leave_one_out",
        "junior_token_loss_weight": junior_weight,
        "kl_coefficient": kl,
        "kl_estimator": "k3",
    }
    with servers(models, tmp_path) as running:
        first = running.step(1, objective)
        before = running.saved(running.trainer, "before")
        metrics = running.step(2, objective)
        found = gradients_in(running.saved(running.trainer, "after"))
    samples = running.samples
    model = policy_of(before)
    weights = {SENIOR: 1.0, JUNIOR: junior_weight, ENVIRONMENT: 0.0}
    loss, divergence, clipped = policy_terms(
        model, policy_of(models.junior), samples, leave_one_out(samples), weights
    )
    (loss + kl * divergence).backward()
    assert metrics["loss/policy"] == pytest.approx(loss.item(), **LOSS)
    if kl:
        assert metrics["loss/kl"] == pytest.approx((kl * divergence).item(), **LOSS)
    assert metrics["loss/total"] == pytest.approx((loss + kl * divergence).item(), **LOSS)
    assert_gradients(found, gradients_of(model), GRADIENT)
    assert metrics["policy/clip_fraction"] == pytest.approx(clipped)
    assert 0.05 < clipped < 0.95
    authors = [author for sample in samples for author in mask(sample.trajectory)]
    drawn = authors.count(SENIOR) + authors.count(JUNIOR)
    assert metrics["tokens/response"] == drawn
    weighted = drawn if junior_weight else authors.count(SENIOR)
    assert metrics["policy/weighted_tokens"] == weighted
    # The two servers compute the same after an environment's tokens.
    assert first["mismatch/max_abs_logprob_diff"] == pytest.approx(0, abs=1e-4)
    fraction = authors.count(SENIOR) / drawn
    assert metrics["tandem/senior_token_fraction"] == pytest.approx(fraction)


GAE: dict[str, Any] = {
    "advantage_estimator": "gae",
    "gae_gamma": 0.97,
    "gae_lambda": 0.9,
    "whiten_advantages": True,
    "value_clip": VALUE_CLIP,
}
KL_IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_coefficient": 0.3}
GAE_CASES: dict[str, dict[str, Any]] = {
    "through juniors": {"junior_token_loss_weight": 0.5, "bootstrap_truncated": True},
    "from senior to senior": {"gae_skip_junior_tokens": True},
    "with a KL in the reward": {"junior_token_loss_weight": 0.5} | KL_IN_REWARD,
}


@pytest.fixture(scope="module")
def value_model(models, tmp_path_factory):
    """A model with a value head, of the senior's shape and with weights of its own."""
    config = LlamaConfig.from_pretrained(models.senior)
    config.num_labels, config.classifier_dropout, config.tie_word_embeddings = 1, 0.0, False
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("values")
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    return folder


def values_of(model: torch.nn.Module, one: trajectory_pb2.Trajectory) -> torch.Tensor:
    """The values of the states before each response token, and behind the last one, [T + 1]."""
    ids = torch.tensor([[*one.prompt_token_ids, *tokens(one)]])
    return model(ids).logits[0, len(one.prompt_token_ids) - 1 :, 0]


def gae(
    sample: PolicySample,
    values: torch.Tensor,
    is_step: Callable[[int], bool],
    objective: dict[str, Any],
    penalties: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The advantages and the returns of the steps of an episode, and their indices."""
    one = sample.trajectory
    steps = [t for t, author in enumerate(mask(one)) if is_step(author)]
    cut = one.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    following = values[-1] if cut and objective.get("bootstrap_truncated") else torch.zeros(())
    advantages, advantage, reward = [], torch.zeros(()), sample.reward
    for t in reversed(steps):
        delta = reward - penalties[t] + objective["gae_gamma"] * following - values[t]
        advantage = delta + objective["gae_gamma"] * objective["gae_lambda"] * advantage
        advantages.insert(0, advantage)
        following, reward = values[t], 0.0
    advantages = torch.stack(advantages)
    return advantages, advantages + values[steps], torch.tensor(steps)


@pytest.mark.parametrize("case", GAE_CASES)
def test_a_step_with_a_critic_on_episodes_is_that_of_float64(models, value_model, tmp_path, case):
    objective = GAE | GAE_CASES[case]
    skips = objective.get("gae_skip_junior_tokens", False)
    weights = {
        SENIOR: 1.0,
        JUNIOR: objective.get("junior_token_loss_weight", 0.0),
        ENVIRONMENT: 0.0,
    }

    def is_step(author: int) -> bool:
        return author == SENIOR or (author == JUNIOR and not skips)

    with servers(models, tmp_path, value_model) as running:
        trainer, critic = running.trainer, running.critic
        running.step(1, objective)
        before = running.saved(trainer, "before"), running.saved(critic, "before")
        samples = running.samples
        replies = critic.compute_values(
            SupervisedSample(s.trajectory.prompt_token_ids, tokens(s.trajectory)) for s in samples
        )
        theirs = [from_tensor(reply.values) for reply in replies]
        metrics = running.step(2, objective)
        gradients = gradients_in(running.saved(trainer, "after"))
        critic_gradients = gradients_in(running.saved(critic, "after"))

    reference = policy_of(models.junior)
    value_model = AutoModelForTokenClassification.from_pretrained(before[1], dtype=torch.float64)
    advantages, errors, returns, values = [], [], [], []
    for sample, told in zip(samples, theirs, strict=True):
        one = sample.trajectory
        states = values_of(value_model, one)
        np.testing.assert_allclose(told, states[:-1].detach(), rtol=1e-4, atol=2e-5)
        penalties = torch.zeros(len(tokens(one)), dtype=torch.float64)
        if objective.get("kl_placement") == "reward":
            with torch.no_grad():
                old = torch.from_numpy(logprobs(one, "senior").astype(np.float64))
                distance = old - chosen(reference, one)
            counted = torch.tensor([weights[author] > 0 for author in mask(one)])
            penalties = torch.where(counted, objective["kl_coefficient"] * distance, 0.0)
        own, targets, steps = gae(sample, states.detach(), is_step, objective, penalties)
        of_tokens = torch.zeros(len(tokens(one)), dtype=torch.float64)
        of_tokens[steps] = own
        advantages.append((of_tokens, steps))
        errors.append(states[steps] - targets)
        returns.append(targets)
        values.append(states[steps].detach())
    assert any(
        sample.trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH for sample in samples
    )

    # Values are their old ones, so that none is clipped.
    value_loss = 0.5 * torch.cat(errors).square().mean()
    value_loss.backward()
    assert metrics["critic/loss"] == pytest.approx(value_loss.item(), **LOSS)
    assert metrics["critic/value_mean"] == pytest.approx(torch.cat(values).mean().item(), **LOSS)
    assert metrics["critic/return_mean"] == pytest.approx(torch.cat(returns).mean().item(), **LOSS)
    explained = 1 - torch.cat(errors).detach().var() / torch.cat(returns).var()
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), rel=1e-4)
    assert_gradients(critic_gradients, gradients_of(value_model), GRADIENT)

    every = torch.cat([own[steps] for own, steps in advantages])
    scale = 1 / torch.sqrt(every.var() + 1e-8)
    for own, steps in advantages:
        own[steps] = (own[steps] - every.mean()) * scale
    model = policy_of(before[0])
    loss, _, clipped = policy_terms(
        model, reference, samples, [own for own, _ in advantages], weights
    )
    loss.backward()
    assert metrics["loss/policy"] == pytest.approx(loss.item(), **LOSS)
    assert_gradients(gradients, gradients_of(model), GRADIENT)
    assert metrics["policy/clip_fraction"] == pytest.approx(clipped)
    assert 0.05 < clipped < 0.95
