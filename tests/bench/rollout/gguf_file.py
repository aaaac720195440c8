"""Writes a Hugging Face directory of a Llama or Qwen2 as a GGUF file, as llama.cpp's script does.

The file has no tokenizer, which llama.cpp does not need for token ids, so that models with random
weights can be written, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quantize,
)
from safetensors import safe_open

# Formats of matrices by the names that llama.cpp gives them.
FORMATS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2}


def write_gguf(model: Path, file: Path, form: str) -> None:
    """Writes `file` with matrices in `form`, a key of FORMATS; vectors stay in float32.

    Raises ValueError for a family that is neither Llama nor Qwen2.
    """
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(f"{model}: model_type {kind!r} is neither of {sorted(_ARCHITECTURES)}")
    quantization, file_type = FORMATS[form]
    writer = GGUFWriter(file, kind)
    _write_config(writer, config)
    writer.add_file_type(file_type)
    names = get_tensor_name_map(_ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, values in _tensors(model):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{model}: llama.cpp has no tensor for {name}")
        if kind == "llama":
            values = _in_rotary_order(name, values, config)
        stored = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(target, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name).to(torch.float32).numpy()


def _in_rotary_order(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Interleaves the halves of each head: llama.cpp rotates neighbouring pairs in Llama models."""
    if ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif ".k_proj." in name:
        heads = config["num_key_value_heads"]
    else:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
