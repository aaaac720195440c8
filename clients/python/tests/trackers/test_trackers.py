"""wandb and mlflow as trackers, with stand-ins that record the calls to the libraries.

The stand-ins have the signatures of wandb 0.31 and mlflow 3.17, as far as they are used.
"""

import errno
import sys
import threading
from types import SimpleNamespace

import pytest
from commands import lines, tandem

from tandem.trackers import trackers
from tandem.trackers.event_file import EventFile


class FakeWandb:
    """A stand-in for the module wandb and for its run."""

    def __init__(self):
        self.inits, self.places, self.logged, self.finished = [], [], [], 0

    def init(self, *, project, entity, id, name, group, tags, resume, config, dir):
        self.inits.append((project, id, name, resume, config["steps"], dir))
        self.places.append((entity, group, tags))
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
        self.requests = 0
        self.failure = self.hang = None
        self.entities = SimpleNamespace(Metric=lambda *fields: fields)

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

    def log_batch(self, number, *, metrics):
        self.requests += 1
        if self.hang:
            self.hang.wait()
        if self.failure:
            raise self.failure
        self.metrics += [(number, name, value, step) for name, value, _, step in metrics]

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
    both = "trackers=[wandb, mlflow]"
    tandem("train", run_file, both, "steps=2", "eval.every=2")
    tandem("train", run_file, both, "steps=3", "eval.every=2", "--resume")
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
    assert wandb.places == [(None, None, [])] * 2


def test_a_run_has_the_place_that_it_names(run_file, tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "not this one")
    place = "wandb={project: mine, entity: us, name: first, group: small, tags: [a, b]}"
    tandem("train", run_file, "trackers=[wandb]", place, "steps=1")
    [init] = wandb.inits
    assert (init[0], init[2]) == ("mine", "first")
    assert wandb.places == [("us", "small", ["a", "b"])]


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


@pytest.fixture
def at_once(monkeypatch):
    """Makes the threads of trackers try again, and give up, at once."""
    monkeypatch.setattr(trackers, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "FLUSH_SECONDS", 0.2)


@pytest.mark.parametrize("failure", [RuntimeError("the server is away"), SystemExit(1)])
@pytest.mark.parametrize("part", ["log_batch", "set_experiment", "log_dict"])
def test_an_outage_of_a_tracker_costs_the_run_nothing(
    run_file, tmp_path, mlflow, at_once, monkeypatch, failure, part
):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(mlflow, part, fail)
    done = tandem("train", run_file, "trackers=[mlflow]")
    kind = type(failure).__name__
    assert done.stdout.count(f"trackers: mlflow: {kind}: {failure}: the run continues") == 1
    assert f"trackers: mlflow: {kind}: {failure}: it lacks 4 lines" in done.stdout
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert mlflow.metrics == []


def test_a_tracker_that_works_again_gets_what_it_lacks(
    run_file, tmp_path, mlflow, at_once, monkeypatch
):
    add, failures = mlflow.log_batch, [RuntimeError("away")] * 3

    def fail_at_first(number, **metrics):
        if failures:
            raise failures.pop()
        add(number, **metrics)

    monkeypatch.setattr(mlflow, "log_batch", fail_at_first)
    monkeypatch.setattr(trackers, "FLUSH_SECONDS", 60)
    done = tandem("train", run_file, "trackers=[mlflow]")
    assert "trackers: mlflow: works again" in done.stdout
    recorded = numbers_of(tmp_path / "run" / "metrics.jsonl")
    assert {(step, name, value) for _, name, value, step in mlflow.metrics} == recorded


def test_a_tracker_that_hangs_does_not_hold_up_the_run(run_file, tmp_path, mlflow, at_once):
    mlflow.hang = threading.Event()
    try:
        done = tandem("train", run_file, "trackers=[mlflow, tensorboard]")
    finally:
        mlflow.hang.set()
    assert "trackers: mlflow: it does not answer: it lacks 4 lines" in done.stdout
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 4
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_full_disk_below_tensorboard_costs_the_run_nothing(
    run_file, tmp_path, at_once, monkeypatch
):
    def full(self, event):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventFile, "_write", full)
    done = tandem("train", run_file)
    assert "trackers: tensorboard: OSError: [Errno 28]" in done.stdout
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 4


def test_mlflow_is_asked_once_a_line(run_file, mlflow):
    tandem("train", run_file, "trackers=[mlflow]", "eval.every=2")
    # Evaluations come before the first step, too.
    assert mlflow.requests == 4 + 3
