"""Distillation by Hugging Face TRL's own functions and by Tandem's trainer: one loss, one gradient.

Over the whole vocabulary it is the generalized Jensen-Shannon divergence of TRL's GKDTrainer, with
the divergence of a teacher's likeliest tokens that of its ServerDistillationTrainer, whose tail is
Tandem's rest. TRL's limits beta 0 and 1 are the forward and the reverse KL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peer_batch
import pytest
import torch
from peer_batch import TEMPERATURE, rows_of
from tandem.rpc.requests import TeacherTokens
from tandem_side import Comparison
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation import server_distillation_trainer as server_distillation

# TRL's beta, and the fields of Tandem's distillation.
KINDS: dict[float, dict[str, Any]] = {
    0: {"kind": "forward"},
    1: {"kind": "reverse"},
    0.3: {"kind": "jensen_shannon", "beta": 0.3},
}
TOP_K = 8


@pytest.mark.parametrize("beta", KINDS)
@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_the_divergence_and_its_gradient_are_those_of_trl(
    comparison: Comparison, top_k: int, beta: float
) -> None:
    # Rewards that do not differ leave the policy loss without a gradient.
    batch = [replace(one, reward=0.0) for one in peer_batch.by_the_senior(comparison.batch)]
    student = comparison.models.load("policy")
    with torch.no_grad():
        teacher_rows = torch.cat(list(rows_of(comparison.models.load("reference"), batch)))
    student_rows = torch.cat(list(rows_of(student, batch)))
    teachers = [TeacherTokens("peer")] * len(batch)
    if top_k:
        top = torch.log_softmax(teacher_rows / TEMPERATURE, -1).topk(top_k)
        logprobs = torch.log_softmax(student_rows / TEMPERATURE, -1).gather(-1, top.indices)
        known = torch.ones_like(top.indices, dtype=torch.bool)
        buckets, support = server_distillation._add_tail_bucket(logprobs, known)
        taught, _ = server_distillation._add_tail_bucket(top.values, known)
        divergence = server_distillation._jsd_divergence(buckets, taught, beta, support)
        loss = divergence.sum() / len(divergence)
        lengths = [len(one.tokens) for one in batch]
        teachers = [
            TeacherTokens("peer", ids.numpy(), values.numpy())
            for ids, values in zip(
                top.indices.split(lengths), top.values.split(lengths), strict=True
            )
        ]
    else:
        loss = GKDTrainer.generalized_jsd_loss(
            student_rows[None],
            teacher_rows[None],
            labels=torch.zeros(1, len(student_rows)),
            beta=beta,
            temperature=TEMPERATURE,
        )
    objective = {
        "aggregation": "token_mean",
        "distillation": {"coefficient": 1.0, "top_k": top_k} | KINDS[beta],
    }
    ours = comparison.tandem.step(batch, objective, teachers)
    peer_batch.assert_same(ours, peer_batch.outcome_of(loss, student))
    assert ours.metrics["loss/distillation"] == pytest.approx(loss.item(), rel=1e-5)
