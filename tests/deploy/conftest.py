"""Models that are shapes alone, and the rendered examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import manifests
import pytest
from kubernetes_examples import EXAMPLES, example_values
from kubernetes_objects import SERVICES
from tandem.certs.authority import Request, make_certificates

# Sizes of the models that the examples name, from their config.json.
_QWEN = {"vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "Qwen2.5-0.5B-Instruct": _QWEN
    | {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen2.5-1.5B-Instruct": _QWEN
    | {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen2.5-7B-Instruct": _QWEN
    | {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of /models: configurations, and weights whose values are holes in the file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("shapes") / "models"
    for name, sizes in MODELS.items():
        config = AutoConfig.for_model(**{"tie_word_embeddings": True, "eos_token_id": 2} | sizes)
        config.save_pretrained(folder / name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        header, end = {}, 0
        for key, parameter in model.named_parameters():
            offsets = [end, end + 2 * parameter.numel()]
            header[key] = {"dtype": "BF16", "shape": [*parameter.shape], "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header).encode()
        with (folder / name / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    return folder


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for the servers of the examples, and tokens."""
    folder = tmp_path_factory.mktemp("certs")
    names = [f"*.tandem-{role}.tandem.svc" for role in SERVICES]
    make_certificates(folder, Request(names, None, 1))
    return folder


@pytest.fixture(scope="session")
def examples() -> dict[str, list[Any]]:
    """The objects of every example, by its name."""
    return {name: manifests.manifests(manifests.render(example_values(name))) for name in EXAMPLES}
