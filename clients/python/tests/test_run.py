"""Whole runs against fake servers, through the command line."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
from commands import lines, tandem

from tandem import __version__ as tandem_version
from tandem import demo, run_dir, run_files, running_clusters, settings
from tandem.checkpoints import SavedState
from tandem.errors import RunDirectoryError
from tandem.metrics import CLOCK_KEYS, KEYS
from tandem.models import ImportedModel
from tandem.render import Output
from tandem.run_dir import RunDirectory
from tandem.settings import RunSettings


def contents(directory):
    """Every file but the logs, with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


def without_clock(metrics):
    return [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in metrics]


def test_train_writes_a_complete_run_directory(run_file, tmp_path):
    tandem("train", run_file)
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert [tuple(line) for line in metrics] == [KEYS] * 4
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["version/senior"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[0]["policy/grad_norm"] is None  # not finite
    assert metrics[0]["loss/policy"] is None  # not reported
    records = lines(run / "trajectories" / "step_2.jsonl")
    assert len(records) == 6
    assert {record["senior_versions"][0][0] for record in records} == {1}
    assert len({record["seed"] for record in records}) == 3
    assert (run / "logs" / "attempt_1.log").exists()
    assert settings.load(RunSettings, run / "config.yaml") == settings.load(RunSettings, run_file)


def test_the_same_seed_gives_the_same_run(world, run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'a'}")
    world.version = world.published = 0
    tandem("train", run_file, f"run_dir={tmp_path / 'b'}")
    a, b = (without_clock(lines(tmp_path / name / "metrics.jsonl")) for name in "ab")
    assert a == b
    for step in range(1, 5):
        name = f"trajectories/step_{step}.jsonl"
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_resume_goes_on_exactly(world, run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    parted = f"run_dir={tmp_path / 'parted'}"
    tandem("train", run_file, parted, "steps=2")
    # A crash after the checkpoint: what was written since is forgotten.
    with (tmp_path / "parted" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n{"ste')
    tandem("train", run_file, parted, check=2)
    tandem("train", run_file, parted, "--resume")
    whole, both = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parted"))
    assert without_clock(whole) == without_clock(both)
    # Two starts got as far as their first step.
    assert len(list((tmp_path / "parted" / "logs").iterdir())) == 2


def test_a_run_directory_can_be_moved(world, run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    world.saved = {str(moved / "checkpoints" / Path(p).name): v for p, v in world.saved.items()}
    tandem("train", run_file, "--resume", f"run_dir={moved}")
    assert [line["step"] for line in lines(moved / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads((moved / "state.json").read_text())["trainer"] == "checkpoints/step_000004"


def test_the_time_of_a_run_goes_on_when_it_is_resumed(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    [first] = lines(metrics)
    metrics.write_text(json.dumps(first | {"time_seconds": 1000.0}) + "\n")
    tandem("train", run_file, "steps=2", "--resume")
    assert 1000 < lines(metrics)[1]["time_seconds"] < 2000


def test_nothing_is_lost_when_a_server_is_unreachable(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    before = contents(run)
    nobody = "servers.trainer=127.0.0.1:1"
    tandem("train", run_file, "steps=3", "--clean", nobody, check=3)
    tandem("train", run_file, "steps=3", "--resume", nobody, check=3)
    assert contents(run) == before
    fresh = tmp_path / "fresh"
    tandem("train", run_file, f"run_dir={fresh}", nobody, check=3)
    assert not fresh.exists()
    tandem("train", run_file, f"run_dir={fresh}")


def test_a_resumed_run_forgets_nothing_before_its_checkpoint_is_loaded(world, run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    before = contents(run)
    saved, world.saved = world.saved, {}
    tandem("train", run_file, "--resume", check=1)
    assert contents(run) == before
    world.saved = saved
    tandem("train", run_file, "--resume")
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_stops_at_once_and_loses_nothing(
    world, run_file, tmp_path, monkeypatch, number
):
    tandem("train", run_file, "steps=1")
    before = contents(tmp_path / "run")
    waiting, done = threading.Event(), threading.Event()

    def hold(method, context):
        waiting.set()
        done.wait(60)

    monkeypatch.setattr(world, "enter", hold)
    process = subprocess.Popen([sys.executable, "-m", "tandem", "train", run_file, "--clean"])
    try:
        assert waiting.wait(60)
        process.send_signal(number)
        assert process.wait(30) == 130
    finally:
        process.kill()
        done.set()
    assert contents(tmp_path / "run") == before


def test_a_demo_that_is_interrupted_before_its_training_loses_nothing(run_file, monkeypatch):
    def interrupted(session):
        raise KeyboardInterrupt

    config = settings.load(RunSettings, run_file)
    with demo.open_run(config) as run:
        run.begin()
        run.write_metrics({"step": 1})
    before = contents(run.path)
    model = ImportedModel(config.tokenizer, "", parameters=1, already_there=True)
    monkeypatch.setattr(demo, "import_model", lambda *_: model)
    monkeypatch.setattr(demo, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(config, Output())
    assert contents(run.path) == before


def test_a_demo_ends_with_what_changed(run_file, monkeypatch, capsys):
    config = settings.load(RunSettings, run_file)
    model = ImportedModel(config.tokenizer, "", parameters=1, already_there=True)
    monkeypatch.setattr(demo, "import_model", lambda *_: model)
    assert demo.run_demo(config, Output()) == 0
    shown = capsys.readouterr().out
    assert "before training\t0.0%\t0.0% to 16.1%\nafter training\t0.0%" in shown
    assert "Step 4: senior, [junior]\nreward\tprompt\tresponse\n" in shown


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("cut_at", ["run.json", "config.yaml"])
def test_a_start_that_was_cut_off_is_no_foreign_directory(run_file, monkeypatch, clean, cut_at):
    config = settings.load(RunSettings, run_file)
    if clean:
        with RunDirectory.open(config, "train") as run:
            run.begin()
        (run.path / "notes.txt").write_text("x")
    write = run_dir.write_atomically

    def cut_off(path, text):
        if path.name != cut_at:
            return write(path, text)
        path.with_name(f".{path.name}.tmp").write_text(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(run_dir, "write_atomically", cut_off)
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
        ("run.json", '{"kind": "train"}', "run.json: run_id: not a string"),
        ("config.yaml", None, "config.yaml: No such file"),
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("config.yaml", "run_dir: 2024-13-45", "config.yaml: not YAML"),
        ("config.yaml", "7", "config.yaml: the file must be a mapping"),
        ("metrics.jsonl", '{"step": 1}\n{"st\n', "metrics.jsonl:2: not JSON"),
        ("metrics.jsonl", "{}\n", "metrics.jsonl:1: step: not an integer"),
        ("evals.jsonl", "7\n", "evals.jsonl:1: not a JSON object"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(run_file, tmp_path, name, text, says):
    config = settings.load(RunSettings, run_file)
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


def test_a_disk_that_takes_no_events_is_named(run_file, monkeypatch):
    def add(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunDirectory.open(settings.load(RunSettings, run_file), "train") as run:
        run.begin()
        monkeypatch.setattr(run._events, "add", add)
        for write in (run.write_metrics, run.write_eval):
            with pytest.raises(RunDirectoryError, match="No space left"):
                write({"step": 1})


def test_clean_leaves_logs_and_what_no_run_wrote(run_file, tmp_path):
    tandem("train", run_file)
    (tmp_path / "run" / "notes.txt").write_text("x")
    tandem("train", run_file, "--clean", "steps=1")
    run = tmp_path / "run"
    assert (run / "notes.txt").exists()
    assert not (run / "trajectories" / "step_2.jsonl").exists()
    assert {file.name for file in (run / "logs").iterdir()} == {"attempt_1.log", "attempt_2.log"}


def test_the_checkpoint_of_state_json_survives_the_pruning_of_the_next_save(world, run_file):
    tandem("train", run_file, "steps=1", "checkpoint.keep=1")
    tandem("train", run_file, "steps=1", "checkpoint.keep=0", "--clean")
    # The one to keep and the one that state.json still names; 0 keeps all.
    assert world.keeps == [2, 0]


def test_a_resumed_run_forgets_checkpoints_that_state_json_does_not_name(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    folder = tmp_path / "run" / "checkpoints"
    # A crash between the save and state.json; the fake servers write no files.
    for name in ("step_000002", "step_000009", "critic/step_000009", "mine"):
        (folder / name).mkdir(parents=True)
    tandem("train", run_file, "steps=3", "--resume")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {
        "step_000002",
        "critic",
        "mine",
    }


def test_a_demo_replaces_a_demo_alone(run_file):
    config = settings.load(RunSettings, run_file)
    for _ in range(2):
        with demo.open_run(config) as run:
            run.begin()
    assert {file.name for file in (run.path / "logs").iterdir()} == {
        "attempt_1.log",
        "attempt_2.log",
    }
    tandem("train", run_file, "steps=1", "--clean")
    with pytest.raises(RunDirectoryError, match="kind train"):
        demo.open_run(config)
    assert (run.path / "metrics.jsonl").read_text()


def test_a_run_directory_that_cannot_be_made_is_named(run_file, tmp_path):
    done = tandem("train", run_file, f"run_dir={tmp_path / 'rows.jsonl' / 'run'}", check=2)
    assert "run_dir: " in done.stderr
    assert "Not a directory" in done.stderr


def test_dry_run_refuses_to_resume_and_clean_at_once(run_file):
    done = tandem("train", run_file, "--dry-run", "--resume", "--clean", check=2)
    assert "exclude each other" in done.stderr


def test_a_row_without_the_field_to_learn_is_named(run_file):
    done = tandem("sft", run_file, "sft.response='{reply}'", check=2)
    assert "sft.response: '{reply}'" in done.stderr
    assert "the fields prompt, answer" in done.stderr


def test_a_text_to_learn_that_no_server_holds_is_named_before_anything_is_written(
    world, run_file, tmp_path
):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "w1 w2", "answer": "w3 w4 w5"}\n')
    world.max_model_len = 5
    done = tandem("sft", run_file, check=2)
    said = f"sft.response: {tmp_path}/rows.jsonl:21: prompt and response have 6 tokens"
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_configuration(run_file):
    tandem("train", run_file, "steps=1")
    done = tandem("train", run_file, "--resume", "seed=3", check=2)
    assert "changed: seed (0 -> 3)" in done.stderr
    tandem("train", run_file, "--resume", "seed=3", "steps=2", "--change", "seed")


def opened(config, **options):
    with RunDirectory.open(config, "train", **options) as run:
        run.begin()
        if run.state is None:
            run.write_state(SavedState(1, 1, "checkpoints/step_000001"))


def test_a_resumed_run_keeps_what_its_cluster_learns_with(run_file):
    def config(**trainer):
        cluster = {"rollout": {"senior_model": "/m"}, "trainer": {"model": "/m"} | trainer}
        config = settings.load(RunSettings, run_file)
        config.cluster = settings.validate(settings.ClusterSettings, cluster, "test")
        return config

    opened(config(optimizer={"learning_rate": 1e-3}, server={"grpc_port": 7}))
    opened(config(optimizer={"learning_rate": 1e-3}, compute={"num_threads": 2}), resume=True)
    key = "cluster.trainer.optimizer.learning_rate"
    with pytest.raises(RunDirectoryError, match=rf"changed: {key} \(0\.001 -> 0\.5\)"):
        opened(config(optimizer={"learning_rate": 0.5}), resume=True)
    opened(config(optimizer={"learning_rate": 0.5}), resume=True, changes=[key])


def test_a_run_that_is_done_starts_nothing(world, run_file):
    tandem("train", run_file, "steps=2")
    world.calls.clear()
    done = tandem("train", run_file, "steps=2", "--resume")
    assert "all steps are done" in done.stdout
    assert world.calls == []


def test_resume_auto_goes_on_where_there_is_something_to_go_on_with(world, run_file, tmp_path):
    tandem("train", run_file, "--resume", "auto", "steps=2")
    tandem("train", "--resume=auto", run_file, "steps=3")
    assert [header.step for header in world.headers] == [1, 2, 3]
    # A run that was cut off before its first checkpoint begins again.
    (tmp_path / "run" / "state.json").unlink()
    tandem("train", "--resume", "auto", run_file, "steps=1")
    assert [header.step for header in world.headers] == [1, 2, 3, 1]
    (tmp_path / "run" / "state.json").unlink()
    assert "kind train" in tandem("sft", run_file, "--resume", "auto", check=2).stderr


def test_a_run_saves_every_so_often_by_default(run_file, tmp_path):
    every = settings.load(RunSettings, run_file).checkpoint.every
    tandem("train", run_file, f"steps={every + 1}", "checkpoint.at_end=false")
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == every


JUDGE = """
import itertools
calls = itertools.count(1)
def reward(prompt, response, **row):
    if next(calls) > {calls}:
        raise ValueError("no more")
    return 1.0
"""


def test_a_run_that_fails_saves_the_steps_before_and_says_what_to_do(world, run_file, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE.format(calls=15))
    done = tandem("train", run_file, f"reward.function={judge}:reward", check=2)
    assert "no more" in done.stderr
    assert "in step 3: saved after step 2, --resume goes on from there" in done.stderr
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 2
    judge.write_text(JUDGE.format(calls=100))
    tandem("train", run_file, f"reward.function={judge}:reward", "--resume")
    assert [header.step for header in world.headers] == [1, 2, 3, 4]


def test_a_step_that_could_not_be_published_is_saved(world, run_file, tmp_path, monkeypatch):
    enter = world.enter

    def refuse(method, context):
        if method == "PublishWeights" and world.version == 2:
            world.failures = [fakes.error_status(3, "no")]
        enter(method, context)

    monkeypatch.setattr(world, "enter", refuse)
    done = tandem("train", run_file, check=1)
    assert "in step 2: saved after step 2" in done.stderr
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_nothing_is_saved_for_a_step_that_the_trainer_did_not_do_last(
    world, run_file, tmp_path, monkeypatch
):
    enter = world.enter

    def lose(method, context):
        if method == "TrainStep" and world.version == 2:
            world.version = 3
            world.failures = [fakes.error_status(3, "lost")]
        enter(method, context)

    monkeypatch.setattr(world, "enter", lose)
    done = tandem("train", run_file, "checkpoint.every=1", check=1)
    assert "in step 3: saved after step 2" in done.stderr
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 2
    monkeypatch.undo()
    world.version = world.published = 0
    monkeypatch.setattr(world, "enter", lose)
    done = tandem("train", run_file, "--clean", check=1)
    assert "there is no checkpoint yet" in done.stderr
    assert "holds version 3 with digest d, not the run's version 2" in done.stderr


def test_a_full_disk_is_one_line_and_leaves_no_temporary_file(run_file, tmp_path):
    command = (
        f"ulimit -f 3; exec {sys.executable} -m tandem train {run_file} sampling.max_tokens=60"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("tandem: ")]
    assert f"{tmp_path}/run/trajectories/step_1.jsonl: File too large" in line
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    file = tmp_path / "state.json"
    file.write_text("before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=f"^{file}: No space left on device$"):
        run_files.write_atomically(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.read_text() == "before"


def test_a_start_that_fails_leaves_no_directory_and_no_parent_of_it(run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'a' / 'b'}", "data.jsonl=/none", check=2)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    tandem("train", run_file, f"run_dir={tmp_path / 'a' / 'b'}", "data.jsonl=/none", check=2)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_moved_tokenizer_can_be_named(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    (tmp_path / "model").rename(tmp_path / "moved")
    tandem("show", tmp_path / "run", check=2)
    tandem("show", tmp_path / "run", "--tokenizer", tmp_path / "moved")


def test_a_used_directory_is_refused_and_foreign_files_are_never_removed(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    assert "--resume" in tandem("train", run_file, "steps=1", check=2).stderr
    tandem("train", run_file, "steps=1", "--clean")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    tandem("train", run_file, f"run_dir={foreign}", "--clean", check=2)
    assert (foreign / "thesis.tex").exists()
    config = settings.load(RunSettings, run_file)
    with RunDirectory.open(config, "train", clean=True):
        assert "in use" in tandem("train", run_file, "--resume", check=2).stderr


def test_dry_run_touches_nothing(world, run_file, tmp_path):
    out = tandem("train", run_file, "--dry-run", "--json").stdout
    assert json.loads(out)["derived"]["samples_per_step"] == 6
    assert not (tmp_path / "run").exists()
    assert {method for method, _ in world.calls} == {"GetServerInfo", "CheckObjective"}


def test_sft_sends_answers_with_the_end_of_sequence(world, run_file, tmp_path):
    tandem("sft", run_file, "steps=2", "sft.batch_size=5")
    assert [header.num_samples for header in world.headers] == [5, 5]
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["tokens/response"] == 10


def test_sft_without_an_end_of_sequence_is_refused_before_anything_is_written(run_file, tmp_path):
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    done = tandem("sft", run_file, "steps=1", check=2)
    assert f"sft.append_eos: {tmp_path / 'model'} names no end" in done.stderr
    assert not (tmp_path / "run").exists()
    tandem("sft", run_file, "steps=1", "sft.append_eos=false")


def test_eval_reports_accuracy_and_pass_at_k(run_file):
    arguments = ["eval.samples=4", "eval.k=[1, 4]", "eval.temperature=1.0"]
    out = json.loads(tandem("eval", run_file, *arguments, "--json").stdout)
    assert out["prompts"] == 20
    assert out["pass_at"]["1"] == pytest.approx(out["accuracy"])
    assert out["checkpoint"] is None
    assert "not available yet" in tandem("eval", run_file, "--mode", "handoff", check=2).stderr


def test_eval_of_a_checkpoint_and_of_the_last_one_of_a_run(world, run_file, tmp_path):
    run = tmp_path / "run"
    tandem("train", run_file, "checkpoint.every=2")
    world.published = 0
    out = json.loads(tandem("eval", run_file, "--checkpoint", run, "--json").stdout)
    assert out["checkpoint"] == str(run / "checkpoints" / "step_000004")
    assert out["version/senior"] == 4
    path = run / "checkpoints" / "step_000002"
    shown = tandem("eval", run_file, "--checkpoint", path).stdout
    assert f"senior version 2, from {path}" in shown
    assert "senior version 2, as served now" in tandem("eval", run_file).stdout
    (run / "state.json").unlink()
    assert "has no checkpoint" in tandem("eval", run_file, "--checkpoint", run, check=2).stderr


def test_objective_reaches_the_trainer(world, run_file):
    tandem("train", run_file, "steps=1", "objective.normalizer=all_tokens")
    assert world.headers[0].policy.normalizer == 1
    assert not world.headers[0].policy.HasField("clip_ratio_low")


def test_generate_score_health_status(address, run_file, tmp_path):
    model = ["--tokenizer", tmp_path / "model"]
    record = json.loads(
        tandem(
            "generate", "w1 w2", "--rollout", address, *model, "--json", "--strategy", "word"
        ).stdout
    )
    assert record["tandem"]["selection_strategy"] == "word"
    scores = json.loads(tandem("score", "w1 w2 w3", "--rollout", address, "--json").stdout)
    assert scores["scores"][0]["junior_nats_per_token"] == 2.0
    assert "tokens=3" in tandem("score", "w1 w2 w3", "--rollout", address).stdout
    tandem("health", address)
    assert "Connection refused" in tandem("health", "127.0.0.1:1", check=3).stdout
    status = tandem("status", "--rollout", address, "--trainer", address, "--critic", "127.0.0.1:1")
    assert "SERVING" in status.stdout
    wrong = tandem(
        "status", "--rollout", address, "--trainer", address, "--critic", address, "--json"
    )
    *_, critic = json.loads(wrong.stdout)["servers"]
    assert critic["problem"] == "not a critic server"
    error = tandem("generate", "x", "--rollout", "127.0.0.1:1", "--json", check=3).stderr
    assert json.loads(error)["code"] == "UNAVAILABLE"
    # A prompt is no option.
    error = tandem("generate", "--rollout", "127.0.0.1:1", "--", "--json", check=3).stderr
    assert error.startswith("tandem: ")


def test_generate_separates_responses_and_passes_its_options_on(address, run_file, tmp_path):
    common = ["--rollout", address, "--tokenizer", tmp_path / "model", "--max-tokens", 4]
    texts = {
        stream: tandem("generate", "w1 w2", "w3", *common, "--samples", 2, stream).stdout
        for stream in ("--stream", "--no-stream")
    }
    assert texts["--stream"] == texts["--no-stream"]
    lines = texts["--stream"].splitlines()
    assert lines[0] == "--- w1 w2 (sample 1 of 2) ---"
    assert [line for line in lines if line.startswith("--- ")][1:] == [
        "--- w1 w2 (sample 2 of 2) ---",
        "--- w3 (sample 1 of 2) ---",
        "--- w3 (sample 2 of 2) ---",
    ]
    assert len(lines) == 8
    assert "---" not in tandem("generate", "w1", *common).stdout
    options = ["--strategy", "chunk", "--chunk-size", 3, "--top-p", 0.5, "--top-k", 7]
    options += ["--min-p", 0.25, "--stop", "w5", "--stop", "w6", "--json"]
    record = json.loads(tandem("generate", "w1", *common, *options).stdout)
    assert record["tandem"]["chunk_size"] == 3
    sampling = record["sampling"]
    assert [sampling[key] for key in ("top_p", "top_k", "min_p")] == [0.5, 7, 0.25]
    done = tandem("generate", "w1", *common, "--stop", "w5 w6", check=2)
    assert "--stop 'w5 w6': not one token" in done.stderr


def test_rewards_that_fail_end_the_run_or_are_left_out(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def reward(prompt, response, **row):\n    return 1 / (len(response) % 3)\n"
    )
    function = f"reward.function={tmp_path}/judge.py:reward"
    done = tandem("train", run_file, function, check=2)
    assert "ZeroDivisionError" in done.stderr
    assert f"row: {tmp_path}/rows.jsonl:" in done.stderr
    done = tandem("train", run_file, function, "reward.on_error=skip", "--clean")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    failed = [line["reward/failed"] for line in metrics]
    assert 0 < sum(failed) < 24
    assert [header.num_samples for header in world.headers] == [6 - count for count in failed]
    step = 1 + next(i for i, count in enumerate(failed) if count)
    records = lines(tmp_path / "run" / "trajectories" / f"step_{step}.jsonl")
    assert sum(record["reward"] is None for record in records) == failed[step - 1]
    assert f"step {step}: the reward failed for {failed[step - 1]} of 6 responses" in done.stdout
    log = (tmp_path / "run" / "logs" / "attempt_2.log").read_text()
    assert log.count("ZeroDivisionError: ") >= sum(failed)


def test_a_step_whose_rewards_all_fail_ends_the_run(run_file, tmp_path):
    (tmp_path / "judge.py").write_text("def reward(prompt, response, **row):\n    return None\n")
    function = f"reward.function={tmp_path}/judge.py:reward"
    done = tandem("train", run_file, function, "reward.on_error=skip", check=2)
    assert "step 1: the reward failed for every response" in done.stderr


def test_runs_that_cannot_learn_are_told(run_file):
    settings = ["sampling.temperature=0", "batch.samples_per_prompt=1"]
    for dry_run in (["--dry-run"], []):
        shown = tandem("train", run_file, *settings, *dry_run).stdout
        assert "warning: this run cannot learn: sampling.temperature: 0" in shown
        assert "warning: this run cannot learn: batch.samples_per_prompt: 1" in shown
    # Nothing matches the rows' answers: no reward differs.
    assert shown.count("warning: after 3 steps all responses") == 1


def test_evaluations_in_a_run_are_printed_and_are_events(run_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = tandem("train", run_file, "eval.every=2").stdout
    assert [line for line in shown.splitlines() if "solo accuracy" in line] == [
        f"step {step}: solo accuracy 0.000 (95 % interval 0.000 to 0.161), pass@1 0.000; "
        "20 prompts, 1 sample each"
        for step in (2, 4)
    ]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [2, 4]


def test_a_prompt_that_no_server_holds_is_named_before_anything_is_written(
    world, run_file, tmp_path
):
    world.max_model_len = 2
    done = tandem("train", run_file, check=2)
    assert f"data: {tmp_path}/rows.jsonl:1: the prompt has 2 tokens" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_only_the_server_has_must_be_named(address, tmp_path):
    done = tandem("generate", "w1", "--rollout", address, check=2)
    assert f"--tokenizer: the server's model directory {tmp_path / 'model'}" in done.stderr


def test_show_prints_the_records_of_a_step(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    run = tmp_path / "run"
    shown = tandem("show", run, "--json", "--count", "2").stdout.splitlines()
    assert [json.loads(line) for line in shown] == lines(run / "trajectories" / "step_1.jsonl")[:2]
    assert tandem("show", run).stdout.splitlines()[1] == "reward\tprompt\tresponse"
    tandem("show", run, "--step", "7", check=2)
    model = (tmp_path / "model").rename(tmp_path / "moved")
    assert "tokenizer" in tandem("show", run, check=2).stderr
    tandem("show", run, "--tokenizer", model)


def test_version():
    assert tandem("--version").stdout == f"tandem {tandem_version}\n"


def test_ctrl_c_while_the_command_is_imported_is_no_traceback():
    # As if it came in the middle of the longest import.
    program = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["tandem", "status"]
runpy.run_module("tandem", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_commands_find_the_cluster_that_runs(address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    servers = [{"role": "rollout", "address": address}, {"role": "trainer", "address": address}]
    cluster = SimpleNamespace(
        settings=SimpleNamespace(directory=tmp_path),
        servers=[SimpleNamespace(describe=lambda server=server: server) for server in servers],
    )
    model = ["--tokenizer", tmp_path / "model"]
    fakes.write_tokenizer(tmp_path / "model")
    notes = []
    with running_clusters.announced(cluster, notes.append):
        tandem("generate", "w1", *model)
        tandem("score", "w1 w2", *model)
        shown = json.loads(tandem("status", "--json").stdout)["servers"]
        assert [(one["role"], one["address"]) for one in shown] == [
            ("rollout", address),
            ("trainer", address),
        ]
        other = tmp_path / "state" / "tandem" / "clusters" / "1.json"
        other.write_text("{}")
        with other.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            other.write_text(json.dumps({"directory": "/other", "servers": []}))
            said = tandem("generate", "w1", *model, check=2).stderr
        assert f"2 clusters run: /other, {tmp_path}" in said
        # The process that it belonged to has ended.
        tandem("generate", "w1", *model)
        assert not other.exists()
    assert (running_clusters.clusters(), notes) == ([], [])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").touch()
    with running_clusters.announced(cluster, notes.append):
        assert running_clusters.clusters() == []
    [note] = notes
    assert note.startswith("other commands do not find these servers: ")


def test_usage_errors_exit_with_2(run_file):
    tandem("train", check=2)
    tandem("train", "/does/not/exist.yaml", check=2)
    assert "did you mean 'steps'" in tandem("train", run_file, "stepz=1", check=2).stderr
