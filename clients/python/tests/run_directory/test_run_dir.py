"""Run directories: what is refused, and which files are kept and removed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fakes
import pytest
import yaml
from commands import contents, lines, tandem

from tandem._proto.types.v1 import server_pb2
from tandem.errors import RunDirectoryError, StorageError
from tandem.run_directory import directory
from tandem.run_directory.checkpoints import SavedState, remove_checkpoint
from tandem.run_directory.directory import RunDirectory
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import RunSettings
from tandem.utils import atomic_files


def test_a_run_directory_can_be_moved(world, run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    world.saved = {str(moved / "checkpoints" / Path(p).name): v for p, v in world.saved.items()}
    tandem("train", run_file, "--resume", f"run_dir={moved}")
    assert [line["step"] for line in lines(moved / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads((moved / "state.json").read_text())["trainer"] == "checkpoints/step_000004"


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("cut_at", ["run.json", "config.yaml"])
def test_a_start_that_was_cut_off_is_no_foreign_directory(run_file, monkeypatch, clean, cut_at):
    config = loading.load(RunSettings, run_file)
    if clean:
        with RunDirectory.open(config, "train") as run:
            run.begin()
        (run.path / "notes.txt").write_text("x")
    write = directory.write_atomically

    def cut_off(path, text):
        if path.name != cut_at:
            return write(path, text)
        path.with_name(f".{path.name}.tmp").write_text(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "write_atomically", cut_off)
    with pytest.raises(KeyboardInterrupt), RunDirectory.open(config, "train", clean=clean) as run:
        run.begin()
    monkeypatch.undo()
    with RunDirectory.open(config, "train", clean=True) as run:
        run.begin()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("state.json", '{"step": 1, "stepz": 2}', "state.json: .*"),
        ("state.json", "[]", "state.json: not a JSON object"),
        ("run.json", '{"kind": "tr', "run.json: not JSON"),
        ("config.yaml", None, "config.yaml: No such file"),
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("config.yaml", "run_dir: !!float x", "config.yaml: not YAML"),
        ("config.yaml", "7", "config.yaml: the file must be a mapping"),
        ("metrics.jsonl", '{"step": 1}\n{"st\n', "metrics.jsonl:2: not JSON"),
        ("metrics.jsonl", "{}\n", "metrics.jsonl:1: step: not an integer"),
        ("evals.jsonl", "7\n", "evals.jsonl:1: not a JSON object"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(run_file, name, text, says):
    config = loading.load(RunSettings, run_file)
    with RunDirectory.open(config, "train") as run:
        run.begin()
        run.write_state(SavedState(1, 1, "checkpoints/step_000001"))
    if text is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_text(text)
    before = contents(run.path)
    with pytest.raises(RunDirectoryError, match=f"^{run.path}/{says}"):
        RunDirectory.open(config, "train", resume=True)
    assert contents(run.path) == before


def test_clean_leaves_logs_and_what_no_run_wrote(run_file, tmp_path):
    tandem("train", run_file)
    (tmp_path / "run" / "notes.txt").write_text("x")
    tandem("train", run_file, "--clean", "steps=1")
    run = tmp_path / "run"
    assert (run / "notes.txt").exists()
    assert not (run / "trajectories" / "step_2.parquet").exists()
    assert {file.name for file in (run / "logs").iterdir()} == {"attempt_1.log", "attempt_2.log"}


def test_a_resumed_run_forgets_checkpoints_that_state_json_does_not_name(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    folder = tmp_path / "run" / "checkpoints"
    # A crash came between the save of a checkpoint and that of state.json.
    for name in ("step_000009", "critic/step_000009", "mine", "step_best"):
        fakes.write_checkpoint(folder / name)
    tandem("train", run_file, "steps=3", "--resume")
    assert {str(path.relative_to(folder)) for path in folder.rglob("step_*")} == {
        "step_000002",
        "step_000003",
        "step_best",
    }
    assert (folder / "mine" / "model.safetensors").exists()


def test_clean_removes_no_file_that_others_put_into_the_folders_of_a_run(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    for name in ("best", "step_000003"):
        fakes.write_checkpoint(run / "checkpoints" / name)
    mine = {
        "checkpoints/mine/thesis.txt",
        "checkpoints/step_000002/thesis.txt",
        "checkpoints/step_000007/no_manifest.txt",
        "checkpoints/step_000008",
        "checkpoints/best/model.safetensors",
        "trajectories/mine.jsonl",
        "trajectories/step_2.txt",
        "tensorboard/events.out.tfevents.1700000000.host.1.0",
    }
    for name in mine:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    tandem("train", run_file, "--clean", "steps=1")
    assert {name for name in mine if (run / name).read_text() == "mine"} == mine
    # A directory with further files is the user's as a whole.
    assert (run / "checkpoints" / "step_000002" / "model.safetensors").exists()
    assert not (run / "checkpoints" / "step_000003").exists()
    assert not (run / "trajectories" / "step_2.parquet").exists()


def test_a_checkpoint_with_a_speculator_is_removed_with_its_folder(tmp_path):
    for name in ("own", "with_file", "with_folder", "cut_off"):
        fakes.write_checkpoint(tmp_path / name)
    (tmp_path / "with_file" / "speculator" / "mine.txt").write_text("x")
    (tmp_path / "with_folder" / "mine").mkdir()
    shutil.rmtree(tmp_path / "cut_off" / "speculator")
    assert remove_checkpoint(tmp_path / "own") is None
    assert remove_checkpoint(tmp_path / "cut_off") is None
    for name, foreign in (("with_file", "speculator/mine.txt"), ("with_folder", "mine")):
        before = contents(tmp_path / name)
        why = remove_checkpoint(tmp_path / name)
        assert why == f"{foreign} does not belong to the checkpoint"
        assert contents(tmp_path / name) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with_file", "with_folder"]


@pytest.mark.parametrize("option", ["--clean", "--resume"])
def test_a_checkpoint_that_a_user_copied_stays_and_is_named(run_file, tmp_path, option):
    tandem("train", run_file, "steps=2")
    folder = tmp_path / "run" / "checkpoints"
    kept = {
        "step_000009": "its manifest names the checkpoint 'step_000002'",
        "critic/step_000008": "its manifest names the checkpoint ''",
        "step_000007": "notes.txt does not belong to the checkpoint",
        "step_000006": "its manifest.json is damaged",
        "step_000005": "it is not a checkpoint",
    }
    fakes.write_checkpoint(folder / "step_000009", name="step_000002")
    fakes.write_checkpoint(folder / "critic/step_000008", name="")
    for name in ("step_000007", "step_000006", "mine"):
        fakes.write_checkpoint(folder / name)
    (folder / "step_000007" / "notes.txt").write_text("x")
    (folder / "step_000006" / "manifest.json").write_text('{"name": "step_000006", "files": [7]}')
    (folder / "step_000005").symlink_to(folder / "mine")
    before = {name: contents(folder / name) for name in kept}
    done = tandem("train", run_file, option, "steps=3")
    assert {name: contents(folder / name) for name in kept} == before
    for name, why in kept.items():
        assert f"{folder / name} is kept: {why}" in done.stdout


@pytest.mark.parametrize("identity", ["{}", '{"run_id": "r"}', '{"run_id": 1, "kind": "train"}'])
@pytest.mark.parametrize("option", ["--clean", "--resume"])
def test_the_run_json_of_another_tool_makes_no_run_directory(run_file, tmp_path, identity, option):
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints").mkdir(parents=True)
    (foreign / "run.json").write_text(identity)
    (foreign / "checkpoints" / "theirs").write_text("x")
    before = contents(foreign)
    done = tandem("train", run_file, f"run_dir={foreign}", option, check=2)
    assert str(foreign) in done.stderr
    assert contents(foreign) == before


def without_line(file, number):
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:number] + kept[number + 1 :]))


@pytest.mark.parametrize(
    ("damage", "key", "says"),
    [
        (
            lambda run: without_line(run / "metrics.jsonl", 1),
            "metrics",
            "metrics.jsonl lacks step 2",
        ),
        (
            lambda run: (run / "metrics.jsonl").unlink(),
            "metrics",
            "metrics.jsonl lacks steps 1, 2, 3",
        ),
        (lambda run: without_line(run / "versions.jsonl", 2), "versions", "lacks step 3"),
    ],
)
def test_a_resumed_run_names_the_missing_lines_of_its_records(
    run_file, tmp_path, damage, key, says
):
    tandem("train", run_file, "steps=3")
    damage(tmp_path / "run")
    before = contents(tmp_path / "run")
    done = tandem("train", run_file, "--resume", check=2)
    assert says in done.stderr
    assert f"--change records.{key}" in done.stderr
    assert contents(tmp_path / "run") == before
    tandem("train", run_file, "--resume", "--change", f"records.{key}")


@pytest.mark.parametrize("kind", ["rows", "reward", "eos"])
def test_a_resumed_run_refuses_changed_rows_rewards_and_models(world, run_file, tmp_path, kind):
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(prompt, response, **row):\n    return len(response) % 2\n")
    run = ("train", run_file, f"reward.function={judge}:reward")
    tandem(*run, "steps=2")
    if kind == "rows":
        rows = tmp_path / "rows.jsonl"
        rows.write_text(rows.read_text().replace('"answer": "w2"', '"answer": "w9"'))
        key = "inputs.data"
    elif kind == "reward":
        judge.write_text(judge.read_text() + "# changed\n")
        key = "inputs.reward"
    else:
        world.eos_token_ids = [3]
        key = "servers.models.senior.eos_token_ids"
    assert key in tandem(*run, "--resume", check=2).stderr
    changes = [key] if kind != "eos" else ["servers.models"]
    tandem(*run, "--resume", *(f"--change={one}" for one in changes))


def test_a_run_directory_that_cannot_be_made_is_named(run_file, tmp_path):
    done = tandem("train", run_file, f"run_dir={tmp_path / 'rows.jsonl' / 'run'}", check=2)
    assert "run_dir: " in done.stderr
    assert "Not a directory" in done.stderr


def test_dry_run_refuses_to_resume_and_clean_at_once(run_file):
    done = tandem("train", run_file, "--dry-run", "--resume", "--clean", check=2)
    assert "cannot be combined" in done.stderr


def test_a_resumed_run_keeps_its_configuration(run_file):
    tandem("train", run_file, "steps=1")
    done = tandem("train", run_file, "--resume", "seed=3", check=2)
    assert "changed: seed (0 -> 3)" in done.stderr
    tandem("train", run_file, "--resume", "seed=3", "steps=2", "--change", "seed")


def test_a_resumed_run_keeps_drafts_that_change_responses(run_file):
    def load(*drafts):
        overrides = [f"speculative.{one}" for one in drafts]
        return loading.load(RunSettings, run_file, overrides)

    rejection = "acceptance_rule=rejection_sampling"
    opened(load())
    opened(load("method=ngram", "num_speculative_tokens=3"), resume=True)
    with pytest.raises(RunDirectoryError, match=r"speculative.acceptance_rule \(exact -> rej"):
        opened(load("method=ngram", rejection), resume=True)
    # Without drafts there is nothing to accept.
    opened(load(rejection), resume=True)
    opened(load("method=ngram", rejection), clean=True)
    opened(load("method=ngram", rejection), resume=True)
    with pytest.raises(RunDirectoryError, match=r"speculative.num_speculative_tokens \(5 -> 3\)"):
        opened(load("method=ngram", rejection, "num_speculative_tokens=3"), resume=True)
    with pytest.raises(RunDirectoryError, match=r"speculative.method \(ngram -> none\)"):
        opened(load(), resume=True)
    opened(load(), resume=True, changes=["speculative"])


def test_settings_are_compared_as_values(run_file, tmp_path):
    learning_rate = "cluster.trainer.optimizer.learning_rate"
    written = yaml.safe_load(run_file.read_text())
    written["cluster"] = {"rollout": {}, "trainer": {"optimizer": {"learning_rate": "RATE"}}}
    text = yaml.safe_dump(written).replace("RATE", "1e-3")
    run_file.write_text(text)

    def load(*overrides):
        return loading.load(RunSettings, run_file, overrides)

    opened(load())
    opened(load(f"{learning_rate}=0.001", "sampling.temperature=1"), resume=True)
    with pytest.raises(RunDirectoryError, match=r"learning_rate \(0\.001 -> 0\.002\)"):
        opened(load(f"{learning_rate}=2e-3"), resume=True)
    # An earlier version recorded unset settings as null, and had fewer settings.
    recorded = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(recorded.read_text())
    values["sampling"] = {"temperature": None, "max_tokens": 6}
    recorded.write_text(yaml.safe_dump(values))
    opened(load(), resume=True)


def test_change_names_settings_or_sections_of_a_resumed_run(run_file):
    tandem("train", run_file, "steps=1")
    resume = ["train", run_file, "--resume", "steps=2", "seed=3"]
    done = tandem(*resume, "--change", "seed", "--change", "nonsense.key", check=2)
    assert "--change nonsense.key: the run has no such setting" in done.stderr
    done = tandem(*resume, "--change", "sed", check=2)
    assert "--change sed: the run has no such setting; did you mean 'seed'?" in done.stderr
    done = tandem("train", run_file, "--clean", "--change", "seed", check=2)
    assert "--change only applies with --resume" in done.stderr
    batch = "batch.samples_per_prompt=3"
    # A section stands for all of its settings.
    tandem(*resume, batch, "--change", "batch", "--change", "servers.models", "--change", "seed")


def opened(config, **options):
    """Opens the run directory of `config`; a new run records one step."""
    with RunDirectory.open(config, "train", **options) as run:
        run.begin()
        if run.state is None:
            run.write_version(1, server_pb2.WeightsVersion(version=1))
            run.write_metrics({"step": 1})
            run.write_state(SavedState(1, 1, "checkpoints/step_000001"))


def test_a_resumed_run_keeps_what_its_cluster_learns_with(run_file):
    def config(**trainer):
        cluster = {"rollout": {"senior_model": "/m"}, "trainer": {"model": "/m"} | trainer}
        config = loading.load(RunSettings, run_file)
        config.cluster = loading.validate(ClusterSettings, cluster, "test")
        return config

    opened(config(optimizer={"learning_rate": 1e-3}, server={"grpc_port": 7}))
    opened(config(optimizer={"learning_rate": 1e-3}, compute={"num_threads": 2}), resume=True)
    key = "cluster.trainer.optimizer.learning_rate"
    with pytest.raises(RunDirectoryError, match=rf"changed: {key} \(0\.001 -> 0\.5\)"):
        opened(config(optimizer={"learning_rate": 0.5}), resume=True)
    opened(config(optimizer={"learning_rate": 0.5}), resume=True, changes=[key])


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_temporary_file(run_file, tmp_path):
    train = f"{sys.executable} -m tandem train {run_file} sampling.max_tokens=60 steps=9"
    command = f"ulimit -f 6; exec {train}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    # Another start may find room: the user has nothing to correct.
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("tandem: ")]
    # The trajectories do not fit either, but no run ends by that.
    first = f"{tmp_path}/run/trajectories/step_1.parquet"
    assert f"warning: {first} could not be written: File too large; the run con" in done.stdout
    assert f"{tmp_path}/run/metrics.jsonl: File too large" in line
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_file_that_cannot_be_replaced_keeps_its_text(tmp_path, monkeypatch):
    file = tmp_path / "state.json"
    file.write_text("before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=f"^{file}: No space left on device$"):
        atomic_files.write_atomically(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.read_text() == "before"


def test_a_start_that_fails_leaves_no_directory_and_no_parent_of_it(run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'a' / 'b'}", "data.jsonl=/none", check=2)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    tandem("train", run_file, f"run_dir={tmp_path / 'a' / 'b'}", "data.jsonl=/none", check=2)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_used_directory_is_refused_and_foreign_files_are_never_removed(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    assert "--resume" in tandem("train", run_file, "steps=1", check=2).stderr
    tandem("train", run_file, "steps=1", "--clean")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    tandem("train", run_file, f"run_dir={foreign}", "--clean", check=2)
    assert (foreign / "thesis.tex").exists()
    config = loading.load(RunSettings, run_file)
    with RunDirectory.open(config, "train", clean=True):
        assert "in use" in tandem("train", run_file, "--resume", check=1).stderr
