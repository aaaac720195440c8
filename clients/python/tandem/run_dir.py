"""The directory of a run: what was configured, what happened, and where to go on from.

config.yaml              the resolved configuration
run.json                 id and kind of the run
metrics.jsonl            one line a step, written as soon as the step is done
evals.jsonl              one line an evaluation
trajectories/step_N.jsonl
checkpoints/             step directories of the trainer (and critic-… of the critic)
state.json               the last checkpoint: what --resume goes on from
logs/attempt_N.log       one file for every start
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from tandem import settings as settings_module
from tandem.errors import RunDirectoryError
from tandem.settings import RunSettings

# A resumed run may change these; everything else must stay as it was.
RESUMABLE = frozenset({"run_dir", "steps", "servers", "cluster", "checkpoint", "eval"})

_LOCK = ".lock"


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that belongs to the end of `step`."""

    step: int
    policy_version: int
    trainer: str
    critic: str | None = None


class RunDirectory:
    """An open run directory; a context manager that holds its lock."""

    def __init__(self, path: Path, lock: Any, run_id: str, state: SavedState | None) -> None:
        self._lock = lock
        self.path = path
        self.run_id = run_id
        self.state = state
        for folder in ("trajectories", "checkpoints", "logs"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        attempt = len(list((path / "logs").glob("attempt_*.log"))) + 1
        # Line-buffered: a line is on disk as soon as it is written.
        self.log = (path / "logs" / f"attempt_{attempt}.log").open("w", buffering=1)
        self._metrics = (path / "metrics.jsonl").open("a", buffering=1)

    @classmethod
    def open(
        cls, config: RunSettings, kind: str, *, resume: bool = False, clean: bool = False
    ) -> Self:
        """Makes the directory, or opens it again.

        A directory that already holds a run is refused without `resume` (go on after its last
        checkpoint) or `clean` (throw it away). Anything else in it is never touched.
        """
        path = config.run_dir.resolve()
        run_file = path / "run.json"
        if resume and clean:
            raise RunDirectoryError("--resume and --clean exclude each other")
        if resume and not run_file.exists():
            raise RunDirectoryError(f"{path} holds no run to resume")
        if run_file.exists() and not (resume or clean):
            raise RunDirectoryError(
                f"{path} already holds a run",
                hint="--resume goes on after its last checkpoint, --clean throws it away",
            )
        if path.exists() and any(path.iterdir()) and not run_file.exists():
            raise RunDirectoryError(f"{path} is not empty and not a run directory")
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            if resume:
                run_id, state = _resume(path, config, kind)
            else:
                _remove_contents(path)
                run_id, state = f"{path.name}-{uuid.uuid4().hex[:8]}", None
                identity = json.dumps({"run_id": run_id, "kind": kind})
                write_atomically(run_file, identity + "\n")
            write_atomically(path / "config.yaml", settings_module.dump(config))
            return cls(path, lock, run_id, state)
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._metrics.close()
        self.log.close()
        self._lock.close()

    @property
    def first_step(self) -> int:
        """The step to do first: 1, or the one after the checkpoint."""
        return self.state.step + 1 if self.state else 1

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        self._metrics.write(json.dumps(line) + "\n")

    def write_eval(self, line: Mapping[str, Any]) -> None:
        """Appends one line to evals.jsonl."""
        with (self.path / "evals.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def write_trajectories(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes trajectories/step_N.jsonl."""
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(self.path / "trajectories" / f"step_{step}.jsonl", "".join(lines))

    def read_trajectories(self, step: int) -> list[dict[str, Any]]:
        """The records of a step."""
        return list(read_json_lines(self.path / "trajectories" / f"step_{step}.jsonl"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(read_json_lines(self.path / "metrics.jsonl"))

    def write_state(self, state: SavedState) -> None:
        """Names the checkpoint to resume from."""
        write_atomically(self.path / "state.json", json.dumps(asdict(state)) + "\n")
        self.state = state


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that no reader, and no crash, sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _resume(path: Path, config: RunSettings, kind: str) -> tuple[str, SavedState]:
    run = json.loads((path / "run.json").read_text())
    if run["kind"] != kind:
        raise RunDirectoryError(f"{path} holds a run of `tandem {run['kind']}`")
    state_file = path / "state.json"
    if not state_file.exists():
        raise RunDirectoryError(
            f"{path} has no checkpoint to resume from", hint="--clean starts again"
        )
    before = yaml.safe_load((path / "config.yaml").read_text())
    now = config.model_dump(mode="json")
    changed = [key for key in now if key not in RESUMABLE and before.get(key) != now[key]]
    if changed:
        raise RunDirectoryError(
            f"{path}: a resumed run must keep its configuration; changed: {', '.join(changed)}"
        )
    state = SavedState(**json.loads(state_file.read_text()))
    _forget_after(path, state.step)
    return run["run_id"], state


def _remove_contents(path: Path) -> None:
    # run.json goes last: what is half removed is still known as a run directory.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "run.json"):
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _forget_after(path: Path, step: int) -> None:
    # Steps after the checkpoint are done again: their lines would stand there twice.
    for name in ("metrics.jsonl", "evals.jsonl"):
        file = path / name
        if file.exists():
            lines = file.read_text().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith("\n")]
            kept = [line for line in complete if json.loads(line)["step"] <= step]
            write_atomically(file, "".join(kept))
    for file in (path / "trajectories").glob("step_*.jsonl"):
        if int(file.stem.removeprefix("step_")) > step:
            file.unlink()


def _lock(path: Path) -> Any:
    file = (path / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunDirectoryError(f"{path} is in use by another process") from None
    return file
