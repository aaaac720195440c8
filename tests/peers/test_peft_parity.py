"""PEFT opens our adapters, and we open PEFT's: the same log-probabilities and gradients."""

from __future__ import annotations

from pathlib import Path

import peer_batch
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.settings.cluster import ClusterSettings
from tandem_side import BARE_GRADIENT, gradients_in
from transformers import AutoModelForCausalLM

PROMPT, RESPONSE = [3, 7, 11, 19], [5, 23, 41, 2, 8]
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def base_model(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of the response after the prompt."""
    logits = model(torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(RESPONSE)[:, None])[:, 0]


def trained_by_us(trainer: TrainerClient) -> torch.Tensor:
    [reply] = trainer.compute_log_probs([SupervisedSample(PROMPT, RESPONSE)])
    return torch.from_numpy(from_tensor(reply.logprobs).copy()).double()


@pytest.mark.parametrize("family", peer_batch.FAMILIES)
def test_an_adapter_of_peft_has_its_log_probs_and_gradients(family, tmp_path):
    base = peer_batch.make_models(tmp_path, family).policy
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    theirs = get_peft_model(base_model(base), config)
    theirs.save_pretrained(tmp_path / "adapter")
    section = {
        "model": str(base),
        "lora": {"path": str(tmp_path / "adapter")},
        "optimizer": BARE_GRADIENT,
        "compute": {"num_threads": 1},
        "max_model_len": 64,
    }
    settings = ClusterSettings(directory=tmp_path / "cluster", trainer=section)
    with LocalCluster(settings) as running, TrainerClient(running.trainer.address) as trainer:
        torch.testing.assert_close(trained_by_us(trainer), logprobs(theirs), rtol=0, atol=2e-5)
        samples = [SupervisedSample(PROMPT, RESPONSE)]
        trainer.train_step(samples, run_id="peft", step=1, expected_version=0)
        saved = trainer.save_checkpoint(str(tmp_path / "saved"), "step")
        after = trained_by_us(trainer)
    (-logprobs(theirs).mean()).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    moments = gradients_in(saved)
    assert len(gradients) == len(moments) == 2 * 2 * len(TARGETS)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        ours = moments[name.removeprefix("base_model.model.")].double()
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5 * scale)
    # The checkpoint opens in PEFT.
    opened = PeftModel.from_pretrained(base_model(base), saved)
    torch.testing.assert_close(logprobs(opened), after, rtol=0, atol=2e-5)
