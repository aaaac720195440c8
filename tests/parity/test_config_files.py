"""Files as people have them: older keys beside newer ones, keys that are missing or null, other
names. `transformers` opens the same directory and must compute the same; what it cannot open, the
servers must refuse too, or have no part in this list."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import config_files
import pytest
import torch
import transformers
from test_transformers_parity import TINY_TOLERANCE, assert_close, probe, reference, sequences


@dataclasses.dataclass(frozen=True)
class File:
    """The config.json of a tiny model: `changes` to config_files.tiny; ... removes a key."""

    name: str
    family: str
    changes: dict


def scaled(rope_type: str, **more: object) -> dict:
    return {"rope_type": rope_type, "factor": 4.0, **more}


YARN = scaled("yarn", original_max_position_embeddings=32)
LLAMA3 = scaled(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LAYERS = ["sliding_attention", "full_attention"] * 2
WINDOW = {"use_sliding_window": True, "sliding_window": 11}

FILES = [
    # `rope_scaling` beside `rope_parameters`: the first one replaces the other, base and all.
    File("llama-scaling-beside", "llama", {"rope_scaling": YARN, "rope_parameters": PLAIN}),
    File("llama3-beside", "llama", {"rope_scaling": LLAMA3, "rope_parameters": PLAIN}),
    File(
        "qwen2-linear-beside",
        "qwen2",
        {"rope_scaling": scaled("linear"), "rope_parameters": PLAIN, "rope_theta": 300.0},
    ),
    File(
        "qwen3-older-type",
        "qwen3",
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": YARN},
    ),
    File("mistral-empty-scaling", "mistral", {"rope_scaling": {}, "rope_parameters": YARN}),
    File("olmo2-null-scaling", "olmo2", {"rope_scaling": None, "rope_parameters": LLAMA3}),
    File(
        "mixtral-base-in-scaling",
        "mixtral",
        {"rope_scaling": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 900.0},
    ),
    File(
        "llama-two-types",
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}},
    ),
    File("qwen2-base-inside", "qwen2", {"rope_parameters": PLAIN, "rope_theta": 9.0}),
    File(
        "llama-length-outside",
        "llama",
        {"rope_scaling": {**YARN, "rope_theta": 50.0}, "original_max_position_embeddings": 16},
    ),
    File(
        "deepseek-beside",
        "deepseek_v3",
        {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "rope_parameters": PLAIN},
    ),
    File(
        "phi3-beside",
        "phi3",
        {"rope_scaling": {"type": "default"}, "rope_parameters": {**PLAIN, "rope_theta": 9.0}},
    ),
    File(
        "phi3-partial-outside",
        "phi3",
        {"partial_rotary_factor": 0.6, "rope_theta": 50.0},
    ),
    File("gemma2-scaling", "gemma2", {"rope_scaling": scaled("linear"), "rope_theta": 70.0}),
    File("gemma3-scaling", "gemma3_text", {"rope_scaling": scaled("linear")}),
    File("gemma3-older-type", "gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    File(
        "gemma3-beside",
        "gemma3_text",
        {
            "rope_scaling": scaled("linear"),
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 333.0},
                "sliding_attention": {"rope_type": "default"},
            },
            "rope_local_base_freq": 21.0,
            "layer_types": LAYERS,
        },
    ),
    File("gemma3-bases", "gemma3_text", {"rope_theta": 333.0, "rope_local_base_freq": 21.0}),
    # `layer_types`, or none.
    File("mistral-layer-types", "mistral", {"layer_types": LAYERS}),
    File("mistral-null-layer-types", "mistral", {"layer_types": None}),
    File("mistral-whole-layers", "mistral", {"layer_types": ["full_attention"] * 4}),
    File("qwen2-window", "qwen2", {**WINDOW, "max_window_layers": 2}),
    File("qwen2-idle-window", "qwen2", {"sliding_window": 5, "max_window_layers": 0}),
    File("qwen3-null-window", "qwen3", {**WINDOW, "sliding_window": None, "max_window_layers": 0}),
    File("qwen2-moe-window", "qwen2_moe", {**WINDOW}),
    File("qwen2-moe-first-layers", "qwen2_moe", {**WINDOW, "max_window_layers": 1}),
    File("qwen2-moe-layer-types", "qwen2_moe", {**WINDOW, "layer_types": LAYERS[::-1]}),
    File("qwen3-moe-window", "qwen3_moe", {**WINDOW}),
    File("qwen3-moe-idle-window", "qwen3_moe", {"sliding_window": 5}),
    File("mixtral-window", "mixtral", {"sliding_window": 11}),
    File("phi3-window", "phi3", {"sliding_window": 11}),
    File("gemma2-layer-types", "gemma2", {"layer_types": LAYERS[::-1]}),
    File("gemma3-pattern", "gemma3_text", {"sliding_window_pattern": 2}),
    # Keys that are missing.
    File("mixtral-no-base", "mixtral", {"rms_norm_eps": ...}),
    File("qwen3-no-head-dim", "qwen3", {"head_dim": ...}),
    File("gemma2-no-head-dim", "gemma2", {"head_dim": ..., "query_pre_attn_scalar": 99}),
    File("llama-no-key-heads", "llama", {"num_key_value_heads": ..., "head_dim": ...}),
    File(
        "mistral-no-key-heads",
        "mistral",
        {"num_key_value_heads": ..., "num_attention_heads": 8, "head_dim": 6},
    ),
    File("qwen2-moe-no-experts-per-token", "qwen2_moe", {"num_experts_per_tok": ...}),
    File("olmo2-no-eps", "olmo2", {"rms_norm_eps": ...}),
    # null, and other names.
    File("deepseek-nulls", "deepseek_v3", {"norm_topk_prob": None, "rope_interleave": None}),
    File("deepseek-plain-queries", "deepseek_v3", {"q_lora_rank": None}),
    File("deepseek-head-dim", "deepseek_v3", {"head_dim": 10, "qk_head_dim": 19}),
    File(
        "deepseek-other-name",
        "deepseek_v3",
        {"n_routed_experts": ..., "num_local_experts": 12, "routed_scaling_factor": 1.3},
    ),
    File("mixtral-other-name", "mixtral", {"num_local_experts": ..., "num_experts": 6}),
    File("qwen3-moe-other-name", "qwen3_moe", {"num_experts": ..., "num_local_experts": 6}),
    File("gemma2-null-caps", "gemma2", {"final_logit_softcapping": None}),
    File("qwen2-moe-null-layers", "qwen2_moe", {"mlp_only_layers": None, "qkv_bias": False}),
    File("llama-null-causal", "llama", {"use_bidirectional_attention": None}),
    # Keys of other classes.
    File(
        "qwen2-foreign",
        "qwen2",
        {"attention_bias": False, "clip_qkv": 3.0, "attention_multiplier": 0.3, "hidden_dim": 3},
    ),
    File("gemma2-hidden-act", "gemma2", {"hidden_act": "gelu"}),
]


def write(one: File, folder: pathlib.Path) -> torch.nn.Module:
    """Writes the directory; returns the model that `transformers` makes of its config.json."""
    folder.mkdir()
    text = json.dumps(config_files.tiny(one.family, **one.changes))
    (folder / "config.json").write_text(text)
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    torch.manual_seed(len(one.name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # weights, norms and biases that matter
            tensor.add_(0.15 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)  # not as `transformers` writes it again
    return model


@pytest.mark.parametrize("family", dict.fromkeys(one.family for one in FILES))
def test_files_are_the_models_that_transformers_reads(
    family: str, tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for one in FILES:
        if one.family == family:
            with subtests.test(one.name):
                folder = tmp_path / one.name
                model = write(one, folder)
                tokens = sequences(97)
                actual = probe(tmp_path, folder, sequences=tokens)
                assert_close(actual, reference(model, tokens, "lm"), TINY_TOLERANCE)


CONTRADICTIONS = [
    ("llama", {"layer_types": LAYERS}, "layer_types"),
    ("mixtral", {"layer_types": LAYERS}, "layer_types"),
    ("qwen3_moe", {**WINDOW, "layer_types": LAYERS}, "layer_types"),
    ("mistral", {"layer_types": LAYERS, "sliding_window": None}, "layer_types"),
    ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": LAYERS}, "layer_types"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("qwen3", {"head_dim": None}, "head_dim"),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("gemma3_text", {"is_causal": False}, "is_causal"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("phi3", {"per_layer_config": {"0": {"intermediate_size": 9}}}, "per_layer_config"),
    ("deepseek_v3", {"head_dim": 12}, "head_dim"),
    ("deepseek_v3", {"num_local_experts": 24}, "num_local_experts"),
    ("mixtral", {"num_experts": 6}, "num_experts"),
    ("gemma3_text", {"rope_parameters": PLAIN}, "rope_parameters.rope_theta"),
    ("qwen2", {"rope_parameters": {"full_attention": PLAIN}}, "rope_parameters.full_attention"),
    ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling"),
]


def test_what_cannot_be_obeyed_is_refused_by_name(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for family, changes, field in CONTRADICTIONS:
        with subtests.test(family=family, changes=changes, field=field):
            (read,) = config_files.read_all([config_files.tiny(family, **changes)], tmp_path)
            assert read.get("field") == f"config.json.{field}", read


def test_the_prefix_of_a_model_without_its_head_is_added(tmp_path: pathlib.Path) -> None:
    """As of an embedding model: its head is the embedding, and no name begins with "model."."""
    for family in ("qwen3", "phi3", "deepseek_v3"):
        folder = tmp_path / family
        model = write(File(family, family, {"tie_word_embeddings": True}), folder)
        model.model.save_pretrained(folder)
        text = json.dumps(config_files.tiny(family, tie_word_embeddings=True))
        (folder / "config.json").write_text(text)
        tokens = sequences(97, [9])
        actual = probe(tmp_path, folder, sequences=tokens)
        assert_close(actual, reference(model, tokens, "lm"), TINY_TOLERANCE)
