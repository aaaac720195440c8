"""Trackers of a run's numbers beside its files: TensorBoard, Weights & Biases, MLflow.

The run file's `trackers` lists their names. Project, account and server of a tracker come from the
environment variables of its own library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from tandem.errors import TandemError
from tandem.metrics import numbers
from tandem.optional import optional_module
from tandem.settings import TrackerName

# Default project of Weights & Biases and experiment of MLflow.
PROJECT = "tandem"


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records.

    Attributes:
        path: the run directory.
        run_id: the run's id, the same for every start of it.
        first_step: the first step of this start.
        config: the settings.
    """

    path: Path
    run_id: str
    first_step: int
    config: Mapping[str, Any]


class Tracker(Protocol):
    """One place that the numbers of a run go to."""

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Records every number of a line that has a `step`, under `prefix` and its key."""
        ...

    def close(self) -> None:
        """Ends the recording."""
        ...


class Trackers:
    """The trackers of a run that is about to write; a context manager.

    A tracker that fails raises TandemError, which names it.
    """

    def __init__(self, names: Sequence[TrackerName], run: TrackedRun) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._stack = ExitStack()
        with self._stack:
            for name in names:
                with _failures(name):
                    self._trackers[name] = _KINDS[name](run)
                self._stack.callback(self._close, name)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Records a line with every tracker."""
        for name, tracker in self._trackers.items():
            with _failures(name):
                tracker.add(line, prefix)

    def _close(self, name: str) -> None:
        with _failures(name):
            self._trackers[name].close()


def require_installed(names: Sequence[TrackerName]) -> None:
    """Raises ConfigError, with the pip command as hint, for a tracker whose package is missing."""
    for name in names:
        if name != "tensorboard":
            optional_module(name, f"trackers: {name}")


@contextmanager
def _failures(name: str) -> Iterator[None]:
    try:
        yield
    except TandemError:
        raise
    # Each library raises errors of its own.
    except Exception as error:
        # TensorBoard's files are part of the run directory, which names a full disk.
        if name == "tensorboard":
            raise
        raise TandemError(
            f"trackers: {name}: {type(error).__name__}: {error}",
            hint=f"the run can be resumed with `trackers` that do not list {name}",
        ) from error


def _tensorboard(run: TrackedRun) -> Tracker:
    from tandem.event_file import EventFile

    return EventFile(run.path / "tensorboard", run.first_step)


class _WeightsAndBiases:
    """A run of Weights & Biases with the run's id, gone on with by a resumed run."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = optional_module("wandb", "trackers: wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.path.name,
            resume="allow",
            config=dict(run.config),
            dir=str(run.path),
        )
        # On the library's own axis, steps that a resumed run does again would be dropped.
        self._run.define_metric("*", step_metric="step")

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        self._run.log({"step": line["step"], **dict(numbers(line, prefix))})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow with the tag `tandem.run_id`, gone on with by a resumed run."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow = optional_module("mlflow", "trackers: mlflow")
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = mlflow.set_experiment(name).experiment_id
        known = self._client.search_runs(
            [experiment], f"tags.`tandem.run_id` = '{run.run_id}'", max_results=1
        )
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            tags = {"tandem.run_id": run.run_id}
            made = self._client.create_run(experiment, tags=tags, run_name=run.path.name)
            self._id = made.info.run_id
        self._client.log_dict(self._id, dict(run.config), "config.yaml")

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in numbers(line, prefix):
            self._client.log_metric(self._id, name, value, step=line["step"])

    def close(self) -> None:
        self._client.set_terminated(self._id)


_KINDS = {"tensorboard": _tensorboard, "wandb": _WeightsAndBiases, "mlflow": _MLflow}
