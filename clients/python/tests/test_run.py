"""Whole runs against fake servers, through the command line."""

import json
import subprocess
import sys

import pytest

from tandem import settings
from tandem.metrics import CLOCK_KEYS, KEYS
from tandem.run_dir import RunDirectory
from tandem.settings import RunSettings


def tandem(*arguments, check=0):
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == check, done.stderr + done.stdout
    return done


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_clock(metrics):
    return [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in metrics]


def test_train_writes_a_complete_run_directory(run_file, tmp_path):
    shown = tandem("train", run_file)
    assert "who" not in shown.stderr
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
    assert (tmp_path / "parted" / "logs" / "attempt_2.log").exists()


def test_a_resumed_run_keeps_its_configuration(run_file):
    tandem("train", run_file, "steps=1")
    done = tandem("train", run_file, "--resume", "seed=3", check=2)
    assert "changed: seed" in done.stderr


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
    assert world.calls == []


def test_sft_sends_answers_with_the_end_of_sequence(world, run_file, tmp_path):
    tandem("sft", run_file, "steps=2", "sft.batch_size=5")
    assert [header.num_samples for header in world.headers] == [5, 5]
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["tokens/response"] == 10


def test_eval_reports_accuracy_and_pass_at_k(run_file):
    arguments = ["eval.samples=4", "eval.k=[1, 4]", "eval.temperature=1.0"]
    out = json.loads(tandem("eval", run_file, *arguments, "--json").stdout)
    assert out["prompts"] == 20
    assert out["pass_at"]["1"] == pytest.approx(out["accuracy"])
    assert "not available yet" in tandem("eval", run_file, "--mode", "handoff", check=2).stderr


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
    tandem("health", address)
    tandem("health", "127.0.0.1:1", check=3)
    status = tandem("status", "--rollout", address, "--trainer", address, "--critic", "127.0.0.1:1")
    assert "SERVING" in status.stdout
    error = tandem("generate", "x", "--rollout", "127.0.0.1:1", "--json", check=3).stderr
    assert json.loads(error)["code"] == "UNAVAILABLE"


def test_usage_errors_exit_with_2(run_file):
    tandem("train", check=2)
    tandem("train", "/does/not/exist.yaml", check=2)
    assert "did you mean 'steps'" in tandem("train", run_file, "stepz=1", check=2).stderr
