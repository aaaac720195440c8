"""Distillation steps beside an oracle of `transformers` in float64, in layouts, with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness
import pytest
import torch
from gradients import adapter_gradients, gradients_of, norm_of
from layouts import ranked
from tandem.rpc.requests import SupervisedSample, TeacherTokens
from transformers import AutoModelForCausalLM

LAYOUTS: dict[str, dict[str, Any]] = {
    "one-rank": {},
    **{name: ranked(name) for name in ("zero", "tensor", "pipeline")},
}
TOP_K, BETA, TEMPERATURE = 8, 0.3, 1.5
KINDS: dict[str, dict[str, Any]] = {
    "reverse": {},
    "forward": {},
    "jensen_shannon": {"beta": BETA},
}
# Given responses of 2 to 12 tokens; micro-batches hold a sequence or two.
ROWS = [
    ([2 + row, 40, 41 + row], [(7 * row + 11 * t) % 200 + 5 for t in range(2 + 2 * row)])
    for row in range(6)
]
CROSS_ENTROPY = 0.25


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """The logits before all response tokens, [T, V]."""
    parts = []
    for prompt, response in ROWS:
        rows = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        parts.append(rows)
    return torch.cat(parts)


def buckets(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens `ids` [T, K] and of all others together, [T, K + 1]."""
    known = logprobs.gather(-1, ids)
    rest = torch.log1p(-known.exp().sum(-1, keepdim=True))
    return torch.cat([known, rest], -1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The mean over rows of KL(p || q), of log-probabilities [T, V]."""
    return (p.exp() * (p - q)).sum(-1).mean()


def divergence(kind: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    if kind == "reverse":
        return kl(student, teacher)
    if kind == "forward":
        return kl(teacher, student)
    mixture = (BETA * teacher.exp() + (1 - BETA) * student.exp()).log()
    return BETA * kl(teacher, mixture) + (1 - BETA) * kl(student, mixture)


def samples_of(top: torch.return_types.topk | None) -> Sequence[SupervisedSample]:
    """The rows, with what the teacher says of each token; None: the trainer has the teacher."""
    lengths = [len(response) for _, response in ROWS]
    if top is None:
        told = [TeacherTokens("t")] * len(ROWS)
    else:
        ids, values = (part.split(lengths) for part in (top.indices, top.values))
        told = [
            TeacherTokens("t", i.numpy(), v.float().numpy())
            for i, v in zip(ids, values, strict=True)
        ]
    return [
        SupervisedSample(prompt, response, teacher=teacher)
        for (prompt, response), teacher in zip(ROWS, told, strict=True)
    ]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_float64(models, tmp_path, layout, adapters, subtests):
    section = LAYOUTS[layout] | {
        "batch": {"micro_batch_tokens": 16},
        "optimizer": {"max_grad_norm": 0.0},
        "teacher_model": str(models.junior),
    }
    if adapters:
        section["lora"] = {"rank": 4, "alpha": 8}
    teacher = AutoModelForCausalLM.from_pretrained(models.junior, dtype=torch.float64)
    with torch.no_grad():
        taught = (logits_of(teacher) / TEMPERATURE).log_softmax(-1)
    with (
        harness.cluster(tmp_path, models, trainer=section) as running,
        harness.trainer_client(running) as trainer,
    ):
        for kind, fields in KINDS.items():
            for top_k in (0, TOP_K):
                with subtests.test(kind=kind, top_k=top_k):
                    trainer.load_base_model()
                    saved = trainer.save_checkpoint(str(tmp_path / "saved"), f"{kind}-{top_k}")
                    top = taught.topk(top_k) if top_k else None
                    metrics = trainer.train_step(
                        samples_of(top),
                        run_id=f"{kind}-{top_k}",
                        step=1,
                        expected_version=0,
                        objective={
                            "cross_entropy_coefficient": CROSS_ENTROPY,
                            "distillation": {
                                "coefficient": 0.7,
                                "kind": kind,
                                "top_k": top_k,
                                "temperature": TEMPERATURE,
                            }
                            | fields,
                        },
                    ).report.metrics
                    model = AutoModelForCausalLM.from_pretrained(models.senior, dtype=torch.float64)
                    logits = logits_of(model)
                    student, theirs = (logits / TEMPERATURE).log_softmax(-1), taught
                    if top is not None:
                        student, theirs = (buckets(one, top.indices) for one in (student, taught))
                    apart = divergence(kind, student, theirs)
                    labels = torch.tensor([token for _, response in ROWS for token in response])
                    cross_entropy = torch.nn.functional.cross_entropy(logits, labels)
                    loss = 0.7 * apart + CROSS_ENTROPY * cross_entropy
                    loss.backward()
                    found = adapter_gradients(model, saved) if adapters else gradients_of(model)
                    norm = norm_of(found.values())
                    expected = {
                        "distillation/divergence": apart.item(),
                        "loss/distillation": 0.7 * apart.item(),
                        "loss/total": loss.item(),
                    }
                    for key, value in expected.items():
                        assert metrics[key] == pytest.approx(value, rel=1e-5), key
                    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
                    assert metrics["policy/micro_batches"] >= 4
