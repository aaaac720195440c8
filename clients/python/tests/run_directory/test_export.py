"""`tandem export` of the files of a checkpoint, and by a server."""

import json
from pathlib import Path

import fakes
import numpy as np
import pytest
import xxhash
from commands import tandem
from safetensors import safe_open
from safetensors.numpy import save_file

from tandem._proto.types.v1 import tensor_pb2
from tandem.errors import ConfigError
from tandem.rpc.client import TrainerClient
from tandem.run_directory.export import export_checkpoint, export_speculator
from tandem.utils.number_formats import data_type, torch_name

WEIGHTS = np.array([1.0, -2.5, 1e-3], np.float32)


def write_checkpoint(directory, weights=WEIGHTS, **others):
    """The files of a trainer's checkpoint, with their manifest."""
    fakes.write_tokenizer(directory)
    save_file({"w": weights, **others}, directory / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    (directory / "tandem_state.json").write_text("{}")
    (directory / "kept_values.bin").write_bytes(bytes(8))
    for name in ("optimizer", "speculator_optimizer"):
        (directory / f"{name}.safetensors").write_bytes(b"moments")
    (directory / "speculator").mkdir()
    (directory / "speculator/config.json").write_text('{"n_predict": 3}')
    write_manifest(directory)
    return directory


def write_manifest(directory):
    (directory / "manifest.json").unlink(missing_ok=True)
    files = [
        {
            "name": str(file.relative_to(directory)),
            "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes()),
        }
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    ]
    (directory / "manifest.json").write_text(json.dumps({"files": files}))


def stored(directory, name="w"):
    """The type and the values of an exported tensor."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor(name)
        return str(tensor.dtype), tensor.float().numpy()


@pytest.mark.parametrize(
    ("name", "kind", "rounding"),
    [("fp32", "float32", 0), ("bf16", "bfloat16", 2**-8), ("fp16", "float16", 2**-11)],
)
def test_a_checkpoint_becomes_a_model_directory_of_the_format(tmp_path, name, kind, rounding):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    shown = tandem("export", checkpoint, tmp_path / "model", "--dtype", name, "--json").stdout
    assert json.loads(shown) == {"path": str(tmp_path / "model"), "dtype": kind}
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    dtype, values = stored(tmp_path / "model")
    assert dtype == f"torch.{kind}"
    np.testing.assert_allclose(values, WEIGHTS, rtol=rounding, atol=0)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == kind


def test_the_files_of_several_ranks_are_exported_with_their_index(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    (checkpoint / "model.safetensors").unlink()
    files = [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    for name, file in zip("ab", files, strict=True):
        save_file({name: WEIGHTS}, checkpoint / file, {"format": "pt"})
    index = {"metadata": {"total_size": 24}, "weight_map": dict(zip("ab", files, strict=True))}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    write_manifest(checkpoint)
    export_checkpoint(checkpoint, tmp_path / "model", "bf16")
    exported = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert exported["weight_map"] == index["weight_map"]
    for name, file in exported["weight_map"].items():
        with safe_open(tmp_path / "model" / file, framework="pt") as opened:
            assert str(opened.get_tensor(name).dtype) == "torch.bfloat16"


def test_the_bias_of_a_router_stays_float32(tmp_path):
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    checkpoint = write_checkpoint(tmp_path / "step_000001", **{bias: WEIGHTS})
    export_checkpoint(checkpoint, tmp_path / "model", "bf16")
    assert stored(tmp_path / "model")[0] == "torch.bfloat16"
    dtype, values = stored(tmp_path / "model", bias)
    assert dtype == "torch.float32"
    np.testing.assert_array_equal(values, WEIGHTS)


def test_a_weight_that_the_format_cannot_hold_is_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001", np.array([1e5], np.float32))
    with pytest.raises(ConfigError, match="'w' holds numbers that float16 cannot hold"):
        export_checkpoint(checkpoint, tmp_path / "model", "fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_damaged_checkpoint_is_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    with (checkpoint / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match=r"config\.json: its digest differs from the manifest's"):
        export_checkpoint(checkpoint, tmp_path / "model", "fp32")
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: is missing"):
        export_checkpoint(checkpoint, tmp_path / "model", "fp32")


def test_a_checkpoint_with_a_damaged_speculator_is_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    (checkpoint / "speculator/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"speculator/config\.json: its digest differs"):
        export_speculator(checkpoint, tmp_path / "speculator", "fp32")


def test_what_is_not_exported_is_not_read(tmp_path):
    """The moments of the optimizer are twice as large as the model."""
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    (checkpoint / "optimizer.safetensors").unlink()
    (checkpoint / "speculator/config.json").unlink()
    told = []
    export_checkpoint(
        checkpoint, tmp_path / "model", "bf16", lambda done, total: told.append((done, total))
    )
    assert stored(tmp_path / "model")[0] == "torch.bfloat16"
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()} == {0o644}
    done = [one for one, _ in told]
    assert done == sorted(done)
    names = ("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors")
    read = [checkpoint / name for name in (*names, "tokenizer.json", "tokenizer_config.json")]
    assert {total for _, total in told} == {2 * sum(file.stat().st_size for file in read)}


def test_a_destination_that_is_not_empty_stays_as_it_is(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    (tmp_path / "model").mkdir()
    export_checkpoint(checkpoint, tmp_path / "model", "fp32")
    before = (tmp_path / "model" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"model exists$"):
        export_checkpoint(checkpoint, tmp_path / "model", "bf16")
    assert (tmp_path / "model" / "config.json").read_bytes() == before


def test_what_cannot_be_exported_is_named(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    out = tmp_path / "out"
    assert (
        "'int8' is not one of"
        in tandem("export", checkpoint, out, "--dtype", "int8", check=2).stderr
    )
    assert "neither a checkpoint" in tandem("export", tmp_path, out, check=2).stderr
    assert "no critic checkpoint" in tandem("export", checkpoint, out, "--critic", check=2).stderr
    assert "--address" in tandem("export", checkpoint, out, "--address", "a:1", check=2).stderr
    assert not out.exists()


def test_a_relative_path_is_the_clients(address, tmp_path, monkeypatch, world):
    monkeypatch.chdir(tmp_path)
    with TrainerClient(address) as client:
        assert client.export_model("model", dtype="bf16") == str(tmp_path / "model")
        assert client.save_checkpoint("checkpoints", "one") == str(tmp_path / "checkpoints/one")
        client.load_checkpoint("checkpoints/one")
        with pytest.raises(ConfigError, match="dtype: 'int8' is not one of fp32, bf16, fp16"):
            client.export_model("model", dtype="int8")
    assert world.loads == [str(tmp_path / "checkpoints/one")]
    shown = tandem("export", "served", "model", "--address", address, "--dtype", "bf16").stdout
    assert shown == f"{tmp_path}/model: bfloat16\n"
    assert Path(shown.split(":")[0]).is_absolute()


def test_formats_have_short_and_long_names():
    assert torch_name("bf16", "dtype") == torch_name("bfloat16", "dtype") == "bfloat16"
    assert data_type("fp16", "dtype") == tensor_pb2.DATA_TYPE_FLOAT16


def write_adapter(directory, base, **others):
    """A checkpoint of an adapter of rank 1 and scale 2, with its manifest."""
    directory.mkdir()
    factors = {
        "base_model.model.w.lora_A.weight": np.array([[1.0, 2.0]], np.float32),
        "base_model.model.w.lora_B.weight": np.array([[3.0], [4.0]], np.float32),
    }
    save_file(factors | others, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {"r": 1, "lora_alpha": 2, "base_model_name_or_path": str(base)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    write_manifest(directory)
    return directory


def write_base(directory, name="w.weight"):
    fakes.write_tokenizer(directory)
    save_file({name: np.eye(2, dtype=np.float32), "v": WEIGHTS}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return directory


def test_adapters_are_exported_as_the_merged_model(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    export_checkpoint(adapter, tmp_path / "merged", "bf16")
    dtype, merged = stored(tmp_path / "merged", "w.weight")
    assert (dtype, merged.tolist()) == ("torch.bfloat16", [[7.0, 12.0], [8.0, 17.0]])
    assert stored(tmp_path / "merged", "v")[1] == pytest.approx(WEIGHTS, rel=1e-2)
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "merged/tokenizer.json").exists()


def test_adapters_that_cannot_be_merged_here_are_refused_by_name(tmp_path):
    gone = write_adapter(tmp_path / "gone", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path: .*nowhere is not here"):
        export_checkpoint(gone, tmp_path / "out", "fp32")
    stacked = write_adapter(tmp_path / "stacked", write_base(tmp_path / "fused", "wv.weight"))
    with pytest.raises(ConfigError, match=r"has no tensor w\.weight"):
        export_checkpoint(stacked, tmp_path / "out", "fp32")
    head = {"base_model.model.score.weight": np.ones((1, 2), np.float32)}
    critic = write_adapter(tmp_path / "critic", write_base(tmp_path / "base"), **head)
    with pytest.raises(ConfigError, match=r"score\.weight: is not an adapter of a map"):
        export_checkpoint(critic, tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()
