"""Tiny random models of many families, for the tokenizer of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

# By what a senior has and the junior lacks: the prefix of its classes, and its own sizes.
SENIORS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "latent": (
        "DeepseekV3",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 26,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "window": ("Mistral", {"sliding_window": 11}),
    "local-and-global": (
        "Gemma3",
        {
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
}


# Families that take images, and the sizes of their towers.
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 96},
    "Qwen2_5_VL": {
        "hidden_size": 32,
        "out_hidden_size": 96,
        "intermediate_size": 24,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}


def make_senior(directory: Path, kind: str, junior: Path) -> Path:
    """Writes a random senior of `kind` for the tokenizer of `junior`; returns `directory`."""
    import torch
    import transformers

    family, changes = SENIORS[kind]
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    shape = {
        "vocab_size": json.loads((junior / "config.json").read_text())["vocab_size"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 1,
        "initializer_range": 0.25,
    }
    if family != "DeepseekV3":  # whose heads have several widths
        shape["head_dim"] = 16
    config = getattr(transformers, config_class)(**{**shape, **changes})
    config._experts_implementation = "eager"  # the other takes no odd widths
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # transformers begins with routers that prefer no expert.
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                parameter.normal_(0, 0.5)
    model.save_pretrained(directory)
    if family == "DeepseekV3":
        _add_prediction_layer(directory, shape["num_hidden_layers"], shape["hidden_size"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(junior / name, directory / name)
    return directory


def _add_prediction_layer(directory: Path, index: int, width: int) -> None:
    """Adds a tensor of a layer for multi-token prediction, as published checkpoints have it."""
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.{index}.eh_proj.weight"] = torch.randn(width, 2 * width)
    save_file(tensors, file, {"format": "pt"})


def make_vision_model(directory: Path, family: str, tokenizer: Path, seed: int = 7) -> int:
    """Writes a random model that takes images; returns the id that stands for an image."""
    import torch
    import transformers

    ids = int(json.loads((tokenizer / "config.json").read_text())["vocab_size"])
    text = {
        "vocab_size": ids,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, **VISION_FAMILIES[family]}
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids - 2,
        video_token_id=ids - 1,
        vision_start_token_id=ids - 4,
        vision_end_token_id=ids - 3,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return ids - 2
