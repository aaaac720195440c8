"""The models of a run: where they are, or random ones of a known shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
QWEN = "qwen2.5-0.5b"
# https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def model_directory(model: str, folder: Path) -> Path:
    """Returns the directory of `model`; for QWEN, writes it into `folder` first."""
    return _write_random_qwen(folder / QWEN, tokenizer_of=SMOLLM2) if model == QWEN else Path(model)


def _write_random_qwen(folder: Path, tokenizer_of: Path) -> Path:
    """Writes a model of the shape of Qwen2.5-0.5B with random weights; returns its directory.

    Its tokenizer is that of another model, whose ids are fewer: the others are padding rows.
    """
    _start(folder, tokenizer_of, _QWEN)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    hidden, inner = _QWEN["hidden_size"], _QWEN["intermediate_size"]
    keys = hidden // _QWEN["num_attention_heads"] * _QWEN["num_key_value_heads"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": random(_QWEN["vocab_size"], hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(_QWEN["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = random(rows, hidden)
            tensors[f"{prefix}.self_attn.{name}.bias"] = random(rows)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, hidden)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = random(inner, hidden)
        tensors[f"{prefix}.mlp.up_proj.weight"] = random(inner, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden, inner)
        tensors[f"{prefix}.input_layernorm.weight"] = ones.clone()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_random_speculator(folder: Path, model: Path) -> Path:
    """Writes an MLP speculator with random weights, as wide as the model; returns its directory."""
    model_config: dict[str, Any] = json.loads((model / "config.json").read_text())
    vocabulary, hidden = model_config["vocab_size"], model_config["hidden_size"]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": vocabulary,
        "emb_dim": hidden,
        "inner_dim": hidden,
        "n_predict": 3,
        "tie_weights": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "emb.0.weight": (vocabulary, hidden),
        "head.0.weight": (vocabulary, hidden),
        "proj.0.weight": (hidden, hidden),
        "proj.1.weight": (hidden, hidden),
    }
    tensors = {
        f"speculator.{name}": torch.randn(shape, generator=generator) / hidden**0.5
        for name, shape in shapes.items()
    }
    tensors["speculator.ln.0.weight"] = torch.ones(hidden)
    tensors["speculator.ln.0.bias"] = torch.zeros(hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_first_layers(folder: Path, model: Path, parameters: float) -> Path:
    """Writes a model's first layers, about `parameters` times its own; returns its directory."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    [file] = model.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        sizes = {name: _numel(tensors, name) for name in tensors.keys()}  # noqa: SIM118
        of_layers = sum(n for name, n in sizes.items() if _layer_of(name) is not None)
        others = sum(sizes.values()) - of_layers
        kept = round((parameters * sum(sizes.values()) - others) / (of_layers / layers))
        if kept < 1:
            raise ValueError(f"{model}: its embedding alone is more than {parameters:.2f} of it")
        names = [name for name in sizes if (_layer_of(name) or 0) < kept]
        _start(folder, model, config | {"num_hidden_layers": kept})
        held = {name: tensors.get_tensor(name) for name in names}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _start(folder: Path, tokenizer_of: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer_of / name, folder / name)


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def _numel(tensors: Any, name: str) -> int:
    size = 1
    for length in tensors.get_slice(name).get_shape():
        size *= length
    return size
