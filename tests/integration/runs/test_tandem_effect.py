"""The experiment of examples/tandem_effect: its gate, its statistics, and a run of it in small."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import demo
import harness
import pytest
import yaml

EXAMPLE = harness.REPOSITORY / "examples/tandem_effect"


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The module, with its runs in a folder of the test."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import experiment

    monkeypatch.setattr(experiment, "RUNS", tmp_path)
    yield experiment
    for name in ("experiment", "make", "report"):
        sys.modules.pop(name, None)


def gate_of(**changes):
    """A gate that lets the experiment begin, with changes."""
    found = {"same_model": False, "accuracy": 1.0, "sign": 1} | changes
    return {
        "same_model": found["same_model"],
        "authors": {"junior": {"accuracy": found["accuracy"]}},
        "patterns": {"code": {"favour": {"sign": found["sign"]}}},
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"same_model": True}, "seed-0: the junior is a copy of the senior"),
        ({"accuracy": 0.9}, "seed-0: the junior solves too few problems alone"),
        ({"sign": 0}, "seed-0: the reward does not favour the code"),
        ({"sign": -1}, "seed-0: the reward does not favour the code"),
    ],
)
def test_the_gate_ends_an_experiment_that_can_show_nothing(experiment, tmp_path, changes, says):
    folder = tmp_path / "seed-0"
    folder.mkdir()
    (folder / "gate.json").write_text(json.dumps(gate_of(**changes)))
    if says is None:
        experiment.check_gate(experiment.TOY, folder)
    else:
        with pytest.raises(SystemExit, match=says):
            experiment.check_gate(experiment.TOY, folder)


@pytest.mark.parametrize(
    ("above", "below", "p"), [(8, 0, 2 / 256), (7, 1, 18 / 256), (4, 4, 1.0), (0, 0, 1.0)]
)
def test_the_sign_test_is_two_sided(experiment, above, below, p):
    assert experiment.report.sign_test(above, below) == pytest.approx(p)


def test_the_solutions_are_right_in_every_dialect(experiment):
    digits = [3, 4, 5, 1]
    make = experiment.make
    assert make.solution(digits, "S") == "c7 c2 c3 # d3"
    assert make.solution(digits, "R") == "w7 w2 w3 # d3"
    assert make.solution(digits, "V") == (
        "w3 plus w4 is w7 . w7 plus w5 is w2 . w2 plus w1 is w3 . # d3"
    )


@pytest.mark.parametrize("task", ["two-dialects", "three-dialects", "smollm2"])
def test_the_models_of_a_seed_learn_rows_that_the_task_makes(
    experiment, tmp_path, monkeypatch, task
):
    def run(what, command, *arguments):
        commands.append((command, *arguments))
        if command == "export":
            arguments[1].mkdir(parents=True)
        else:
            settings = dict(word.split("=", 1) for word in map(str, arguments) if "=" in word)
            assert Path(settings["data.jsonl"]).is_file()
            assert Path(settings["cluster.model"]).is_dir()
            Path(settings["run_dir"]).mkdir()

    commands = []
    monkeypatch.setattr(experiment, "tandem", run)
    chosen = experiment.TASKS[task]
    chosen.make(tmp_path, 1)
    if task == "smollm2":
        models = {"junior": dataclasses.replace(chosen.models["junior"], start=tmp_path)}
        chosen = dataclasses.replace(chosen, models=chosen.models | models)
    for _ in range(2):
        experiment.teach(chosen, tmp_path)
    assert [one[0] for one in commands] == ["sft", "export"] * 2
    assert {"train.jsonl", "held_out.jsonl"} <= {one.name for one in tmp_path.iterdir()}


def test_the_models_of_smollm2_are_those_of_the_demo(experiment):
    task = experiment.TASKS["smollm2"]
    default = yaml.safe_load(task.teach.read_text())["steps"]
    taught = {
        name: (
            model.start,
            model.rows,
            int(dict(one.split("=") for one in model.settings).get("steps", default)),
        )
        for name, model in task.models.items()
    }
    assert taught == demo.TAUGHT


@pytest.mark.slow
def test_the_experiment_reports_what_its_runs_recorded(experiment, tmp_path, monkeypatch, capsys):
    def leave_untrained(task, folder):
        for name in ("senior", "junior"):
            (folder / name).symlink_to(folder / f"{name}-blank")

    whole = experiment.settings_of
    small = ["steps=2", "eval.every=1", "eval.data.limit=4", "reward.correct_at=-9"]
    monkeypatch.setattr(experiment, "teach", leave_untrained)
    monkeypatch.setattr(experiment, "check_gate", lambda task, folder: None)
    monkeypatch.setattr(experiment, "settings_of", lambda *one: [*whole(*one), *small])
    experiment.main(experiment.TOY, 2, ["solo", "tandem", "kl-0.2"], jobs=2)
    results = json.loads((tmp_path / "tandem_effect/results.json").read_text())
    for arm, runs in results.items():
        for seed, found in enumerate(runs):
            run = tmp_path / f"tandem_effect/seed-{seed}" / arm
            evaluations = harness.json_lines(run / "evals.jsonl")
            last = {one["mode"]: one for one in evaluations if one["step"] == 2}
            assert found["takeover accuracy"] == last["junior_takeover"]["accuracy"]
            assert found["share of code"] == last["solo"]["pattern/code"]
            steps = harness.json_lines(run / "metrics.jsonl")
            trained = sum(one["policy/weighted_tokens"] for one in steps)
            assert found["tokens in the loss"] == trained
            alone = trained == sum(one["tokens/response"] for one in steps)
            assert alone == (arm != "tandem")
            assert any(one["loss/kl"] for one in steps) == (arm == "kl-0.2")
    assert (tmp_path / "tandem_effect/curves.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "means of 2 seeds" in shown
    assert "difference from solo, by seed" in shown
