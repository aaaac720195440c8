"""wandb and mlflow as trackers, with stand-ins that record the calls to the libraries.

The stand-ins have the signatures of wandb 0.31 and mlflow 3.17, as far as they are used.
"""

import sys
from types import SimpleNamespace

import pytest
from commands import lines, tandem


class FakeWandb:
    """A stand-in for the module wandb and for its run."""

    def __init__(self):
        self.inits, self.logged, self.finished = [], [], 0

    def init(self, *, project, id, name, resume, config, dir):
        self.inits.append((project, id, name, resume, config["steps"], dir))
        return self

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


class FakeMLflow:
    """A stand-in for the module mlflow and for its client."""

    def __init__(self):
        self.runs, self.metrics, self.dicts, self.ended = {}, [], [], 0
        self.failure = None

    def MlflowClient(self):  # noqa: N802
        return self

    def set_experiment(self, name):
        self.experiment = name
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments, query, *, max_results):
        assert (experiments, max_results) == (["7"], 1)
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=number))
            for number, tags in self.runs.items()
            if query == f"tags.`tandem.run_id` = '{tags['tandem.run_id']}'"
        ]

    def create_run(self, experiment, *, tags, run_name):
        number = f"mlflow-{len(self.runs)}"
        self.runs[number] = tags | {"name": run_name}
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def update_run(self, number, status):
        assert (number in self.runs, status) == (True, "RUNNING")

    def log_dict(self, number, config, file):
        self.dicts.append((number, config["steps"], file))

    def log_metric(self, number, name, value, *, step):
        if self.failure:
            raise self.failure
        self.metrics.append((number, name, value, step))

    def set_terminated(self, number):
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    return sys.modules["wandb"]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    return sys.modules["mlflow"]


def numbers_of(file):
    """(step, key, number) of a file of lines."""
    return {
        (line["step"], key, value)
        for line in lines(file)
        for key, value in line.items()
        if value is not None and key != "step"
    }


def test_every_tracker_gets_every_number_and_a_resumed_run_goes_on(
    run_file, tmp_path, wandb, mlflow, monkeypatch
):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    trackers = "trackers=[wandb, mlflow]"
    tandem("train", run_file, trackers, "steps=2", "eval.every=2")
    tandem("train", run_file, trackers, "steps=3", "eval.every=2", "--resume")
    run = tmp_path / "run"
    recorded = numbers_of(run / "metrics.jsonl")
    by_wandb = {
        (one["step"], key, value)
        for one in wandb.logged
        for key, value in one.items()
        if key != "step" and not key.startswith("eval/")
    }
    assert by_wandb == recorded
    assert {(step, name, value) for _, name, value, step in mlflow.metrics} >= recorded
    evaluations = [one for one in wandb.logged if "eval/solo/accuracy" in one]
    assert [one["step"] for one in evaluations] == [0, 2, 3]
    # Both starts log to the same run of the tracker.
    [first, second] = wandb.inits
    assert first[:4] == ("tandem", first[1], "run", "allow")
    assert (second[1], first[4], second[4]) == (first[1], 2, 3)
    assert mlflow.experiment == "mine"
    assert list(mlflow.runs) == ["mlflow-0"]
    assert mlflow.dicts == [("mlflow-0", 2, "config.yaml"), ("mlflow-0", 3, "config.yaml")]
    assert (wandb.finished, mlflow.ended) == (2, 2)
    assert not (run / "tensorboard").exists()


def test_without_its_package_a_tracker_is_refused_before_anything_starts(
    run_file, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = tandem("train", run_file, "trackers=[wandb]", check=2)
    assert "trackers: wandb: the package wandb is not installed" in done.stderr
    assert "pip install wandb" in done.stderr
    assert not (tmp_path / "run").exists()
    done = tandem("train", run_file, "trackers=[comet]", check=2)
    assert "must be tensorboard, wandb or mlflow" in done.stderr


def test_a_tracker_that_fails_ends_the_run_which_can_go_on(run_file, tmp_path, mlflow):
    mlflow.failure = RuntimeError("the tracking server is away")
    done = tandem("train", run_file, "trackers=[mlflow]", check=1)
    assert "trackers: mlflow: RuntimeError: the tracking server is away" in done.stderr
    assert "saved after step 1, --resume goes on from there" in done.stderr
    tandem("train", run_file, "trackers=[]", "--resume")
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
