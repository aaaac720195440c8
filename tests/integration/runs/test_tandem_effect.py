"""The experiment of examples/tandem_effect: its gate, its statistics, and a run of it in small."""

from __future__ import annotations

import json
import sys

import harness
import pytest

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
        experiment.check_gate(folder)
    else:
        with pytest.raises(SystemExit, match=says):
            experiment.check_gate(folder)


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


@pytest.mark.slow
def test_the_experiment_reports_what_its_runs_recorded(experiment, tmp_path, monkeypatch, capsys):
    def leave_untrained(folder):
        for name in ("senior", "junior"):
            (folder / name).symlink_to(folder / f"{name}-blank")

    whole = experiment.settings_of
    small = ["steps=2", "eval.every=1", "eval.data.limit=4", "reward.correct_at=-9"]
    monkeypatch.setattr(experiment, "pretrain", leave_untrained)
    monkeypatch.setattr(experiment, "check_gate", lambda folder: None)
    monkeypatch.setattr(experiment, "settings_of", lambda *one: [*whole(*one), *small])
    experiment.main(2, ["solo", "tandem", "kl-0.2"], jobs=2)
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
