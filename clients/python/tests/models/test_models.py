"""`tandem model import`: every tensor of the result is one of the source, or it is refused."""

import json
import shutil
import weakref

import fakes
import numpy as np
import pytest
import xxhash

from tandem.errors import ConfigError
from tandem.models.importing import SERVED_FAMILIES, import_model
from tandem.models.tokenizer import TextCodec
from tandem.models.weights import reading
from tandem.models.weights.writing import OutputTensor, write_shards
from tandem.run_directory.export import export_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
CHANGES = {
    "deepseek_v3": LATENT,
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_of(family, **changes):
    """A tiny config of a family."""
    if family in ("qwen2_vl", "qwen2_5_vl"):
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
        vision |= {"out_hidden_size": 32, "intermediate_size": 48}
        return transformers.AutoConfig.for_model(
            family, text_config={**SHAPE, **changes}, vision_config=vision
        )
    return transformers.AutoConfig.for_model(
        family, **{**SHAPE, **CHANGES.get(family, {}), **changes}
    )


def make(directory, family="llama", **changes):
    """Writes a random model of a family, with a tokenizer; returns it with its directory."""
    torch.manual_seed(1)
    config = config_of(family, **changes)
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
    model = auto.from_config(config)
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.linspace(-1, 1, len(value)) / 3)
    model.save_pretrained(directory)
    fakes.write_tokenizer(directory)
    return model, directory


def rewrite(directory, change):
    """Changes the tensors of a directory by a function."""
    file = directory / "model.safetensors"
    changed = {name: value.clone() for name, value in change(load_file(file)).items()}
    save_file(changed, file, {"format": "pt"})


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def weights(directory):
    """All tensors of a directory."""
    return {
        name: value
        for file in sorted(directory.glob("model*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_every_tensor_of_the_result_is_a_cast_of_the_sources(tmp_path, family):
    model, source = make(tmp_path / "source", family)
    before = weights(source)
    imported = import_model(str(source), tmp_path / "model")
    after = weights(imported.path)
    assert after.keys() == before.keys()
    for name, value in after.items():
        kept = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(value, before[name].to(value.dtype)), name
    assert imported.parameters == sum(value.numel() for value in after.values())
    # transformers reads the same model from it.
    again, info = type(model).from_pretrained(
        imported.path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name
    assert TextCodec(imported.path).encode("w5") == [5]
    assert json.loads((imported.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert import_model(str(source), tmp_path / "model").already_there
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in imported.path.iterdir())


@pytest.mark.parametrize(
    "prefixed",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"actor.policy.{name}",
        lambda name: name.replace("self_attn", "self_attn._orig_mod"),
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
        # As the base model alone is saved; the head is another module's.
        lambda name: name.removeprefix("model."),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_vl"])
def test_a_prefix_of_a_wrapper_is_removed(tmp_path, prefixed, family):
    _, source = make(tmp_path / "source", family)
    before = weights(source)
    rewrite(source, lambda tensors: {prefixed(name): value for name, value in tensors.items()})
    imported = import_model(str(source), tmp_path / "model", dtype="float32")
    after = weights(imported.path)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    if "_orig_mod" in prefixed("self_attn"):
        assert any("_orig_mod" in note for note in imported.notes)


def without(*missing):
    return lambda tensors: {name: one for name, one in tensors.items() if name not in missing}


MATRIX = "model.layers.1.mlp.up_proj.weight"


def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path, subtests):
    for change, says in [
        (without(MATRIX), f"'{MATRIX}': missing, but config.json asks for it"),
        (without("lm_head.weight"), "'lm_head.weight': missing"),
        (without("model.norm.weight", MATRIX), f"2 tensors '{MATRIX}', 'model.norm.weight': mis"),
        (
            lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": tensors[MATRIX]},
            "tensor 'model.layers.2.mlp.up_proj.weight': unexpected",
        ),
        (
            lambda tensors: tensors | {f"_orig_mod.{MATRIX}": tensors[MATRIX].clone()},
            f"tensors '_orig_mod.{MATRIX}' and '{MATRIX}' are the same parameter",
        ),
        (
            lambda tensors: tensors | {MATRIX: tensors[MATRIX][:, :-1].contiguous()},
            f"tensor '{MATRIX}' has the shape [48, 31], but config.json asks for [48, 32]",
        ),
        (
            lambda tensors: {name.replace("mlp", "ffn"): one for name, one in tensors.items()},
            "6 tensors 'model.layers.0.ffn.down_proj.weight',",
        ),
        (
            lambda tensors: tensors | {MATRIX: tensors[MATRIX].to(torch.int8)},
            f"tensor '{MATRIX}': has the type I8",
        ),
        (
            lambda tensors: tensors | {MATRIX: tensors[MATRIX] * float("nan")},
            f"the tensor '{MATRIX}' holds numbers that are not finite",
        ),
    ]:
        with subtests.test(change=change, says=says):
            _, source = make(tmp_path / "source", tie_word_embeddings=False)
            rewrite(source, change)
            with pytest.raises(ConfigError) as caught:
                import_model(str(source), tmp_path / "model")
            assert says in caught.value.message
            assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_expert_that_is_missing_is_named(tmp_path):
    _, source = make(tmp_path / "source", "qwen3_moe")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(source, without(name))
    with pytest.raises(ConfigError, match=f"tensor '{name}': missing"):
        import_model(str(source), tmp_path / "model")


def test_experts_may_be_stacked(tmp_path):
    model, source = make(tmp_path / "source", "qwen3_moe")
    save_file(model.state_dict(), source / "model.safetensors", {"format": "pt"})
    imported = import_model(str(source), tmp_path / "model", dtype="float32")
    again = type(model).from_pretrained(imported.path, dtype=torch.float32)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    one = "model.layers.0.mlp.experts.0.up_proj.weight"
    rewrite(source, lambda tensors: tensors | {one: tensors[stacked][0, 8:].clone()})
    with pytest.raises(ConfigError, match="are the same parameter"):
        import_model(str(source), tmp_path / "other")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_vl"])
def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_kept(tmp_path, family):
    _, source = make(tmp_path / "source", family, tie_word_embeddings=False)
    edit_config(source, tie_word_embeddings=True)
    before = weights(source)
    head, embeddings = before["lm_head.weight"], before["model.embed_tokens.weight"]
    assert not torch.equal(head, embeddings)
    imported = import_model(str(source), tmp_path / "model", dtype="float32")
    after = weights(imported.path)
    assert torch.equal(after["lm_head.weight"], head)
    assert torch.equal(after["model.embed_tokens.weight"], embeddings)
    assert json.loads((imported.path / "config.json").read_text())["tie_word_embeddings"] is False
    assert "'lm_head.weight' differs from" in imported.notes[0]


def test_a_tied_head_is_stored_once(tmp_path):
    _, source = make(tmp_path / "source", tie_word_embeddings=True)
    before = weights(source)
    assert "lm_head.weight" not in before
    embeddings = before["model.embed_tokens.weight"]
    rewrite(source, lambda tensors: tensors | {"lm_head.weight": embeddings.clone()})
    assert weights(import_model(str(source), tmp_path / "both").path).keys() == before.keys()
    # transformers takes the one that is there.
    rewrite(source, without("model.embed_tokens.weight"))
    head_alone = weights(import_model(str(source), tmp_path / "head", dtype="float32").path)
    assert torch.equal(head_alone["model.embed_tokens.weight"], embeddings)


def test_constants_of_old_versions_are_left_out_and_named(tmp_path):
    _, source = make(tmp_path / "source")
    before = weights(source)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(source, lambda tensors: tensors | {name: torch.ones(4)})
    imported = import_model(str(source), tmp_path / "model")
    assert weights(imported.path).keys() == before.keys()
    assert name in imported.notes[0]


def test_layers_for_multi_token_prediction_are_kept_where_the_config_counts_them(tmp_path):
    _, source = make(tmp_path / "source", "deepseek_v3")
    name = "model.layers.2.eh_proj.weight"
    rewrite(source, lambda tensors: tensors | {name: torch.ones(32, 64)})
    edit_config(source, num_nextn_predict_layers=1)
    assert name in weights(import_model(str(source), tmp_path / "model").path)
    whole = weights(source)
    rewrite(source, lambda tensors: tensors | {f"_orig_mod.{name}": tensors[name]})
    with pytest.raises(ConfigError, match="are the same parameter"):
        import_model(str(source), tmp_path / "twice")
    # As the base model alone is saved.
    rewrite(source, lambda _: {one.removeprefix("model."): value for one, value in whole.items()})
    assert weights(import_model(str(source), tmp_path / "base").path).keys() == whole.keys()
    rewrite(source, lambda _: whole)
    edit_config(source, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=f"tensor '{name}': unexpected"):
        import_model(str(source), tmp_path / "other")


def test_a_number_that_the_format_cannot_hold_is_refused(tmp_path):
    _, source = make(tmp_path / "source")
    rewrite(source, lambda tensors: tensors | {MATRIX: tensors[MATRIX] + 1e5})
    import_model(str(source), tmp_path / "bfloat16")
    with pytest.raises(ConfigError, match=f"'{MATRIX}' holds numbers that float16 cannot hold"):
        import_model(str(source), tmp_path / "model", dtype="float16")


def test_the_routers_bias_stays_float32_in_float16_too(tmp_path):
    _, source = make(tmp_path / "source", "deepseek_v3")
    bias = weights(source)[BIAS]
    after = weights(import_model(str(source), tmp_path / "model", dtype="float16").path)
    assert torch.equal(after[BIAS], bias)
    assert after[MATRIX.replace("1.mlp", "0.mlp")].dtype == torch.float16


def test_a_checkpoint_of_torch_save_is_read(tmp_path):
    model, source = make(tmp_path / "source")
    before = weights(source)
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    after = weights(import_model(str(source), tmp_path / "model", dtype="float32").path)
    assert all(torch.equal(after[name], before[name]) for name in before)
    torch.save({"a": object}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: contains more than tensors"):
        import_model(str(source), tmp_path / "other")


def shard(source, index_of=lambda places: places):
    """Splits a directory's weights into two files with their index."""
    tensors = weights(source)
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, source / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = json.dumps({"weight_map": index_of(places)})
    (source / "model.safetensors.index.json").write_text(index)
    return tensors


def test_shards_are_read_by_their_index_and_other_files_are_not(tmp_path):
    _, source = make(tmp_path / "source")
    before = shard(source)
    for name in ("consolidated", "adapter_model"):
        save_file({"other": torch.ones(2)}, source / f"{name}.safetensors")
    (source / "adapter_config.json").write_text("{}")
    imported = import_model(str(source), tmp_path / "model", dtype="float32")
    after = weights(imported.path)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "adapter next to the weights is not merged" in imported.notes[0]


@pytest.mark.parametrize(
    ("index_of", "says"),
    [
        (lambda places: places | {"x": "model-00001-of-00002.safetensors"}, "'x': missing"),
        (lambda places: without(MATRIX)(places), f"'{MATRIX}': not in model.safetensors.index"),
        (lambda places: places | {MATRIX: "../up.safetensors"}, "must be one next to the index"),
        (lambda places: places | {MATRIX: "none.safetensors"}, "none.safetensors: No such file"),
    ],
)
def test_an_index_that_is_not_true_is_refused(tmp_path, index_of, says):
    _, source = make(tmp_path / "source")
    shard(source, index_of)
    with pytest.raises(ConfigError) as caught:
        import_model(str(source), tmp_path / "model")
    assert says in caught.value.message


def test_a_result_that_is_large_is_written_in_shards(tmp_path):
    tensors = [OutputTensor(f"t{index}", (4, 2), "bfloat16") for index in range(5)]
    values = [torch.full((4, 2), float(index), dtype=torch.bfloat16) for index in range(5)]
    write_shards(tmp_path, tensors, iter(values), shard_bytes=33)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}
    assert sorted(index["weight_map"]) == [tensor.name for tensor in tensors]
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], values[int(name[1:])])


@pytest.mark.parametrize("command", ["import", "export"])
def test_no_two_tensors_are_in_memory(tmp_path, monkeypatch, command):
    """When one is read, at most the one before it is still there."""
    _, source = make(tmp_path / "source")
    alive, most, read = [], [], reading._read

    def counted(*arguments):
        value = read(*arguments)
        most.append(sum(one() is not None for one in alive))
        alive.append(weakref.ref(value.untyped_storage()))
        return value

    monkeypatch.setattr(reading, "_read", counted)
    done = []

    def tell(*of):
        done.append(of)

    if command == "import":
        import_model(str(source), tmp_path / "model", progress=tell)
        totals = {(source / "model.safetensors").stat().st_size}
        assert done[-1][0] == sum(value.nbytes for value in weights(source).values())
    else:
        names = ["config.json", "model.safetensors"]
        files = [
            {"name": name, "xxh3_128": xxhash.xxh3_128_hexdigest((source / name).read_bytes())}
            for name in names
        ]
        (source / "manifest.json").write_text(json.dumps({"files": files}))
        export_checkpoint(source, tmp_path / "model", "bf16", tell)
        totals = {2 * sum((source / name).stat().st_size for name in names)}
    assert len(most) == len(weights(source))
    assert max(most) <= 1
    assert [one for one, _ in done] == sorted(one for one, _ in done)
    assert done[0][0] == 0
    assert {total for _, total in done} == totals


def test_a_critic_is_imported_with_its_head(tmp_path):
    config = config_of("llama", num_labels=1)
    source = tmp_path / "source"
    transformers.LlamaForSequenceClassification(config).save_pretrained(source)
    fakes.write_tokenizer(source)
    before = weights(source)
    after = weights(import_model(str(source), tmp_path / "model", dtype="float32").path)
    assert after.keys() == before.keys()
    assert torch.equal(after["score.weight"], before["score.weight"])
    rewrite(source, without("score.weight"))
    with pytest.raises(ConfigError, match=r"tensor 'score.weight': missing"):
        import_model(str(source), tmp_path / "other")


def gguf_model(file, drop=(), add=()):
    """Writes a tiny Llama as a GGUF file, without the tensors `drop` and with others."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(64)
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(61))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(index) for index in range(64)])
    writer.add_token_types([2, 3, 3] + [1] * 61)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    block = "blk.0."
    shapes = {
        "token_embd.weight": (64, 32),
        "output_norm.weight": (32,),
        "output.weight": (64, 32),
        f"{block}attn_norm.weight": (32,),
        f"{block}ffn_norm.weight": (32,),
        f"{block}attn_q.weight": (32, 32),
        f"{block}attn_k.weight": (16, 32),
        f"{block}attn_v.weight": (16, 32),
        f"{block}attn_output.weight": (32, 32),
        f"{block}ffn_gate.weight": (48, 32),
        f"{block}ffn_up.weight": (48, 32),
        f"{block}ffn_down.weight": (32, 48),
    }
    random = np.random.default_rng(0)
    values = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in (shapes | dict(add)).items()
        if name not in drop
    }
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_gguf_file_is_imported_whole_or_refused(tmp_path):
    values = gguf_model(tmp_path / "tiny.gguf")
    imported = import_model(str(tmp_path / "tiny.gguf"), tmp_path / "model", dtype="float32")
    after = weights(imported.path)
    assert len(after) == len(values)
    up = after["model.layers.0.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(up, values["blk.0.ffn_up.weight"])
    for number, drop in enumerate(("blk.0.ffn_up.weight", "blk.0.attn_norm.weight")):
        gguf_model(tmp_path / f"{number}.gguf", drop=[drop])
        with pytest.raises(ConfigError, match=rf"missing: tensors {drop.removesuffix('.weight')}"):
            import_model(str(tmp_path / f"{number}.gguf"), tmp_path / "other")
    gguf_model(tmp_path / "more.gguf", add={"blk.1.ffn_up.weight": (48, 32)}.items())
    with pytest.raises(ConfigError, match=r"unexpected: tensors blk.1.ffn_up$"):
        import_model(str(tmp_path / "more.gguf"), tmp_path / "other")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    _, source = make(tmp_path / "source")
    (source / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
    )
    with pytest.raises(ConfigError, match=r"is a git-lfs pointer") as caught:
        import_model(str(source), tmp_path / "model")
    assert "git lfs pull" in caught.value.hint


def test_tokens_that_the_tokenizers_other_files_name_are_written_into_it(tmp_path):
    _, source = make(tmp_path / "source")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "added_tokens.json").write_text('{"<|header|>": 64}')
    with pytest.raises(ConfigError, match=r"lacks '<\|header\|>'"):
        TextCodec(source)
    codec = TextCodec(import_model(str(source), tmp_path / "model").path)
    assert codec.encode("w5 <|header|> w6") == [5, 64, 6]
    wanted = transformers.AutoTokenizer.from_pretrained(source)
    assert codec.encode("w5 <|header|> w6") == wanted("w5 <|header|> w6").input_ids


def test_weights_that_are_damaged_are_refused(tmp_path):
    _, source = make(tmp_path / "source")
    (source / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=f"^{source}/model.safetensors: "):
        import_model(str(source), tmp_path / "model")
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"^{source}: holds no weights"):
        import_model(str(source), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_quantised_weights_are_refused(tmp_path):
    _, source = make(tmp_path / "source")
    edit_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantization_config: quantised checkpoints are not"):
        import_model(str(source), tmp_path / "model")


def test_a_change_of_the_source_is_no_second_import(tmp_path):
    _, source = make(tmp_path / "source")
    model = import_model(str(source), tmp_path / "model")
    copy = tmp_path / "copies" / "source"
    shutil.copytree(source, copy)
    assert import_model(str(copy), model.path).already_there
    rewrite(source, lambda tensors: tensors | {MATRIX: tensors[MATRIX] + 1})
    with pytest.raises(ConfigError, match=r" exists$"):
        import_model(str(source), model.path)


def test_a_family_that_no_server_has_is_refused_before_its_weights_are_read(tmp_path):
    source = tmp_path / "gpt2"
    source.mkdir()
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}
    (source / "config.json").write_text(json.dumps(config))
    message = f"^{source}: model_type: gpt2 is not supported"
    with pytest.raises(ConfigError, match=message) as caught:
        import_model(str(source), tmp_path / "model")
    assert "llama" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_a_source_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a Hugging Face directory"):
        import_model(str(tmp_path / "nothing"), tmp_path / "model")


def test_a_destination_that_is_a_file_is_refused(tmp_path):
    _, source = make(tmp_path / "source")
    file = tmp_path / "model"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"^{file} exists$"):
        import_model(str(source), file)
    with pytest.raises(ConfigError, match=r": Not a directory$"):
        import_model(str(source), file / "below")


def test_a_destination_with_a_damaged_stamp_is_refused(tmp_path):
    _, source = make(tmp_path / "source")
    destination = tmp_path / "model"
    destination.mkdir()
    (destination / "tandem_import.json").write_text("{")
    with pytest.raises(ConfigError, match=r" exists$"):
        import_model(str(source), destination)
