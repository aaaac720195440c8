"""Training on pairs with real servers: beside an oracle in float64, and runs that learn."""

from __future__ import annotations

import json
import re
from typing import Any

import harness
import numpy as np
import pytest
import torch
import yaml
from commands import tandem
from gradients import adapter_gradients, gradients_of, norm_of
from layouts import ranked
from tandem.rpc.requests import SupervisedSample
from tandem.settings.run import DpoSettings
from tandem.training.preferences import log_prob_sums, step_of_pairs
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

LORA = {"rank": 4, "alpha": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one-rank": {},
    **{name: ranked(name) for name in ("zero", "tensor", "pipeline")},
}
# Micro-batches hold a sequence or two: a pair is in one of them by chance.
SECTION = {
    "batch": {"micro_batch_tokens": 16},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.0},
}
LOSSES = {
    "sigmoid": DpoSettings(beta=0.3, label_smoothing=0.1, rpo_alpha=0.5),
    "ipo": DpoSettings(loss_type="ipo"),
    "simpo": DpoSettings(loss_type="simpo", beta=2.0),
}
PAIRS = [
    SupervisedSample([2 + pair, 40, 41 + pair], [(7 * pair + 11 * side + t) % 200 + 5
                                                 for t in range(2 + 3 * side + pair)])
    for pair in range(4)
    for side in range(2)
]  # fmt: skip


def sums(model: torch.nn.Module) -> torch.Tensor:
    """The log-probability of every response, [2 N]."""
    found = []
    for one in PAIRS:
        ids = torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]])
        rows = model(ids).logits[0, len(one.prompt_token_ids) - 1 : -1].log_softmax(-1)
        found.append(rows[range(len(rows)), torch.tensor(one.response_token_ids)].sum())
    return torch.stack(found)


def oracle(model: torch.nn.Module, reference: torch.Tensor, name: str) -> torch.Tensor:
    """The loss of the pairs in float64."""
    settings, tokens = LOSSES[name], torch.tensor([len(one.response_token_ids) for one in PAIRS])
    logps = sums(model)
    x, y = (logps - reference)[::2], (logps - reference)[1::2]
    means = (logps - reference) / tokens
    if name == "ipo":
        return ((means[::2] - means[1::2] - 1 / (2 * settings.beta)) ** 2).mean()
    if name == "simpo":
        means = logps / tokens
        return -logsigmoid(2.0 * (means[::2] - means[1::2]) - settings.simpo_gamma).mean()
    z = settings.beta * (x - y)
    smoothed = -0.9 * logsigmoid(z) - 0.1 * logsigmoid(-z)
    return smoothed.mean() - 0.5 * logps[::2].sum() / tokens[::2].sum()


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_pairs_is_that_of_float64(models, tmp_path, layout, adapters, subtests):
    """With adapters, the reference is the model without them."""
    section = LAYOUTS[layout] | SECTION
    section |= {"lora": LORA} if adapters else {"reference_model": str(models.junior)}
    reference_model = models.senior if adapters else models.junior
    with torch.no_grad():
        reference = sums(AutoModelForCausalLM.from_pretrained(reference_model, dtype=torch.float64))
    with (
        harness.cluster(tmp_path, models, trainer=section) as running,
        harness.trainer_client(running) as trainer,
    ):
        ours = log_prob_sums(trainer, PAIRS, reference=True)
        np.testing.assert_allclose(ours, reference, rtol=1e-5)
        for name, settings in LOSSES.items():
            with subtests.test(name):
                trainer.load_base_model()
                saved = trainer.save_checkpoint(str(tmp_path / "saved"), f"{name}-base")
                loss, reply = step_of_pairs(
                    trainer,
                    PAIRS,
                    np.zeros(len(PAIRS)) if name == "simpo" else ours,
                    settings,
                    run_id=name,
                    step=1,
                    expected_version=0,
                )
                model = AutoModelForCausalLM.from_pretrained(models.senior, dtype=torch.float64)
                expected = oracle(model, reference, name)
                expected.backward()
                assert loss.value == pytest.approx(expected.item(), rel=1e-5)
                gradients = adapter_gradients(model, saved) if adapters else gradients_of(model)
                norm = norm_of(gradients.values())
                assert reply.report.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
                assert reply.report.metrics["policy/micro_batches"] >= 4


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture
def run_file(models, tmp_path):
    """A run on rows whose chosen response is long, with a cluster of its own."""
    rows = [{"prompt": f"the {w} and", "chosen": " the sum of", "rejected": " two"} for w in WORDS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-2]))
    section = harness.sections(models, trainer={})["trainer"]
    del section["model"]
    config = {
        "run_dir": str(tmp_path / "run"),
        "steps": 10,
        "data": {"jsonl": str(tmp_path / "rows.jsonl")},
        "dpo": {"batch_size": 6},
        "cluster": {
            "directory": str(tmp_path / "cluster"),
            "model": str(models.senior),
            "trainer": section,
        },
        "tokenizer": str(models.tokenizer),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dpo.loss_type=ipo"],
        ["dpo.loss_type=simpo", "dpo.beta=2.0"],
        ["cluster.lora={rank: 4, alpha: 8}", "cluster.trainer.optimizer.learning_rate=0.01"],
    ],
    ids=["sigmoid", "ipo", "simpo", "lora"],
)
def test_a_run_learns_what_is_preferred(run_file, tmp_path, overrides):
    tandem("dpo", run_file, *overrides)
    lines = harness.json_lines(tmp_path / "run" / "metrics.jsonl")
    if "dpo.loss_type=simpo" not in overrides:
        # The reference is the model that the run starts from.
        assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert lines[0]["rewards/accuracies"] <= 0.5
    assert lines[-1]["rewards/accuracies"] == 1
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"] + 0.05
    gaps = [line["logps/chosen"] - line["logps/rejected"] for line in lines]
    assert gaps[-1] > gaps[0]


def test_the_reference_may_be_the_model_of_another_server(models, run_file, tmp_path):
    tandem("dpo", run_file, "steps=3")
    with harness.cluster(tmp_path / "reference", models) as running:
        other = f"reference={running.rollouts[0].address}"
        tandem("dpo", run_file, "steps=3", other, f"run_dir={tmp_path / 'other'}")
    runs = (harness.json_lines(tmp_path / one / "metrics.jsonl") for one in ("run", "other"))
    for ours, theirs in zip(*runs, strict=True):
        for key in ("loss/total", "rewards/chosen", "rewards/rejected", "policy/grad_norm"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-5), key


def test_a_run_that_is_resumed_has_the_bits_of_an_uninterrupted_one(run_file, tmp_path):
    tandem("dpo", run_file, f"run_dir={tmp_path / 'whole'}", "steps=4", "dpo.batch_size=4")
    tandem("dpo", run_file, "steps=2", "dpo.batch_size=4")
    tandem("dpo", run_file, "steps=4", "dpo.batch_size=4", "--resume")
    whole, parted = (harness.metrics_without_clock(tmp_path / name) for name in ("whole", "run"))
    assert parted == whole


def test_the_program_of_the_page_makes_a_step(models, tmp_path, capsys):
    page = (harness.REPOSITORY / "docs/guides/losses/preferences.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    section = {"reference_model": str(models.senior)}
    with harness.cluster(tmp_path, models, trainer=section) as running:
        exec(program.replace("127.0.0.1:7702", running.trainer.address), {})
        with harness.trainer_client(running) as trainer:
            assert trainer.info().server.weights.version == 1
    loss, margin = map(float, capsys.readouterr().out.split())
    # Policy and reference are one model: of ipo the loss is (1 / (2 beta))^2.
    assert loss == pytest.approx(25.0, rel=1e-4)
    assert margin == pytest.approx(0.0, abs=1e-5)
