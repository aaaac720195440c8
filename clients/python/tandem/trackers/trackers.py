"""Trackers of a run's numbers, in addition to its files: TensorBoard, Weights & Biases, MLflow.

The run file's `trackers` lists their names. Project, account and server of a tracker come from the
environment variables of its own library. metrics.jsonl and evals.jsonl have every number whether or
not a tracker takes it, so no tracker that fails or is slow holds up a run.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from tandem.metrics import numbers
from tandem.settings.run import TrackerName
from tandem.utils.optional import optional_module

_log = logging.getLogger(__name__)


# Default project of Weights & Biases and experiment of MLflow.
PROJECT = "tandem"
# Most lines that wait for a tracker; further ones are lost to it.
MOST_WAITING = 10_000
# Seconds before the second attempt to send a line, and most seconds between two.
FIRST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 60.0
# Most seconds that the end of a run waits for its trackers; after an error, or Ctrl-C.
FLUSH_SECONDS = 30.0
FLUSH_SECONDS_AFTER_ERROR = 5.0
# Seconds of that wait after which it is told.
_NOTE_SECONDS = 1.0


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

    Each works in a thread of its own, which tries again while the tracker fails. At the end of the
    run the tracker has FLUSH_SECONDS to take what it lacks.
    """

    def __init__(self, names: Sequence[TrackerName], run: TrackedRun) -> None:
        self._senders = [_Sender(name, run) for name in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        seconds = FLUSH_SECONDS if kind is None else FLUSH_SECONDS_AFTER_ERROR
        deadline = time.monotonic() + seconds
        for sender in self._senders:
            sender.ask_to_end()
        late = [sender.name for sender in self._senders if not sender.ends_by(_NOTE_SECONDS)]
        if late:
            _log.info(f"waiting for trackers: {', '.join(late)}, for at most {seconds:g} s")
        for sender in self._senders:
            sender.end(deadline)

    @property
    def waiting(self) -> int:
        """The number of lines that a tracker lacks, those that it lost included."""
        return sum(sender.lacks for sender in self._senders)

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Hands a line to every tracker."""
        for sender in self._senders:
            sender.add(dict(line), prefix)


def require_installed(names: Sequence[TrackerName]) -> None:
    """Raises ConfigError, with the pip command as hint, for a tracker whose package is missing."""
    for name in names:
        if name != "tensorboard":
            optional_module(name, f"trackers: {name}")


class _Sender:
    """Hands lines to one tracker, in order, in a thread."""

    def __init__(self, name: TrackerName, run: TrackedRun) -> None:
        self.name = name
        self._run = run
        self._lines: queue.Queue[tuple[dict[str, Any], str] | None] = queue.Queue()
        self._added = self._sent = 0
        self._reason = ""
        # The run ends; nobody waits for the thread any more.
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._tracker: Tracker | None = None
        # A tracker that hangs must not hold up the exit.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def lacks(self) -> int:
        """The number of lines that the tracker does not have."""
        return self._added - self._sent

    def add(self, line: dict[str, Any], prefix: str) -> None:
        """Adds a line, unless too many wait already."""
        self._added += 1
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put((line, prefix))

    def ask_to_end(self) -> None:
        """Makes the thread end when the tracker has all lines."""
        self._ending.set()
        self._lines.put(None)

    def ends_by(self, seconds: float) -> bool:
        """Whether the thread ends within some seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, deadline: float) -> None:
        """Waits for the thread until the time `deadline`; tells what the tracker lacks."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._ended.set()
        if self._thread.is_alive() and not self._reason:
            self._reason = "it does not answer"
        if self.lacks or self._reason:
            lacks = f"it lacks {self.lacks} lines" if self.lacks else "it may lack the last lines"
            _log.warning(
                f"trackers: {self.name}: {self._reason}: {lacks}, which are in metrics.jsonl and "
                "evals.jsonl"
            )

    def _work(self) -> None:
        if not self._until_done(self._open):
            return
        while (entry := self._lines.get()) is not None:
            if not self._until_done(lambda entry=entry: self._add(*entry)):
                return
            self._sent += 1
        self._until_done(self._close)

    def _until_done(self, attempt: Callable[[], None]) -> bool:
        """Makes attempts until one succeeds; False if none does before the end."""
        seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                attempt()
            # Each library raises errors of its own, and may end what it takes for its process.
            except (Exception, SystemExit) as error:
                self._tell(error)
            else:
                if self._reason and not self._ended.is_set():
                    _log.info(f"trackers: {self.name}: works again")
                self._reason = ""
                return True
            if self._ended.is_set():
                return False
            if self._ending.is_set():
                self._ended.wait(FIRST_RETRY_SECONDS)
            else:
                self._ending.wait(seconds)
                seconds = min(MOST_RETRY_SECONDS, 2 * seconds)

    def _tell(self, error: BaseException) -> None:
        known, self._reason = self._reason, f"{type(error).__name__}: {error}"
        if not known and not self._ended.is_set():
            _log.warning(
                f"trackers: {self.name}: {self._reason}: the run continues, and its numbers are "
                "sent when the tracker accepts them"
            )

    def _open(self) -> None:
        self._tracker = _KINDS[self.name](self._run)

    def _add(self, line: dict[str, Any], prefix: str) -> None:
        if self._tracker is None:
            self._open()
        assert self._tracker is not None
        try:
            self._tracker.add(line, prefix)
        except OSError:
            if self.name == "tensorboard":
                # The file may end in half a record, behind which no reader looks.
                self._tracker = None
            raise

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def _tensorboard(run: TrackedRun) -> Tracker:
    from tandem.trackers.event_file import EventFile

    return EventFile(run.path / "tensorboard", run.first_step)


class _WeightsAndBiases:
    """A run of Weights & Biases with the run's id, gone on with by a resumed run."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = optional_module("wandb", "trackers: wandb")
        place = run.config["wandb"]
        self._run = wandb.init(
            project=place["project"] or os.environ.get("WANDB_PROJECT", PROJECT),
            entity=place["entity"],
            id=run.run_id,
            name=place["name"] or run.path.name,
            group=place["group"],
            tags=place["tags"],
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
        self._metric = mlflow.entities.Metric
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
        # One request for all numbers of a step.
        now = int(time.time() * 1000)
        metrics = [
            self._metric(name, value, now, line["step"]) for name, value in numbers(line, prefix)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


_KINDS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
