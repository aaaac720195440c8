"""config.json is read as the classes of `transformers` read it, or refused: every key of a class
has a row in the table of its family, every default is the class's, and what a table refuses is
refused by name. test_config_files.py compares what models compute."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys

import config_files
import pytest
import torch
import transformers
from config_files import SECTIONS, Section
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin

EVERY_SECTION = pytest.mark.parametrize("section", SECTIONS, ids=str)
TEXT_FAMILIES = [section.family for section in SECTIONS if section.object == ""]


def fields(one: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(one)}


def keys_of_class(one: type) -> set[str]:
    """Its fields, their other names, and the older names that its code takes."""
    code = inspect.getsource(one) + inspect.getsource(PreTrainedConfig.__post_init__)
    if "rope_parameters" in fields(one):
        code += inspect.getsource(RotaryEmbeddingConfigMixin.convert_rope_params_to_dict)
    older = set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', code))
    names = {*fields(one), *one.attribute_map, *one.attribute_map.values(), *older}
    return {name for name in names if not name.startswith("_")}


def test_every_key_of_a_class_has_a_fate(subtests: pytest.Subtests) -> None:
    for section in SECTIONS:
        with subtests.test(section=section):
            for one in section.classes:
                missing = keys_of_class(one) - set(section.rows)
                assert not missing, (
                    f"{one.__name__} has keys that {section.family}'s table lacks: {missing}"
                )


def test_every_key_of_a_rotation_has_a_fate(subtests: pytest.Subtests) -> None:
    for family in TEXT_FAMILIES:
        with subtests.test(family=family):
            known = set(RopeParameters.__annotations__)
            assert "rope_theta" in known
            tables = config_files.key_tables()[family]
            assert known <= set(tables["rope_parameters"])


def class_default(one: type, key: str) -> object:
    """The value of the class where config.json lacks the key; ... if it does not say."""
    found = fields(one).get(key)
    if found is None:
        older = {"rope_theta": "global", "rope_local_base_freq": "local"}
        theta = getattr(one, "default_theta", None) if key in older else ...
        return theta[older[key]] if isinstance(theta, dict) else theta
    if found.default is not dataclasses.MISSING:
        return list(found.default) if isinstance(found.default, tuple) else found.default
    return found.default_factory()


def test_defaults_are_those_of_the_classes(subtests: pytest.Subtests) -> None:
    for section in SECTIONS:
        with subtests.test(section=section):
            for one in section.classes:
                for key, row in section.rows.items():
                    if row["fate"] == "no effect" or "other_name_of" in row:
                        continue
                    expected = class_default(one, key)
                    if expected is ... or (key == "vision_config" and expected is None):
                        continue  # no field; an object without keys
                    if row["fate"] == "only default" and not expected:
                        assert not row["value"], f"{one.__name__}.{key}"  # None is false there
                        continue
                    assert row["value"] == expected, f"{one.__name__}.{key}"
                    if row["fate"] == "obeyed" and row["nullable"]:
                        assert (
                            "None" in str(fields(one)[key].type) if key in fields(one) else True
                        ), key


def test_other_names_are_those_of_the_classes(subtests: pytest.Subtests) -> None:
    for section in SECTIONS:
        with subtests.test(section=section):
            rows = {
                key: row["other_name_of"]
                for key, row in section.rows.items()
                if "other_name_of" in row
            }
            for one in section.classes:
                pairs = {frozenset(pair) for pair in one.attribute_map.items()}
                assert {frozenset(pair) for pair in rows.items()} == pairs, one.__name__


def another(value: object) -> object:
    """A value of a key that its table allows one value alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another" if isinstance(value, str) else {"0": {"intermediate_size": 8}}


def test_what_a_class_would_compute_otherwise_is_refused(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for section in SECTIONS:
        with subtests.test(section=section):
            values = {
                key: another(row["value"])
                for key, row in section.rows.items()
                if row["fate"] == "only default"
            }
            read = config_files.read_all(
                [section.config(**{key: value}) for key, value in values.items()], tmp_path
            )
            assert len(values) >= 5  # those of every class
            for key, result in zip(values, read, strict=True):
                assert result.get("field") == section.path(key), (key, result)
                assert "not supported" in result["error"]


# Another value for each key that a family obeys, where one more than the default will not do.
OBEYED: dict[str, object] = {
    "eos_token_id": 3,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "head_dim": 14,
    "hidden_size": 80,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "max_window_layers": 1,
    "mlp_only_layers": [1],
    "n_group": 2,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_local_experts": 16,
    "num_mtp_layers": 2,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "qk_rope_head_dim": 12,
    "rope_parameters": {"rope_theta": 77.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "topk_group": 3,
    "text_config": config_files.tiny("qwen2_vl")["text_config"] | {"vocab_size": 99},
    "vision_config": {"depth": 3, "num_heads": 2, "patch_size": 3},
}
OF_TEXT_WITH_IMAGES = {
    "rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2, 2]}
}
OF_TOWERS = {
    "embed_dim": 24,
    "fullatt_block_indexes": [0],
    "num_attention_heads": 1,
    "num_heads": 1,
    "patch_size": 2,
    "window_size": 24,
}
SCALED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
# What else must be there for a key to act.
BESIDE: dict[str, dict] = {
    "max_window_layers": {"use_sliding_window": True},
    "layer_types": {"use_sliding_window": True},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
    "use_sliding_window": {"max_window_layers": 1},
    "original_max_position_embeddings": {"rope_scaling": {"rope_type": "llama3", **SCALED}},
}
LONG_BESIDE = {"original_max_position_embeddings": {"rope_scaling": {"type": "longrope", **LONG}}}
IMAGES_BESIDE = {
    "original_max_position_embeddings": {
        "rope_scaling": {"rope_type": "llama3", **SCALED, "mrope_section": [1, 2, 2]}
    }
}
# What the error of a key says that names it otherwise.
SAYS = {"head_dim": "half a head"}


def trial(section: Section, key: str) -> tuple[dict, dict]:
    """Changes of a tiny config.json in which the key can act, and those with another value."""
    values = {
        "text_config": OBEYED | OF_TEXT_WITH_IMAGES,
        "vision_config": OBEYED | OF_TOWERS,
    }.get(section.object, OBEYED)
    needed = BESIDE | (LONG_BESIDE if section.family == "phi3" else {})
    if section.object == "text_config":
        needed = BESIDE | IMAGES_BESIDE
    beside = {
        name: value
        for name, value in needed.get(key, {}).items()
        if section.rows.get(name, {}).get("fate") == "obeyed"
    }
    if "other_name_of" in section.rows[key]:
        beside[section.rows[key]["other_name_of"]] = ...
    return beside, {**beside, key: values.get(key, another(section.rows[key]["value"]))}


def test_a_key_that_a_family_obeys_acts_or_is_refused_by_name(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for section in SECTIONS:
        with subtests.test(section=section):
            keys = [key for key, row in section.rows.items() if row["fate"] == "obeyed"]
            configs = [section.config(**changes) for key in keys for changes in trial(section, key)]
            read = config_files.read_all(configs, tmp_path)
            for key, before, after in zip(keys, read[::2], read[1::2], strict=True):
                if "error" in after:
                    names = key in after["field"] or key in after["error"]
                    assert names or SAYS.get(key, key) in after["error"], (key, after)
                else:
                    assert "config" in before or "other_name_of" in section.rows[key], (key, before)
                    assert after != before, f"{key} changes nothing"


# Values of keys without effect that the classes take.
NO_EFFECT: dict[str, object] = {
    "architectures": ["Another"],
    "attention_dropout": 0.3,
    "attn_implementation": "eager",
    "attn_logit_softcapping": 1.5,
    "bos_token_id": 3,
    "chunk_size_feed_forward": 4,
    "classifier_dropout": 0.3,
    "embd_pdrop": 0.3,
    "hidden_dropout": 0.3,
    "id2label": {"0": "A"},
    "label2id": {"A": 0},
    "name_or_path": "another",
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 5,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "resid_pdrop": 0.3,
    "router_aux_loss_coef": 0.3,
    "token_classification_bias": False,
    "transformers_version": "1.0",
    "use_cache": False,
    "gradient_checkpointing": True,
}
# Those that choose kernels or types of `transformers`, and what its calls return.
NOT_TRIED = {
    "dtype",
    "experts_implementation",
    "model_type",
    "num_labels",
    "output_attentions",
    "return_dict",
    "torch_dtype",
}


def tiny_model(family: str, **changes: object) -> torch.nn.Module:
    config = config_files.tiny(family, **changes)
    model_type = config.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **config)
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


DECODERS = [family for family in TEXT_FAMILIES if not family.endswith("_vl")]


def test_keys_without_effect_change_nothing(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    """Neither in `transformers`, for all of them together, nor here."""
    for family in DECODERS:
        with subtests.test(family=family):
            check_keys_without_effect(family, tmp_path)


def check_keys_without_effect(family: str, tmp_path: pathlib.Path) -> None:
    rows = config_files.key_tables()[family][""]
    idle = {key for key, row in rows.items() if row["fate"] == "no effect"} - NOT_TRIED
    changes = {key: NO_EFFECT[key] for key in idle}
    wide = {"initializer_range": 0.4}  # scores and logits that a cap would bend
    plain = tiny_model(family, **wide)
    tokens = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(5))

    def difference(**more: object) -> float:
        other = tiny_model(family, **wide, **more)
        other.load_state_dict(plain.state_dict())
        logits = [model(tokens, return_dict=True).logits for model in (plain, other)]
        return (logits[0] - logits[1]).abs().max().item()

    assert difference(**changes) <= 1e-4
    assert difference(rms_norm_eps=1.0) >= 0.1  # what acts shows
    read = config_files.read_all(
        [config_files.tiny(family), config_files.tiny(family, **changes)], tmp_path
    )
    assert "config" in read[0] and read[0] == read[1]


def test_every_key_that_the_model_reads_has_a_fate(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Keys that no class declares, too: the modelling code looks for `is_causal` in any config."""
    for family in DECODERS:
        with subtests.test(family=family):
            check_keys_that_the_model_reads(family, monkeypatch)


def check_keys_that_the_model_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = PreTrainedConfig.__getattribute__
    places = re.compile(r"transformers/(models/\w+/modeling_|masking_utils|modeling_rope_utils)")

    def recording(self: PreTrainedConfig, name: str) -> object:
        if places.search(sys._getframe(1).f_code.co_filename):
            read.add(name)
        return original(self, name)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", recording)
    model = tiny_model(family)
    model(torch.arange(20)[None], use_cache=True)
    monkeypatch.undo()
    assert {"is_causal", "num_attention_heads", "rope_parameters"} <= read
    one = type(model.config)
    names = {
        name
        for name in read
        if not name.startswith("_") and (name in fields(one) or not hasattr(one, name))
    }
    missing = names - set(config_files.key_tables()[family][""])
    assert not missing, f"the model reads {missing} of its config"


def resolved_by_transformers(family: str) -> dict:
    """What an empty config.json of the family is in `transformers`, under our names."""
    config = transformers.AutoConfig.for_model(family).get_text_config()
    eos = config.eos_token_id
    head_dim = getattr(config, "head_dim", None)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_ids": [] if eos is None else [eos],
    }


def test_an_empty_config_is_the_class_without_arguments(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for family in DECODERS:
        with subtests.test(family=family):
            read = config_files.read_all([{"model_type": family}], tmp_path)[0]["config"]
            expected = resolved_by_transformers(family)
            assert {key: read[key] for key in expected} == expected
            config = transformers.AutoConfig.for_model(family)
            ropes = config.rope_parameters
            assert read["rope"]["theta"] == ropes.get("full_attention", ropes)["rope_theta"]
            if "window_rope" in read:
                assert read["window_rope"]["theta"] == ropes["sliding_attention"]["rope_theta"]
            has_window = [window < 2**30 for window in read["decoder"]["windows"]]
            windowed = getattr(config, "sliding_window", None) not in (None, 0)
            types = getattr(config, "layer_types", None)
            assert has_window == [
                windowed and (types is None or types[i] == "sliding_attention")
                for i in range(config.num_hidden_layers)
            ]
            experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 0))
            assert read["decoder"]["num_experts"] == experts
            if experts:
                assert read["decoder"]["num_experts_per_tok"] == config.num_experts_per_tok
                assert read["decoder"]["norm_topk_prob"] == getattr(config, "norm_topk_prob", True)
