"""What the C++ side makes of config.json: the tables of keys, and the configurations it reads."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess

import transformers
from tandem.models.importing import SERVED_FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("TANDEM_BUILD_DIR", "build/release")
PROBE = BUILD / "bin" / "tandem-config-probe"

# A tiny config.json of each family, with all sizes and nothing else.
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 75,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
}
_EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 13,
}
_OF_FAMILY = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 17,
        "kv_lora_rank": 19,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 10,
        "v_head_dim": 7,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 29,
    },
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gemma2": {"sliding_window": 11},
    "gemma3_text": {"sliding_window": 11},
    "mistral": {"sliding_window": 11},
    "phi3": {"pad_token_id": None},
}
_TOWERS = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 40, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16,
        "out_hidden_size": 40,
        "intermediate_size": 23,
        "window_size": 12,
        "fullatt_block_indexes": [1],
    },
}


def tiny(family: str, **changes: object) -> dict:
    """A config.json; a change to None is null, one to ... removes the key."""
    config = {"model_type": family, **_SIZES, **_OF_FAMILY.get(family, {})}
    if family in _TOWERS:
        del config["model_type"]
        config["rope_parameters"] = {"mrope_section": [1, 2, 2]}
        config = {key: value for key, value in (config | changes).items() if value is not ...}
        tower = {"depth": 2, "num_heads": 2, "patch_size": 3, **_TOWERS[family]}
        config = {
            "model_type": family,
            "image_token_id": 90,
            "video_token_id": 91,
            "text_config": config,
            "vision_config": tower,
        }
        changes = {}
    config |= changes
    return {key: value for key, value in config.items() if value is not ...}


@functools.cache
def key_tables() -> dict[str, dict[str, dict[str, dict]]]:
    """The rows of every table: by family, object of config.json, and key."""
    printed = subprocess.run([PROBE, "--keys"], check=True, capture_output=True, timeout=60)
    return json.loads(printed.stdout)


def read_all(configs: list[dict], tmp_path: pathlib.Path) -> list[dict]:
    """What becomes of each: its "config", or its "error" and "field"."""
    path = tmp_path / "configs.json"
    path.write_text(json.dumps(configs))
    printed = subprocess.run(
        [PROBE, "--configs", path], check=True, capture_output=True, timeout=60
    )
    return json.loads(printed.stdout)


@dataclasses.dataclass(frozen=True)
class Section:
    """An object of a family's config.json, and the classes of `transformers` that read it."""

    family: str
    object: str
    classes: tuple[type, ...]

    @property
    def rows(self) -> dict[str, dict]:
        """The rows of its table, by key."""
        return key_tables()[self.family][self.object]

    def __str__(self) -> str:
        return f"{self.family}-{self.object}" if self.object else self.family

    def config(self, **changes: object) -> dict:
        """A tiny config.json with changes to this object."""
        if self.object == "text_config":
            return tiny(self.family, **changes)
        config = tiny(self.family)
        inner = config[self.object] if self.object else config
        inner.update(changes)
        for key in [key for key, value in inner.items() if value is ...]:
            del inner[key]
        return config

    def path(self, key: str) -> str:
        """The path of a key in errors."""
        return ".".join(part for part in ("config.json", self.object, key) if part)


# `transformers` reads a Mistral with `layer_types` as a Ministral.
_MORE_CLASSES = {"mistral": (transformers.MinistralConfig,)}


def sections() -> list[Section]:
    """Every object of a family's config.json that has a class of its own."""
    found = []
    for family in SERVED_FAMILIES:
        outer = CONFIG_MAPPING[family]
        found.append(Section(family, "", (outer, *_MORE_CLASSES.get(family, ()))))
        found += [Section(family, name, (one,)) for name, one in outer.sub_configs.items()]
    return found


SECTIONS = sections()
