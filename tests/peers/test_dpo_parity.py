"""Hugging Face TRL's DPOTrainer and `tandem dpo`: one loss, one gradient, on the same pairs.

TRL's own `train()` makes a step on pairs of the batch's responses. Its CPOTrainer has SimPO, whose
losses are compared as functions of the same log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peer_batch
import peer_trl
import pytest
import torch
from datasets import Dataset
from peer_batch import Models, Outcome, Response
from peer_code import compared_with
from tandem.rpc.requests import SupervisedSample
from tandem.settings.run import PAIR_LOSSES, DpoSettings
from tandem.training.pair_losses import Pairs, pair_loss
from tandem_side import Comparison
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer


@dataclass(frozen=True)
class Case:
    """Settings of TRL, and those of `tandem dpo` that are the same."""

    name: str
    trl: dict[str, Any]
    dpo: dict[str, Any] = field(default_factory=dict)
    pairs: int | None = None


SMOOTHED = {"label_smoothing": 0.1}
CASES = [
    *(
        Case(name, {"loss_type": [name]}, {"loss_type": name})
        for name in PAIR_LOSSES
        if name not in ("robust", "exo_pair", "simpo")
    ),
    Case("robust", {"loss_type": ["robust"]} | SMOOTHED, {"loss_type": "robust"} | SMOOTHED),
    Case("exo_pair", {"loss_type": ["exo_pair"]} | SMOOTHED, {"loss_type": "exo_pair"} | SMOOTHED),
    # The losses of sorted ratios are those of the pair where there is one pair.
    Case("cDPO", {"loss_type": ["aot"]} | SMOOTHED, SMOOTHED, pairs=1),
    Case(
        "with the cross-entropy of the chosen",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        {"rpo_alpha": 0.7},
    ),
]

# TRL's losses that `dpo.loss_type` has not, with the reason.
NOT_HERE = {
    "aot": "sorts the ratios of the batch: no loss of pairs",
    "aot_unpaired": "sorts the ratios of the batch: no loss of pairs",
    "sft": "rpo_alpha",
}
BETA = 0.2


class RecordingTrainer(peer_trl.RecordsPairs, DPOTrainer):
    """TRL's trainer, which records its loss and its metrics."""


def of_trl(
    models: Models, pairs: list[tuple[Response, Response]], case: Case, directory: Path
) -> Outcome:
    """The outcome of one step of TRL's trainer on all pairs."""
    rows = [
        {"prompt_ids": chosen.prompt, "chosen_ids": chosen.tokens, "rejected_ids": rejected.tokens}
        for chosen, rejected in pairs
    ]
    gradients = peer_trl.Gradients()
    trainer = RecordingTrainer(
        models.load("policy"),
        models.load("reference").eval(),
        args=DPOConfig(
            output_dir=str(directory),
            beta=BETA,
            per_device_train_batch_size=len(rows),
            max_steps=1,
            **peer_trl.SETTINGS,
            **case.trl,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=peer_trl.tokenizer(),
        callbacks=[gradients],
    )
    trainer.train()
    return Outcome(trainer.loss, gradients.found, trainer.metrics)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_gradient_and_metrics_are_those_of_trl(
    comparison: Comparison, case: Case, tmp_path: Path
) -> None:
    pairs = peer_trl.some_pairs(comparison.batch, case.pairs)
    samples = [SupervisedSample(one.prompt, one.tokens) for pair in pairs for one in pair]
    ours = comparison.tandem.step_on_pairs(samples, DpoSettings(beta=BETA, **case.dpo))
    theirs = of_trl(comparison.models, pairs, case, tmp_path)
    # The mixture of discopop divides sums over sequences by its temperature of 0.05.
    of_sequences = case.name == "discopop"
    peer_batch.assert_same(
        ours,
        theirs,
        peer_batch.GRADIENT_TOLERANCE_OF_SEQUENCES
        if of_sequences
        else peer_batch.GRADIENT_TOLERANCE,
    )
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
                 "logps/chosen", "logps/rejected"):  # fmt: skip
        # Differences of sums of some 60 nats, in TRL in float32.
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5, abs=5e-6), name


def test_simpo_is_that_of_trl() -> None:
    settings = DpoSettings(loss_type="simpo", beta=2.0, simpo_gamma=0.7)
    generator = np.random.default_rng(5)
    means = [torch.tensor(generator.uniform(-3, -0.5, 6), requires_grad=True) for _ in range(2)]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        beta=settings.beta,
        simpo_gamma=settings.simpo_gamma,
        label_smoothing=0.0,
        alpha=0.0,
    )
    losses, chosen_rewards, rejected_rewards = CPOTrainer.cpo_loss(trainer, *means)
    losses.mean().backward()
    tokens = [generator.integers(1, 30, 6).astype(float) for _ in range(2)]
    sums = [mean.detach().numpy() * count for mean, count in zip(means, tokens, strict=True)]
    ours = pair_loss(Pairs(*sums, np.zeros(6), np.zeros(6), *tokens), settings)
    assert ours.value == pytest.approx(losses.mean().item(), rel=1e-12)
    np.testing.assert_allclose(-ours.chosen_weights * tokens[0], means[0].grad, rtol=1e-10)
    np.testing.assert_allclose(-ours.rejected_weights * tokens[1], means[1].grad, rtol=1e-10)
    assert ours.metrics["rewards/chosen"] == pytest.approx(chosen_rewards.mean().item())
    assert ours.metrics["rewards/rejected"] == pytest.approx(rejected_rewards.mean().item())


def test_every_loss_of_trl_is_compared_or_not_here() -> None:
    theirs = compared_with(DPOTrainer._compute_loss, "loss_type")
    assert theirs == (set(PAIR_LOSSES) - {"simpo"}) | set(NOT_HERE)
    compared = {case.dpo.get("loss_type", "sigmoid") for case in CASES}
    assert compared == set(PAIR_LOSSES) - {"simpo"}
