"""PEFT opens our adapters, and we open PEFT's: the same log-probabilities and gradients.

Adapters of another formula, which PEFT has beside plain LoRA, are refused by their key.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import peer_batch
import pytest
import torch
from gradients import BARE_GRADIENT, gradients_in
from peft import LoraConfig, PeftModel, get_peft_model
from tandem.cluster.local import LocalCluster, find_binary
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.settings.cluster import ClusterSettings
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

PROMPT, RESPONSE = [3, 7, 11, 19], [5, 23, 41, 2, 8]


def base_model(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of the response after the prompt."""
    logits = model(torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(RESPONSE)[:, None])[:, 0]


def trained_by_us(trainer: TrainerClient) -> torch.Tensor:
    [reply] = trainer.compute_log_probs([SupervisedSample(PROMPT, RESPONSE)])
    return torch.from_numpy(from_tensor(reply.logprobs).copy()).double()


def make_base(directory: Path, family: str) -> Path:
    """A tiny random model; that with experts is Mixtral."""
    if family in peer_batch.FAMILIES:
        return peer_batch.make_models(directory, family).policy
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=peer_batch.VOCABULARY,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        initializer_range=0.15,
    )
    MixtralForCausalLM(config).save_pretrained(directory / "experts")
    return directory / "experts"


# The maps with adapters. `transformers` stacks those of experts, so that PEFT has none of them.
FAMILIES = dict.fromkeys(peer_batch.FAMILIES, peer_batch.MAPS) | {"experts": peer_batch.MAPS[:4]}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_peft_has_its_log_probs_and_gradients(family, tmp_path):
    """One that was trained with dropout, too: without it, which the log says."""
    base, maps = make_base(tmp_path, family), FAMILIES[family]
    torch.manual_seed(5)
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=maps, init_lora_weights=False, lora_dropout=0.3
    )
    theirs = get_peft_model(base_model(base), config).eval()
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
        assert '"event":"lora_dropout_not_applied"' in running.trainer.log.read_text()
    (-logprobs(theirs).mean()).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    moments = gradients_in(saved)
    assert len(gradients) == len(moments) == 2 * 2 * len(maps)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        ours = moments[name.removeprefix("base_model.model.")].double()
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5 * scale)
    # The checkpoint opens in PEFT.
    opened = PeftModel.from_pretrained(base_model(base), saved)
    torch.testing.assert_close(logprobs(opened), after, rtol=0, atol=2e-5)


# Values of PEFT's settings that make another formula of W x + (alpha / rank) B A x, or train more.
REFUSED: dict[str, Any] = {
    "peft_type": "IA3",
    "bias": "lora_only",
    "use_rslora": True,
    "use_dora": True,
    "use_qalora": True,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "layers_to_transform": [0],
    "layer_replication": [[0, 2]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "exclude_modules": ["k_proj"],
    "trainable_token_indices": [5],
    "alora_invocation_tokens": [5, 7],
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2},
    "init_lora_weights": "pissa",
    "target_modules": "(q|v)_proj",
}
# The others, with the reason why they need no refusal.
NOT_REFUSED = {
    **dict.fromkeys(("r", "lora_alpha"), "the formula's"),
    "lora_dropout": "noted in the log of a trainer",
    "modules_to_save": "the file's tensors of other modules are refused by their names",
    **dict.fromkeys(
        ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        "where the adapter comes from",
    ),
    "inference_mode": "whether PEFT trains it",
    **dict.fromkeys(("megatron_config", "megatron_core"), "PEFT's layers for Megatron"),
    "layers_pattern": "belongs to layers_to_transform",
    "qalora_group_size": "belongs to use_qalora",
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        "belongs to init_lora_weights",
    ),
    "velora_config": "how PEFT stores activations",
    "ensure_weight_tying": "belongs to modules_to_save",
    "runtime_config": "not written",
}


def test_every_setting_of_peft_is_refused_or_listed():
    settings = {field.name for field in dataclasses.fields(LoraConfig)}
    assert settings == REFUSED.keys() | NOT_REFUSED.keys()


def test_adapters_of_another_formula_are_refused_by_their_key(tmp_path, subtests):
    base = make_base(tmp_path, "experts")
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "adapter_config.json"
    plain = LoraConfig(r=4, target_modules=peer_batch.MAPS[:4]).to_dict()
    plain |= {"peft_type": "LORA", "target_modules": peer_batch.MAPS[:4]}

    def check(changes: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file.write_text(json.dumps(plain | changes))
        command = [find_binary("tandem-trainer-server"), "--check-config", f"model={base}"]
        return subprocess.run(
            [*map(str, command), f"lora.path={file.parent}"], capture_output=True, text=True
        )

    accepted = check({})
    assert accepted.returncode == 0, accepted.stderr
    for key, value in REFUSED.items():
        with subtests.test(key):
            refused = check({key: value})
            assert refused.returncode == 2
            assert f"adapter_config.json.{key}: " in refused.stderr


def test_whole_modules_beside_adapters_are_refused(tmp_path):
    base = make_base(tmp_path, "llama-tied")
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["mlp"])
    get_peft_model(base_model(base), config).save_pretrained(tmp_path / "adapter")
    section = {"model": str(base), "lora": {"path": str(tmp_path / "adapter")}}
    settings = ClusterSettings(directory=tmp_path / "cluster", trainer=section)
    with pytest.raises(Exception, match="mlp"), LocalCluster(settings):
        pass
