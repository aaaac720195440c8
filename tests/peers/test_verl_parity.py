"""verl's core_algos and Tandem's trainer and critic: one loss, one gradient, on one batch.

The loss is composed of core_algos as in verl's workers (`ppo_loss`), on log-probabilities of
`transformers`. Advantages come from all tokens of a response; verl's loss mask holds Tandem's
weights of the tokens, so the one response that the junior alone wrote is masked as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import peer_batch
import pytest
import torch
from peer_batch import MAX_COMPLETION_LENGTH, Models, Response, padded
from peer_code import compared_with
from tandem_side import Comparison
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig


@dataclass(frozen=True)
class Case:
    """Settings of verl, and the objective of Tandem that is the same.

    Attributes:
        actor: fields of verl's ActorConfig.
        loss_mode: verl's policy loss.
        estimator: verl's advantage estimator.
        options: the arguments of the estimator besides the batch.
        correction: fields of verl's RolloutCorrectionConfig.
        junior_weight: of a junior-written token in the loss.
    """

    name: str
    objective: dict[str, Any]
    actor: dict[str, Any] = field(default_factory=dict)
    loss_mode: str = "vanilla"
    estimator: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)
    correction: dict[str, Any] = field(default_factory=dict)
    junior_weight: float = 0.0


# verl's names of the aggregations, and Tandem's.
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"aggregation": "token_mean"},
    "token-sum": {"aggregation": "token_sum"},
    "seq-mean-token-sum": {"aggregation": "seq_mean_token_sum"},
    "seq-mean-token-mean": {"aggregation": "seq_mean_token_mean"},
    "seq-mean-token-sum-norm": {
        "aggregation": "seq_mean_token_sum_norm",
        "norm_constant": MAX_COMPLETION_LENGTH,
    },
}
# verl clips so by default.
DUAL_CLIP = {"dual_clip": 3.0}
KL_ESTIMATORS: dict[str, dict[str, Any]] = {
    "kl": {"kl_estimator": "k1"},
    "k1": {"kl_estimator": "k1"},
    "mse": {"kl_estimator": "k2"},
    "k2": {"kl_estimator": "k2"},
    "low_var_kl": {"kl_estimator": "k3", "k3_cap": 10.0},
    "k3": {"kl_estimator": "k3", "k3_cap": 10.0},
    "k1+": {"kl_estimator": "k1_gradient_k2"},
    "k3+": {"kl_estimator": "k3_gradient_k2", "k3_cap": 10.0},
}
NO_STD = {"advantage_estimator": "group_relative_no_std"}
LEAVE_ONE_OUT = {"advantage_estimator": "leave_one_out"}
# A loss whose coefficient of the log-probability is the advantage alone.
REINFORCE = {"loss_kind": "cispo", "old_logprobs": "recomputed"}
ABOVE = {"importance_sampling_cap": 1.2}
BOTH = {
    "importance_sampling_floor": 0.8,
    "importance_sampling_cap": 1.2,
    "importance_sampling_mode": "mask",
}

# For each of verl's rejections a bound that rejects some tokens.
REJECTIONS: dict[str, float | str] = {
    "token_k1": "0.8_1.2",
    "token_k2": 0.03,
    "token_k3": 0.03,
    "seq_sum_k1": "0.5_2.0",
    "seq_sum_k2": 0.25,
    "seq_sum_k3": 0.25,
    "seq_mean_k1": "0.9_1.1",
    "seq_mean_k2": 0.03,
    "seq_mean_k3": 0.03,
    "seq_max_k2": 0.1,
    "seq_max_k3": 0.1,
}
REJECTION_LEVELS = {"token": "token"} | {
    f"seq_{name}": f"sequence_{name}" for name in ("sum", "mean", "max")
}


def rejection(option: str, threshold: float | str) -> dict[str, Any]:
    """The objective that rejects what verl's option does."""
    level, estimator = option.rsplit("_", 1)
    bounds = [float(bound) for bound in str(threshold).split("_")]
    return {
        "rejection_level": REJECTION_LEVELS[level],
        "rejection_estimator": estimator,
        "rejection_upper": bounds[-1],
    } | ({"rejection_lower": bounds[0]} if len(bounds) > 1 else {})


CASES = [
    *(Case(mode, ours | DUAL_CLIP, {"loss_agg_mode": mode}) for mode, ours in AGGREGATIONS.items()),
    *(
        Case(
            f"{mode} with weights",
            ours | DUAL_CLIP | {"normalizer": "sum_of_weights", "junior_token_loss_weight": 0.3},
            {"loss_agg_mode": mode},
            junior_weight=0.3,
        )
        for mode, ours in AGGREGATIONS.items()
    ),
    Case(
        "loss_scale_factor",
        {"aggregation": "seq_mean_token_sum_norm", "norm_constant": 40.0} | DUAL_CLIP,
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 40},
    ),
    Case(
        "asymmetric clip",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28} | DUAL_CLIP,
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28},
    ),
    Case("dual clip", {"dual_clip": 1.3}, {"clip_ratio_c": 1.3}),
    *(
        Case(
            f"gspo in {mode}",
            ours | {"loss_kind": "gspo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
            {"loss_agg_mode": mode, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
            loss_mode="gspo",
        )
        for mode, ours in AGGREGATIONS.items()
    ),
    Case(
        "cispo",
        {"loss_kind": "cispo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        loss_mode="cispo",
    ),
    Case("gpg", REINFORCE, loss_mode="gpg"),
    Case(
        "bypass with ppo_clip",
        {"old_logprobs": "author"} | DUAL_CLIP,
        loss_mode="bypass_mode",
        correction={"loss_type": "ppo_clip"},
    ),
    *(
        Case(
            f"bypass with reinforce and weights of a {level}",
            REINFORCE | ABOVE | {"importance_sampling_level": level},
            loss_mode="bypass_mode",
            correction={
                "loss_type": "reinforce",
                "rollout_is": level,
                "rollout_is_threshold": 1.2,
            },
        )
        for level in ("token", "sequence")
    ),
    *(
        Case(
            f"KL {name}",
            ours | {"kl_coefficient": 0.05} | DUAL_CLIP,
            {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": name},
        )
        for name, ours in KL_ESTIMATORS.items()
    ),
    *(
        Case(
            f"entropy and KL in {mode}",
            ours
            | {"entropy_coefficient": 0.02, "kl_coefficient": 0.05, "kl_estimator": "k2"}
            | DUAL_CLIP,
            {
                "loss_agg_mode": mode,
                "entropy_coeff": 0.02,
                "use_kl_loss": True,
                "kl_loss_coef": 0.05,
                "kl_loss_type": "k2",
            },
        )
        for mode, ours in AGGREGATIONS.items()
    ),
    Case("grpo_vectorized", DUAL_CLIP, estimator="grpo_vectorized"),
    Case(
        "grpo without std",
        NO_STD | DUAL_CLIP,
        estimator="grpo",
        options={"norm_adv_by_std_in_grpo": False},
    ),
    *(
        Case(name, LEAVE_ONE_OUT | DUAL_CLIP, estimator=name)
        for name in ("rloo", "rloo_vectorized")
    ),
    Case(
        "reinforce_plus_plus",
        {"advantage_estimator": "reinforce_plus_plus", "gae_gamma": 0.9} | DUAL_CLIP,
        estimator="reinforce_plus_plus",
        options={"config": AlgoConfig(gamma=0.9)},
    ),
    Case(
        "reinforce_plus_plus_baseline",
        NO_STD | {"whiten_advantages": True} | DUAL_CLIP,
        estimator="reinforce_plus_plus_baseline",
    ),
    *(
        Case(
            f"rollout_is {level} in {threshold}",
            bounds | {"importance_sampling_level": level} | DUAL_CLIP,
            correction={"rollout_is": level, "rollout_is_threshold": threshold},
        )
        for level in ("token", "sequence")
        for threshold, bounds in ((1.2, ABOVE), ("0.8_1.2", BOTH))
    ),
    *(
        Case(
            f"rollout_is {level} with the mean 1, and rejection",
            ABOVE
            | {"importance_sampling_level": level, "importance_sampling_batch_normalize": True}
            | rejection("token_k1", REJECTIONS["token_k1"])
            | DUAL_CLIP,
            correction={
                "rollout_is": level,
                "rollout_is_threshold": 1.2,
                "rollout_is_batch_normalize": True,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": REJECTIONS["token_k1"],
            },
        )
        for level in ("token", "sequence")
    ),
    *(
        Case(
            f"rollout_rs {option}",
            rejection(option, threshold)
            | {"kl_coefficient": 0.05, "kl_estimator": "k2", "aggregation": "seq_mean_token_mean"}
            | DUAL_CLIP,
            {
                "loss_agg_mode": "seq-mean-token-mean",
                "use_kl_loss": True,
                "kl_loss_coef": 0.05,
                "kl_loss_type": "k2",
            },
            correction={"rollout_rs": option, "rollout_rs_threshold": threshold},
        )
        for option, threshold in REJECTIONS.items()
    ),
]

# verl's estimators that no objective has, with the reason. These are missing, too: several
# rejections at once; a group of one, whose advantage is its reward in verl and 0 in Tandem;
# reinforce_plus_plus over the senior's tokens alone.
ESTIMATORS_NOT_HERE = {
    "remax": "the baseline is a greedy response, which the client would draw; `provided` takes it",
    "opo": "a baseline weighted by length",
    "gdpo": "normalizes each of several rewards",
    "grpo_passk": "the best of a group alone",
    "gpg": "scales by the fraction of rewards that are not 0",
    "optimal_token_baseline": "a baseline of each token from the gradient's variance",
    "tir_optimal_token_baseline": "the same over turns",
}
LOSSES_NOT_HERE = {
    "dppo_tv": "a mask by total variation in the place of the clip",
    "dppo_kl": "a mask by the KL in the place of the clip",
    "sapo": "a soft gate in the place of the clip",
    "clip_cov": "cuts random tokens of high covariance",
    "kl_cov": "a KL on tokens of high covariance alone",
    "geo_mean": "the geometric mean of clipped ratios",
    "dro": "a quadratic penalty of the log-ratio",
}
KL_NOT_HERE = {"abs": "no such estimator", "full": "not there in verl either"}


@dataclass
class Tensors:
    """The batch as verl holds it, [S, longest]."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    rewards: torch.Tensor


def tensors_of(model: torch.nn.Module, batch: list[Response], junior_weight: float) -> Tensors:
    """The batch as verl holds it; a response's last token carries its reward."""
    pairs = peer_batch.logprobs_and_entropies(model, batch)
    return Tensors(
        log_prob=padded([values for values, _ in pairs]),
        entropy=padded([entropies for _, entropies in pairs]),
        old=padded([response.old for response in batch]),
        behaviour=padded([response.behaviour for response in batch]),
        response_mask=padded([[1.0] * len(response.tokens) for response in batch]),
        loss_mask=padded(
            [[1.0 if a else junior_weight for a in response.authors] for response in batch]
        ),
        rewards=padded([[0.0] * (len(r.tokens) - 1) + [r.reward] for r in batch]),
    )


def advantages_of(case: Case, tensors: Tensors, batch: list[Response]) -> torch.Tensor:
    """Advantages by verl's estimator, [S, longest]."""
    estimate = core_algos.get_adv_estimator_fn(case.estimator)
    advantages, _ = estimate(
        token_level_rewards=tensors.rewards,
        response_mask=tensors.response_mask,
        index=np.array([response.group for response in batch]),
        **case.options,
    )
    return advantages


def policy_loss(
    case: Case, tensors: Tensors, advantages: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The loss as verl's workers compose it."""
    correction = RolloutCorrectionConfig(**case.correction) if case.correction else None
    bypass = case.loss_mode == "bypass_mode"
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=peer_batch.GROUP_SIZE,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode, rollout_correction=correction),
        **case.actor,
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    weights, mask = None, tensors.loss_mask
    if correction is not None and not bypass:
        proto, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=tensors.old,
            rollout_log_prob=tensors.behaviour,
            response_mask=tensors.loss_mask,
            **case.correction,
        )
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    loss, _ = core_algos.get_policy_loss_fn(case.loss_mode)(
        old_log_prob=tensors.behaviour if bypass else tensors.old,
        log_prob=tensors.log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    terms = [(-config.entropy_coeff, tensors.entropy)]
    if config.use_kl_loss:
        kl = core_algos.kl_penalty(tensors.log_prob, reference, config.kl_loss_type)
        terms.append((config.kl_loss_coef, kl))
    for coefficient, matrix in terms:
        loss = loss + coefficient * core_algos.agg_loss(
            matrix, mask, config.loss_agg_mode, **config.global_batch_info
        )
    return loss


def with_a_junior_response(batch: list[Response]) -> list[Response]:
    """The batch, with one response that the junior alone wrote."""
    lonely = replace(batch[3], authors=[0] * len(batch[3].tokens))
    return [*batch[:3], lonely, *batch[4:]]


def reference_of(models: Models, batch: list[Response]) -> torch.Tensor:
    """Log-probabilities under the reference model, [S, longest]."""
    with torch.no_grad():
        return padded(peer_batch.logprobs(models.load("reference"), batch))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_verl(comparison: Comparison, case: Case) -> None:
    batch = with_a_junior_response(comparison.batch)
    model = comparison.models.load("policy")
    tensors = tensors_of(model, batch, case.junior_weight)
    advantages = advantages_of(case, tensors, batch)
    loss = policy_loss(case, tensors, advantages, reference_of(comparison.models, batch))
    ours = comparison.tandem.step(batch, case.objective)
    peer_batch.assert_same(ours, peer_batch.outcome_of(loss, model))
    if case.objective.get("old_logprobs") != "recomputed":
        assert ours.metrics["policy/clip_fraction"] > 0.1
    if "rollout_rs" in case.correction:
        assert 0.1 < ours.metrics["mismatch/rejected_fraction"] < 0.9


def test_the_reference_is_far_enough_to_cut_k3(comparison: Comparison) -> None:
    batch = with_a_junior_response(comparison.batch)
    tensors = tensors_of(comparison.models.load("policy"), batch, 0.0)
    difference = (reference_of(comparison.models, batch) - tensors.log_prob) * tensors.loss_mask
    k3 = difference.exp() - difference - 1
    assert (k3 > 10).sum() > 0


@pytest.mark.parametrize("skip_junior", [False, True], ids=["through", "skipping"])
def test_policy_and_critic_learn_from_a_ppo_step_as_in_verl(
    comparison: Comparison, skip_junior: bool
) -> None:
    """The advantages are whitened GAE on the critic's values."""
    batch = with_a_junior_response(comparison.batch)
    model, critic = comparison.models.load("policy"), comparison.models.load("critic")
    tensors = tensors_of(model, batch, 0.0)
    steps = tensors.loss_mask if skip_junior else tensors.response_mask
    if skip_junior:
        # On the last unmasked token: verl would lose the reward of a masked one.
        last = [max((t for t, a in enumerate(r.authors) if a), default=0) for r in batch]
        tensors.rewards = torch.zeros_like(tensors.rewards)
        tensors.rewards[torch.arange(len(batch)), last] = torch.tensor([r.reward for r in batch])
    values = padded(peer_batch.values_of(critic, batch))
    advantages, returns = core_algos.compute_gae_advantage_return(
        tensors.rewards, values.detach(), steps, gamma=0.97, lam=0.9
    )
    loss = policy_loss(Case("PPO", {}), tensors, advantages, torch.tensor(0))
    value_loss, _ = core_algos.compute_value_loss(
        values, returns, values.detach(), steps, cliprange_value=0.2
    )
    ours = comparison.tandem.step(
        batch,
        {
            "advantage_estimator": "gae",
            "gae_gamma": 0.97,
            "gae_lambda": 0.9,
            "whiten_advantages": True,
            "gae_skip_junior_tokens": skip_junior,
        }
        | DUAL_CLIP,
    )
    peer_batch.assert_same(ours, peer_batch.outcome_of(loss, model))
    learnt = comparison.tandem.critic_outcome(ours.metrics)
    peer_batch.assert_same(learnt, peer_batch.outcome_of(value_loss, critic))


def test_the_values_are_those_of_transformers(comparison: Comparison) -> None:
    expected = peer_batch.values_of(comparison.models.load("critic"), comparison.batch)
    for ours, theirs in zip(comparison.tandem.values(comparison.batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)


def test_a_clipped_value_loss_and_its_gradient_are_those_of_verl(comparison: Comparison) -> None:
    critic = comparison.models.load("critic")
    values = peer_batch.values_of(critic, comparison.batch)
    torch.manual_seed(7)
    old = [(row + 0.3 * torch.randn_like(row)).detach() for row in values]
    returns = [torch.randn_like(row) for row in old]
    mask = padded([response.authors for response in comparison.batch])
    loss, clip_fraction = core_algos.compute_value_loss(
        padded(values), padded(returns), padded(old), mask, cliprange_value=0.1
    )
    ours = comparison.tandem.critic_step(comparison.batch, old, returns, value_clip=0.1)
    peer_batch.assert_same(ours, peer_batch.outcome_of(loss, critic))
    assert ours.metrics["critic/clip_fraction"] == pytest.approx(clip_fraction.item(), rel=1e-6)
    assert clip_fraction > 0.1


def test_every_choice_is_compared_or_listed() -> None:
    estimators = {case.estimator for case in CASES} | {"gae"}
    assert estimators | set(ESTIMATORS_NOT_HERE) == set(core_algos.ADV_ESTIMATOR_REGISTRY)
    losses = {case.loss_mode for case in CASES}
    assert losses | set(LOSSES_NOT_HERE) == set(core_algos.POLICY_LOSS_REGISTRY)
    modes = compared_with(core_algos.agg_loss, "loss_agg_mode")
    assert set(AGGREGATIONS) == modes
    estimators = compared_with(core_algos.kl_penalty_forward, "kl_penalty")
    assert {name.removesuffix("+") for name in KL_ESTIMATORS} | set(KL_NOT_HERE) == estimators
    corrections = {case.correction.get("rollout_is") for case in CASES} - {None}
    weights = rollout_corr_helper.compute_rollout_correction_weights
    assert corrections == compared_with(weights, "rollout_is")
    assert set(REJECTIONS) == rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS
    bypass = core_algos.compute_policy_loss_bypass_mode
    types = {case.correction.get("loss_type") for case in CASES} - {None}
    assert types == compared_with(bypass, "loss_type")
