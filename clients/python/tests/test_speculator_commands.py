"""`tandem speculator` against fake servers, and on the files of a checkpoint."""

import json

import numpy as np
import pytest
import xxhash
from commands import lines, tandem
from safetensors import safe_open
from safetensors.numpy import save_file

WEIGHTS = np.array([1.0, -2.5, 1e-3], np.float32)


def write_checkpoint(directory, weights=WEIGHTS):
    """A checkpoint with a speculator, as far as an export reads it, and its manifest."""
    folder = directory / "speculator"
    folder.mkdir(parents=True)
    save_file({"speculator.w": weights}, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"the senior")
    (directory / "speculator_optimizer.safetensors").write_bytes(b"moments")
    write_manifest(directory)
    return directory


def write_manifest(directory):
    files = [
        {
            "name": str(file.relative_to(directory)),
            "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes()),
        }
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    ]
    (directory / "manifest.json").write_text(json.dumps({"files": files}))


@pytest.mark.parametrize(
    ("name", "kind", "rounding"),
    [("fp32", "float32", 0), ("bf16", "bfloat16", 2**-8), ("fp16", "float16", 2**-11)],
)
def test_a_speculator_becomes_a_directory_of_the_format(tmp_path, name, kind, rounding):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    out = tmp_path / "heads"
    shown = tandem("speculator", "export", checkpoint, out, "--dtype", name, "--json").stdout
    assert json.loads(shown) == {"path": str(out), "dtype": kind}
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(out / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("speculator.w")
    assert str(tensor.dtype) == f"torch.{kind}"
    np.testing.assert_allclose(tensor.float().numpy(), WEIGHTS, rtol=rounding, atol=0)
    assert json.loads((out / "config.json").read_text()) == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "torch_dtype": kind,
    }


def test_the_speculator_of_a_run_is_that_of_its_last_checkpoint(run_file, tmp_path):
    tandem("sft", run_file, "steps=1")
    write_checkpoint(tmp_path / "with")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    (tmp_path / "with" / "speculator" / "config.json").rename(
        checkpoint / "speculator" / "config.json"
    )
    write_manifest(checkpoint)
    tandem("speculator", "export", tmp_path / "run", tmp_path / "heads")
    assert "MLPSpeculator" in (tmp_path / "heads" / "config.json").read_text()


def test_what_is_no_speculator_is_refused_and_nothing_is_written(tmp_path):
    def said(source, *options):
        return tandem("speculator", "export", source, out, *options, check=2).stderr

    out = tmp_path / "heads"
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    assert f"SOURCE: {tmp_path} is neither a checkpoint nor a run" in said(tmp_path)
    assert "'int8' is none of fp32, bf16, fp16" in said(checkpoint, "--dtype", "int8")
    large = write_checkpoint(tmp_path / "large", np.array([1e5], np.float32))
    assert "numbers that float16 cannot hold" in said(large, "--dtype", "fp16")
    config = checkpoint / "speculator" / "config.json"
    config.write_text(config.read_text() + " ")
    assert "speculator/config.json: its digest is not the manifest's" in said(checkpoint)
    config.unlink()
    assert "speculator/config.json: is missing" in said(checkpoint)
    for file in (checkpoint / "speculator").iterdir():
        file.unlink()
    write_manifest(checkpoint)
    assert f"{checkpoint} has no speculator" in said(checkpoint)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    assert "heads exists" in said(large)
    assert [file.name for file in out.iterdir()] == ["mine"]


def test_a_speculator_trains_on_the_senior_s_own_responses(world, run_file, tmp_path):
    trained = tandem("speculator", "train", run_file, "steps=2", "sft.batch_size=5")
    assert "run directory" in trained.stdout
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert len(lines(tmp_path / "run" / "trajectories" / "step_2.jsonl")) == 5
    # It is a run of `tandem sft`.
    resume = ("--resume", "steps=3", "sft.batch_size=5")
    tandem("sft", run_file, *resume, "sft.responses=senior")
    tandem("speculator", "train", run_file, "--resume", "auto", "steps=4", "sft.batch_size=5")
    assert [header.step for header in world.headers] == [1, 2, 3, 4]


def test_an_override_lets_a_speculator_learn_the_rows_answers(world, run_file):
    tandem("speculator", "train", run_file, "steps=1", "sft.responses=rows")
    assert "Generate" not in {method for method, _ in world.calls}
    assert world.headers[0].num_samples == 16


@pytest.mark.parametrize("section", ["", "speculator: {n_predict: 2}", "speculator: null"])
def test_a_trainer_without_a_speculator_is_refused_before_it_starts(run_file, tmp_path, section):
    model = tmp_path / "model"
    override = f"cluster={{rollout: {{}}, model: {model}, trainer: {{{section}}}}}"
    for arguments in ([], ["--dry-run"]):
        done = tandem("speculator", "train", run_file, override, *arguments, check=2)
        assert "cluster.trainer.speculator: the trainer trains no speculator" in done.stderr
        assert "hint: its `adapter` names the kind" in done.stderr
    assert not (tmp_path / "run").exists()
