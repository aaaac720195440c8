"""Hugging Face TRL's GRPOTrainer and Tandem's trainer: one loss, one gradient, on one batch.

TRL's own `train()` runs. Its `rollout_func` returns the responses of the batch, its `env_mask`
marks the tokens that the senior wrote. The first of two iterations is made with the rollout's
weights, so that the second, which is compared, learns from responses of older weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peer_batch
import peer_trl
import pytest
import tandem_side
import torch
from datasets import Dataset
from gradients import norm_of
from peer_batch import MAX_COMPLETION_LENGTH, Models, Outcome, Response
from peer_code import attributes_read, compared_with
from peft import LoraConfig, get_peft_model
from tandem_side import Comparison
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Case:
    """Settings of TRL, and the objective of Tandem that is the same.

    Attributes:
        senior_only: whether the senior wrote the whole batch.
        fresh: whether the weights that wrote the batch learn from it.
    """

    name: str
    trl: dict[str, Any]
    objective: dict[str, Any]
    senior_only: bool = False
    fresh: bool = False


# TRL adds this to the standard deviation of the rewards.
TRL_STD = {"std_epsilon": 1e-4}
# TRL's loss types that differ in the divisor of the loss.
MEANS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {
        "aggregation": "seq_mean_token_sum_norm",
        "norm_constant": MAX_COMPLETION_LENGTH,
    },
    "luspo": {"aggregation": "seq_mean_token_sum"},
}
GRPO, DAPO, CISPO = {"loss_type": "grpo"}, {"loss_type": "dapo"}, {"loss_type": "cispo"}
GRPO_MEAN, DAPO_MEAN = MEANS["grpo"], MEANS["dapo"]
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.02}
GSPO = {"loss_kind": "gspo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.02}
CISPO_OBJECTIVE = {"loss_kind": "cispo", "aggregation": "token_mean", "clip_ratio_low": 1.0}
KL = {"kl_coefficient": 0.05, "kl_estimator": "k3"}
UNCORRECTED_KL = {"beta": 0.05, "use_bias_correction_kl": False}
CORRECTED_KL = {"beta": 0.05, "use_bias_correction_kl": True}
# A response of each family's batch with a negative advantage is above it, others below.
OFF_POLICY_MASK = {"off_policy_mask_threshold": 0.05}


def importance_sampling(mode: str, low: float | None, high: float) -> dict[str, Any]:
    """TRL's settings for the correction of the rollout's log-probs."""
    return {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }


def importance_weight(mode: str, low: float, high: float) -> dict[str, Any]:
    """The objective of Tandem for the same correction."""
    level, _, kind = mode.partition("_")
    return {
        "importance_sampling_level": level,
        "importance_sampling_mode": kind,
        "importance_sampling_floor": low,
        "importance_sampling_cap": high,
    }


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

CASES = [
    *(Case(name, {"loss_type": name}, mean) for name, mean in MEANS.items()),
    *(
        Case(f"{name} of sequences", {"loss_type": name, **SEQUENCE}, mean | GSPO)
        for name, mean in MEANS.items()
    ),
    Case("cispo", CISPO | {"epsilon_high": 1.2}, CISPO_OBJECTIVE | {"clip_ratio_high": 0.2}),
    Case(
        "asymmetric clip",
        DAPO | {"epsilon": 0.1, "epsilon_high": 0.28},
        DAPO_MEAN | {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28},
    ),
    Case("delta", DAPO | {"delta": 1.3}, DAPO_MEAN | {"dual_clip": 1.3}),
    Case(
        "delta of sequences",
        GRPO | SEQUENCE | {"delta": 1.04},
        GRPO_MEAN | GSPO | {"dual_clip": 1.04},
    ),
    Case("KL", GRPO | UNCORRECTED_KL, GRPO_MEAN | KL),
    Case("KL with dr_grpo", {"loss_type": "dr_grpo"} | UNCORRECTED_KL, MEANS["dr_grpo"] | KL),
    Case("KL of sequences", GRPO | SEQUENCE | UNCORRECTED_KL, GRPO_MEAN | GSPO | KL),
    Case(
        "corrected KL",
        DAPO | CORRECTED_KL,
        DAPO_MEAN | KL | {"kl_importance_correction": True},
    ),
    Case(
        "corrected KL with cispo",
        CISPO | {"epsilon_high": 1.2} | CORRECTED_KL,
        CISPO_OBJECTIVE | {"clip_ratio_high": 0.2} | KL | {"kl_importance_correction": True},
    ),
    Case(
        "corrected KL on a fresh batch",
        GRPO | CORRECTED_KL,
        GRPO_MEAN | KL | {"kl_estimator": "k3_gradient_k2"},
        fresh=True,
    ),
    Case(
        "scaled by the batch",
        DAPO | {"scale_rewards": "batch"},
        DAPO_MEAN | {"advantage_estimator": "group_relative_batch_std"},
    ),
    Case(
        "not scaled",
        DAPO | {"scale_rewards": "none"},
        DAPO_MEAN | {"advantage_estimator": "group_relative_no_std"},
    ),
    *(
        Case(
            f"truncated masked in {name}",
            {"loss_type": name, "mask_truncated_completions": True},
            MEANS[name] | {"mask_truncated_completions": True},
        )
        for name in ("dapo", "bnpo")
    ),
    *(
        Case(
            f"truncated masked in {name}",
            {"loss_type": name, "mask_truncated_completions": True},
            MEANS[name] | {"mask_truncated_completions": True, "normalizer": "all_tokens"},
            senior_only=True,
        )
        for name in ("grpo", "dr_grpo", "luspo")
    ),
    *(
        Case(
            mode,
            GRPO | importance_sampling(mode, None, 1.2),
            GRPO_MEAN | importance_weight(mode, 0.0, 1.2),
        )
        for mode in MODES
    ),
    *(
        Case(
            f"{mode} with a lower bound",
            DAPO | importance_sampling(mode, 0.8, 1.2),
            DAPO_MEAN | importance_weight(mode, 0.8, 1.2),
        )
        for mode in MODES
    ),
    Case(
        "token_truncate on a fresh batch",
        GRPO | importance_sampling("token_truncate", None, 1.2),
        GRPO_MEAN | importance_weight("token_truncate", 0.0, 1.2),
        fresh=True,
    ),
    *(
        Case(
            f"off-policy mask with {name}",
            {"loss_type": name} | OFF_POLICY_MASK | settings,
            MEANS[name] | OFF_POLICY_MASK | objective,
        )
        for name, settings, objective in (
            ("dapo", {}, {}),
            ("grpo", CORRECTED_KL, KL | {"kl_importance_correction": True}),
            ("luspo", SEQUENCE, GSPO),
        )
    ),
    Case("entropy bonus", DAPO | {"entropy_coef": 0.05}, DAPO_MEAN | {"entropy_coefficient": 0.05}),
    *(
        Case(
            f"{name} in two micro-batches",
            {"loss_type": name, "gradient_accumulation_steps": 2, "steps_per_generation": 2},
            MEANS[name],
        )
        for name in ("dapo", "grpo")
    ),
]

# Values of TRL's settings that no objective has, with the reason. These combinations are missing,
# too: a corrected KL, or cispo, with the ratio of a sequence; an entropy bonus, which TRL averages
# over tokens, beside a loss that is not; a delta inside the clip range; bnpo in micro-batches, each
# of which has a mean of its own in TRL.
NOT_HERE = {
    "loss_type": {
        "sapo": "a soft gate in the place of the clip",
        "vespo": "a weight of the whole sequence's ratio in the place of the clip",
    },
    "importance_sampling_level": {},
    "scale_rewards": {},
    "vllm_importance_sampling_mode": {},
    "multi_objective_aggregation": {"normalize_then_sum": "a sample has one reward"},
}
SETTINGS_NOT_HERE = {
    "router_aux_loss_coef": "a setting of the server; the loss is of each sequence by itself",
    "sapo_temperature_neg": "sapo",
    "sapo_temperature_pos": "sapo",
    "top_entropy_quantile": "no mask of tokens by their entropy",
    "use_adaptive_entropy": "the coefficient of a run is constant",
    "entropy_coef_delta": "use_adaptive_entropy",
    "entropy_coef_max": "use_adaptive_entropy",
    "entropy_coef_min": "use_adaptive_entropy",
    "entropy_target": "use_adaptive_entropy",
    "vespo_k_neg": "vespo",
    "vespo_k_pos": "vespo",
    "vespo_lambda_neg": "vespo",
    "vespo_lambda_pos": "vespo",
}


class GivenBatch(GRPOTrainer):
    """TRL's trainer, which records the losses of its micro-batches."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[float] = []

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


class Weights(peer_trl.Gradients):
    """Sets the weights before every step of `train()`; keeps the gradients of the last step."""

    def __init__(self, steps: list[dict[str, torch.Tensor]]) -> None:
        self._steps = steps

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any
    ) -> None:
        model.load_state_dict(self._steps[state.global_step])


# The settings of every case, unless the case has its own.
SETTINGS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "epsilon": 0.2,
    "gradient_accumulation_steps": 1,
    "num_generations": peer_batch.GROUP_SIZE,
    "temperature": peer_batch.TEMPERATURE,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "shuffle_dataset": False,
    **peer_trl.SETTINGS,
}


def trl_trainer(
    models: Models,
    batch: list[Response],
    case: Case,
    directory: Path,
    callbacks: list[TrainerCallback],
    iterations: int,
    adapters: LoraConfig | None = None,
) -> GivenBatch:
    """A trainer that makes `iterations` steps on the batch, from the reference's weights.

    With `adapters` it trains those of the policy, which is the reference without them.
    """
    settings = SETTINGS | case.trl
    use_vllm = settings.pop("use_vllm", False)
    trainer = GivenBatch(
        # TRL loads its reference model from the directory of this model.
        model=models.load("policy" if adapters else "reference"),
        peft_config=adapters,
        args=GRPOConfig(
            output_dir=str(directory),
            num_iterations=iterations,
            max_steps=iterations,
            per_device_train_batch_size=len(batch) // settings["gradient_accumulation_steps"],
            **settings,
        ),
        processing_class=peer_trl.tokenizer("left"),
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(peer_batch.GROUPS)]}),
        rollout_func=lambda prompts, _: rollout(prompts, batch),
        reward_funcs=lambda **_: [response.reward for response in batch],
        callbacks=callbacks,
    )
    # TRL corrects for vLLM alone. The rollout_func stands in for it, and needs no weights.
    trainer.use_vllm = use_vllm
    trainer._last_loaded_step = 0
    return trainer


def trl_outcome(models: Models, batch: list[Response], case: Case, directory: Path) -> Outcome:
    """The outcome of the last step of `train()`."""
    names = ["policy"] if case.fresh else ["rollout", "policy"]
    weights = Weights([models.load(name).state_dict() for name in names])
    trainer = trl_trainer(models, batch, case, directory, [weights], len(names))
    trainer.train()
    last = trainer.losses[-trainer.args.gradient_accumulation_steps :]
    return Outcome(sum(last), weights.found)


def rollout(prompts: list[str], batch: list[Response]) -> dict[str, list[list[Any]]]:
    """The batch in the form of TRL's `rollout_func`."""
    assert prompts == [str(response.group) for response in batch]
    return {
        "prompt_ids": [response.prompt for response in batch],
        "completion_ids": [response.tokens for response in batch],
        "logprobs": [response.behaviour for response in batch],
        "env_mask": [response.authors for response in batch],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_trl(
    comparison: Comparison, case: Case, tmp_path: Path
) -> None:
    batch = peer_batch.by_the_senior(comparison.batch) if case.senior_only else comparison.batch
    peer = trl_outcome(comparison.models, batch, case, tmp_path)
    old = {"old_logprobs": "recomputed"} if case.fresh else {}
    ours = comparison.tandem.step(batch, TRL_STD | case.objective | old)
    weighs_sequences = case.trl.get("vllm_importance_sampling_mode", "").startswith("sequence")
    tolerance = (
        peer_batch.GRADIENT_TOLERANCE_OF_SEQUENCES
        if weighs_sequences
        else peer_batch.GRADIENT_TOLERANCE
    )
    peer_batch.assert_same(ours, peer, tolerance)
    if not case.fresh:
        assert ours.metrics["policy/clip_fraction"] > 0.1
    if OFF_POLICY_MASK.items() <= case.objective.items():
        assert 0 < ours.metrics["mismatch/masked_fraction"] < 0.3


def random_adapters() -> LoraConfig:
    """Adapters of every map, whose matrices B are not 0."""
    return LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=peer_batch.MAPS,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


ADAPTER_CASES = [
    Case("KL", GRPO | UNCORRECTED_KL, GRPO_MEAN | KL),
    Case("KL of sequences", DAPO | SEQUENCE | UNCORRECTED_KL, DAPO_MEAN | GSPO | KL),
]


@pytest.mark.parametrize("case", ADAPTER_CASES, ids=lambda case: case.name)
def test_adapters_learn_as_those_of_peft(
    comparison: Comparison, case: Case, tmp_path: Path
) -> None:
    """The reference of both sides is the model without its adapters."""
    torch.manual_seed(5)
    policy = get_peft_model(comparison.models.load("policy"), random_adapters())
    policy.save_pretrained(tmp_path / "adapter")
    now = {name: value.clone() for name, value in policy.state_dict().items()}
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_" in name:
                value.add_(0.1 * value.std() * torch.randn_like(value))
        old = peer_batch.logprobs(policy, comparison.batch)
    batch = [
        replace(one, old=values.tolist(), behaviour=values.tolist())
        for one, values in zip(comparison.batch, old, strict=True)
    ]
    weights = Weights([policy.state_dict(), now])
    trainer = trl_trainer(comparison.models, batch, case, tmp_path, [weights], 2, random_adapters())
    trainer.train()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): gradient
        for name, gradient in weights.found.items()
    }
    lora = {"path": str(tmp_path / "adapter")}
    with tandem_side.serve(comparison.models, tmp_path / "tandem", lora=lora) as tandem:
        ours = tandem.step(batch, TRL_STD | case.objective)
    assert len(gradients) == 2 * 2 * len(peer_batch.MAPS)
    peer_batch.assert_same(ours, Outcome(trainer.losses[-1], gradients))
    assert ours.metrics["policy/clip_fraction"] > 0.1
    assert ours.metrics["loss/kl"] > 1e-3


def test_iterations_end_at_the_same_weights(comparison: Comparison, tmp_path: Path) -> None:
    """There are three iterations, with clipped gradients, AdamW, and ratios that move from 1."""
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    steps = Case("three iterations", GRPO | optimizer | {"lr_scheduler_type": "constant"}, {})
    policy = comparison.models.load("policy")
    with torch.no_grad():
        old = peer_batch.logprobs(policy, comparison.batch)
    batch = [replace(r, old=o.tolist()) for r, o in zip(comparison.batch, old, strict=True)]
    trainer = trl_trainer(comparison.models, batch, steps, tmp_path / "trl", [], 3)
    trainer.model.load_state_dict(policy.state_dict())
    trainer.train()
    with tandem_side.serve(comparison.models, tmp_path, optimizer) as tandem:
        ours = tandem.trained(batch, TRL_STD | GRPO_MEAN, 3)
    start = dict(policy.named_parameters())
    theirs = dict(trainer.model.named_parameters())
    assert ours.keys() == theirs.keys()
    moved = norm_of(theirs[name] - start[name] for name in start)
    apart = norm_of(theirs[name] - ours[name] for name in start)
    print(f"moved {moved:.4f}, apart {apart / moved:.1e} of that")
    assert apart < 1e-4 * moved


@pytest.mark.parametrize(
    ("setting", "function"),
    [
        ("loss_type", GRPOTrainer._compute_loss),
        ("importance_sampling_level", GRPOTrainer._compute_loss),
        ("scale_rewards", GRPOTrainer._generate_and_score_completions),
        ("vllm_importance_sampling_mode", GRPOTrainer._generate_and_score_completions),
        ("multi_objective_aggregation", GRPOTrainer._generate_and_score_completions),
    ],
)
def test_every_choice_is_compared_or_listed(setting: str, function: Any) -> None:
    compared = {(SETTINGS | case.trl).get(setting) for case in CASES} - {None}
    assert compared | set(NOT_HERE[setting]) == compared_with(function, setting)
    assert not compared & set(NOT_HERE[setting])


def test_every_setting_of_the_loss_is_compared_or_listed() -> None:
    settings = {entry.name for entry in dataclasses.fields(GRPOConfig)}
    read = attributes_read(GRPOTrainer._compute_loss) & settings
    compared = set(SETTINGS).union(*(case.trl for case in CASES))
    assert read - compared == set(SETTINGS_NOT_HERE)
