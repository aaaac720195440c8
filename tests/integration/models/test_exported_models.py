"""Checkpoints and exports open with transformers, which then answers as the rollout server."""

from __future__ import annotations

import harness
import pytest
from commands import tandem
from tandem.rpc.requests import Prompt

PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


def greedy_by_transformers(directory):
    """The model's type, and the ids that transformers adds to the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(directory).encode("one two")
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.tensor([PROMPT])
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
    )
    return model.dtype, ids[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    """A run directory, the greedy answer of its last weights, and an export by the trainer."""
    directory = tmp_path_factory.mktemp("export")
    with harness.cluster(directory / "cluster", models, trainer={}) as running:
        run = harness.run_training(harness.run_settings(directory, models, running, steps=2))
        with harness.rollout_client(running) as rollout:
            prompt = Prompt(PROMPT, sampling=GREEDY, tandem={"enabled": False})
            [[answer]] = rollout.generate([prompt])
        address = running.trainer.address
        tandem("export", "served", directory / "served", "--address", address, "--dtype", "fp32")
    return run, list(answer.response_token_ids), directory / "served"


def test_a_checkpoint_opens_with_transformers_as_it_is(trained):
    import torch

    run, ids, _ = trained
    checkpoint = run / "checkpoints" / "step_000002"
    assert greedy_by_transformers(checkpoint) == (torch.float32, ids)


def test_exports_of_run_and_trainer_open_with_transformers(trained, tmp_path):
    import torch

    run, ids, served = trained
    tandem("export", run, tmp_path / "fp32")
    assert greedy_by_transformers(tmp_path / "fp32") == (torch.float32, ids)
    assert greedy_by_transformers(served) == (torch.float32, ids)
    tandem("export", run, tmp_path / "bf16", "--dtype", "bf16")
    assert greedy_by_transformers(tmp_path / "bf16")[0] == torch.bfloat16
    weights = [(path / "model.safetensors").stat().st_size for path in (served, tmp_path / "bf16")]
    assert weights[1] < 0.6 * weights[0]
