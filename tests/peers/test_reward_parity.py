"""Hugging Face TRL's RewardTrainer and `tandem reward-model`: one loss, one gradient.

TRL's own `train()` makes a step on pairs of the batch's responses, with a sequence classifier that
a critic server loads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peer_batch
import peer_trl
import pytest
import torch
import transformers
from datasets import Dataset
from gradients import BARE_GRADIENT, gradients_in
from peer_batch import Outcome
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import CriticClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings
from tandem.training.reward_models import step_of_scores
from tandem_side import Comparison
from trl import RewardConfig, RewardTrainer

CASES = {
    "plain": (False, 0.0),
    "margins": (True, 0.0),
    "centred": (False, 0.2),
}


class RecordingTrainer(peer_trl.RecordsPairs, RewardTrainer):
    """TRL's trainer, which records its loss and its metrics."""


def make_classifier(policy: Path, directory: Path) -> Path:
    """A sequence classifier of one label of the policy's shape, with weights of its own."""
    config = transformers.AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    config.tie_word_embeddings = False
    torch.manual_seed(9)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(
    comparison: Comparison, case: str, tmp_path: Path
) -> None:
    with_margins, center = CASES[case]
    pairs = peer_trl.some_pairs(comparison.batch)
    margins = np.linspace(0.0, 1.5, len(pairs)) if with_margins else np.zeros(len(pairs))
    classifier = make_classifier(comparison.models.policy, tmp_path / "classifier")
    section = {
        "model": str(classifier),
        "compute": {"num_threads": 1},
        "max_model_len": 64,
        "optimizer": BARE_GRADIENT,
    }
    settings = ClusterSettings(directory=tmp_path / "cluster", critic=section)
    with LocalCluster(settings) as running, CriticClient(running.critic.address) as critic:
        samples = [SupervisedSample(one.prompt, one.tokens) for pair in pairs for one in pair]
        loss, reply = step_of_scores(
            critic, samples, margins, center, run_id="peers", step=1, expected_version=0
        )
        saved = critic.save_checkpoint(str(tmp_path / "saved"), "step")
        ours = Outcome(loss.value, gradients_in(saved), loss.metrics)
        assert reply.metrics["critic/grad_norm"] == pytest.approx(ours.norm, rel=1e-6)

    rows = [
        {"chosen_ids": chosen.prompt + chosen.tokens, "rejected_ids": other.prompt + other.tokens}
        | ({"margin": float(margin)} if with_margins else {})
        for (chosen, other), margin in zip(pairs, margins, strict=True)
    ]
    gradients = peer_trl.Gradients()
    trainer = RecordingTrainer(
        transformers.AutoModelForSequenceClassification.from_pretrained(
            classifier, dtype=torch.float32
        ),
        RewardConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=len(rows),
            center_rewards_coefficient=center or None,
            max_steps=1,
            **peer_trl.SETTINGS,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=peer_trl.tokenizer(),
        callbacks=[gradients],
    )
    trainer.train()
    peer_batch.assert_same(ours, Outcome(trainer.loss, gradients.found))
    assert ours.metrics["rewards/margins"] == pytest.approx(trainer.metrics["margin"], abs=1e-5)
    assert ours.metrics["rewards/accuracies"] == pytest.approx(trainer.metrics["accuracy"])
