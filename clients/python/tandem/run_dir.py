"""The directory of a run: what was configured, what happened, and where to go on from.

run.json                 {"run_id", "kind", "start", "servers"}: kind is the command, train, sft or
                         demo; what the run started from; the models and settings of its servers
config.yaml              the resolved configuration of the last start
metrics.jsonl            one line per step, written as soon as the step is done
versions.jsonl           {"step", "version", "digest"}: the weights after every step; with a critic
                         "critic_version" and "critic_digest", too
evals.jsonl              one line per evaluation and mode
tensorboard/             the numbers of both as TensorBoard events
trajectories/step_N.jsonl one line per response (`tandem train` alone)
checkpoints/step_NNNNNN/ the trainer's; the critic's lie in checkpoints/critic
state.json               SavedState: the last checkpoint, what --resume goes on from
logs/attempt_N.log       one file for every start; --clean keeps them
.lock                    held while a process uses the directory

All names inside are relative to the directory, so that it can be moved.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from tandem import settings as settings_module
from tandem.checkpoints import SavedState, checkpoint_at, last_checkpoint, require_here
from tandem.config_values import flat, read_mapping
from tandem.errors import RunDirectoryError
from tandem.metrics import eval_prefix
from tandem.run_files import (
    IDENTITY,
    STATE,
    kind_of_run,
    next_attempt,
    number_of,
    read_json,
    step_lines,
    temporary_name,
    trajectory_file,
    write_atomically,
    writing,
)
from tandem.settings import RunSettings
from tandem.types.v1 import server_pb2

if TYPE_CHECKING:
    from tandem.event_file import EventFile

# A resumed run may change these, patterns of dotted keys: what no result depends on. Everything
# else must stay as it was.
RESUMABLE = (
    "run_dir",
    "steps",
    "servers",
    "checkpoint",
    "eval",
    "start_from",
    "reward.python_path",
    "reward.executor",
    "reward.workers",
    "cluster.directory",
    "cluster.*_timeout_seconds",
    "cluster.*.server",
    "cluster.*.compute.num_threads",
    "cluster.*.max_num_seqs",
    "cluster.*.max_queue",
    "cluster.*.max_samples",
    "cluster.*.shutdown_checkpoint_directory",
)

_LOCK = ".lock"
_LOGS = "logs"
# What a run writes and --clean removes. run.json is replaced instead: what is half removed, or
# half begun, is still known as a run directory.
_CONTENTS = (
    STATE,
    "checkpoints",
    "trajectories",
    "tensorboard",
    "evals.jsonl",
    "metrics.jsonl",
    "versions.jsonl",
    "config.yaml",
)


class RunDirectory:
    """A run directory whose lock is held; a context manager.

    open() checks and locks, and leaves everything in the directory as it is. begin() starts to
    write: call it when nothing stands in the run's way any more.

    Attributes:
        path: absolute.
        run_id: names the run to the servers; a resumed run keeps it.
        state: the checkpoint to go on from, None at the start of a run.
        start: what the run started from, as recorded; None before that.
        versions: (version, digest) of the weights after the steps that an earlier start did.
        critic_versions: the same of the critic.
        elapsed_seconds: run time until `state`, 0 at the start of a run.
        log: logs/attempt_N.log, from begin() on.
    """

    log: TextIO

    def __init__(
        self, config: RunSettings, kind: str, *, clean: bool, changes: Sequence[str] = ()
    ) -> None:
        """Use open()."""
        self.path = config.run_dir.resolve()
        self.start: dict[str, Any] | None = None
        self.versions: list[tuple[int, str]] = []
        self.critic_versions: list[tuple[int, str]] = []
        self.run_id = f"{self.path.name}-{uuid.uuid4().hex[:8]}"
        self.state: SavedState | None = None
        self.elapsed_seconds = 0.0
        self._config = config
        self._kind = kind
        self._clean = clean
        self._changes = tuple(changes)
        self._begun = False
        self._servers: dict[str, Any] | None = None
        self._metrics: TextIO
        self._events: EventFile
        self._versions: TextIO
        self._files = ExitStack()

    @classmethod
    def open(
        cls,
        config: RunSettings,
        kind: str,
        *,
        resume: bool | Literal["auto"] = False,
        clean: bool = False,
        changes: Sequence[str] = (),
    ) -> Self:
        """Locks `config.run_dir` for a run of `kind`; makes the directory if there is none.

        A directory that already holds a run is refused without `resume` (go on after its last
        checkpoint; "auto": if it has one, else start) or `clean` (throw it away); one that holds
        anything else is always refused. A directory that is made here goes again at the end, unless
        the run began. `changes` are the dotted keys of settings that a resumed run may change.

        Raises:
            RunDirectoryError: refused, in use, or not to be created.
            ConfigError: servers of this machine are to start from what is no checkpoint.
        """
        if resume and clean:
            raise RunDirectoryError("--resume and --clean exclude each other")
        run = cls(config, kind, clean=clean, changes=changes)
        with ExitStack() as files:
            with _usable(run.path):
                _admit(run.path, resume, clean)
                made = _make(run.path)
                files.enter_context(_lock(run.path))
                files.callback(_remove_unused, made)
            if resume == "auto":
                run._require_kind()
                resume = (run.path / STATE).exists()
                run._clean = not resume
            if resume:
                run._read_earlier()
            if run.state is None and config.cluster and isinstance(config.start_from, Path):
                require_here(checkpoint_at(config.start_from), "start_from")
            run._files = files.pop_all()
        return run

    @property
    def done(self) -> bool:
        """Whether a resumed run has no step left to do."""
        return self.first_step > self._config.steps and self.state is not None

    def begin(self) -> None:
        """Starts to write: removes or truncates what `clean` and `resume` throw away.

        Only the first call does anything.
        """
        if self._begun:
            return
        self._begun = True
        with _usable(self.path):
            if self._clean:
                _remove_run(self.path)
            elif self.state is not None:
                _forget_after(self.path, self.state.step)
            self._write_identity()
            for folder in ("trajectories", "checkpoints", _LOGS):
                (self.path / folder).mkdir(exist_ok=True)
            write_atomically(self.path / "config.yaml", settings_module.dump(self._config))
            attempt = next_attempt(self.path / _LOGS)
            self.log = self._append_to(f"{_LOGS}/attempt_{attempt}.log")
            self._metrics = self._append_to("metrics.jsonl")
            self._versions = self._append_to("versions.jsonl")
            from tandem.event_file import EventFile

            events = EventFile(self.path / "tensorboard", self.first_step)
            self._events = self._files.enter_context(events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with writing(self.path):
                self._files.close()
        except RunDirectoryError:
            # The lines that a full disk did not take are tried again; it has been told already.
            if error is None:
                raise

    @property
    def first_step(self) -> int:
        """The step to do first: 1, or the one after the checkpoint."""
        return self.state.step + 1 if self.state else 1

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl, to the log and to the TensorBoard events."""
        text = json.dumps(line) + "\n"
        with writing(self.path / "metrics.jsonl"):
            self._metrics.write(text)
            self.log.write(text)
            self._events.add(line)

    def write_version(
        self,
        step: int,
        weights: server_pb2.WeightsVersion,
        critic: server_pb2.WeightsVersion | None = None,
    ) -> None:
        """Appends the weights after a step, of the senior and the critic, to versions.jsonl."""
        line = {"step": step, "version": weights.version, "digest": weights.digest}
        if critic is not None:
            line |= {"critic_version": critic.version, "critic_digest": critic.digest}
        with writing(self.path / "versions.jsonl"):
            self._versions.write(json.dumps(line) + "\n")

    def write_eval(self, line: Mapping[str, Any]) -> None:
        """Appends one line to evals.jsonl, and to the TensorBoard events under eval/<mode>/."""
        with writing(self.path / "evals.jsonl"), (self.path / "evals.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            self._events.add(line, eval_prefix(line))

    def record(self, start: Mapping[str, Any], servers: Mapping[str, Any]) -> None:
        """Adds what the run started from, and its servers, to run.json; a resumed run's stay."""
        if self.start is None:
            self.start, self._servers = dict(start), dict(servers)
            self._write_identity()

    def require_same_servers(self, servers: Mapping[str, Any]) -> None:
        """RunDirectoryError when a resumed run meets other models or settings than before."""
        if self.state is not None and self._servers is not None:
            _require_same(
                self.path, {"servers": self._servers}, {"servers": servers}, self._changes
            )

    def write_trajectories(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes trajectories/step_N.jsonl."""
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(trajectory_file(self.path, step), "".join(lines))

    def write_state(self, state: SavedState) -> None:
        """Names the checkpoint to resume from."""
        write_atomically(self.path / STATE, json.dumps(asdict(state)) + "\n")
        self.state = state

    def _read_earlier(self) -> None:
        """What the run that is resumed left: its id, its last checkpoint and its time."""
        self._require_kind()
        self.run_id = _run_id(self.path)
        identity = read_json(self.path / IDENTITY)
        self.start, self._servers = identity.get("start"), identity.get("servers")
        self.state = last_checkpoint(self.path)
        before = read_mapping(self.path / "config.yaml", RunDirectoryError)
        now = self._config.model_dump(mode="json")
        # A run may move between a cluster of its own and running servers.
        if not (before.get("cluster") and now["cluster"]):
            before["cluster"] = now["cluster"] = None
        _require_same(self.path, before, now, (*RESUMABLE, *self._changes))
        # All are read: begin() would find damage too late.
        metrics, _, _ = [step_lines(file, self.state.step) for file in _step_files(self.path)]
        if metrics:
            self.elapsed_seconds = metrics[-1].get("time_seconds") or 0.0
        versions = step_lines(self.path / "versions.jsonl")
        self.versions = [(one.get("version", 0), one.get("digest", "")) for one in versions]
        self.critic_versions = [
            (one["critic_version"], one.get("critic_digest", ""))
            for one in versions
            if "critic_version" in one
        ]

    def _require_kind(self) -> None:
        kind = kind_of_run(self.path)
        if kind not in (None, self._kind):
            raise RunDirectoryError(f"{self.path} holds a run of kind {kind}")

    def _write_identity(self) -> None:
        facts = {"start": self.start, "servers": self._servers}
        identity = {"run_id": self.run_id, "kind": self._kind}
        identity |= {key: value for key, value in facts.items() if value is not None}
        write_atomically(self.path / IDENTITY, json.dumps(identity) + "\n")

    def _append_to(self, name: str) -> TextIO:
        # Line-buffered: a line is on disk as soon as it is written.
        return self._files.enter_context((self.path / name).open("a", buffering=1))


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"run_dir: {path}: {error.strerror}") from None


def _admit(path: Path, resume: bool | str, clean: bool) -> None:
    holds_run = (path / IDENTITY).exists()
    if resume is True and not holds_run:
        raise RunDirectoryError(f"{path} holds no run to resume")
    if holds_run and not (resume or clean):
        raise RunDirectoryError(
            f"{path} already holds a run",
            hint="--resume goes on after its last checkpoint, --clean throws it away",
        )
    # Of a start that was cut off before it became a run, or of a run that was removed by hand.
    left = {_LOCK, _LOGS, temporary_name(IDENTITY)}
    if path.exists() and not holds_run and {entry.name for entry in path.iterdir()} - left:
        raise RunDirectoryError(f"{path} is not empty and not a run directory")


def _run_id(path: Path) -> str:
    run_id = read_json(path / IDENTITY).get("run_id")
    if not isinstance(run_id, str):
        raise RunDirectoryError(f"{path / IDENTITY}: run_id: not a string")
    return run_id


def _require_same(
    path: Path, before: dict[str, Any], now: dict[str, Any], free: Iterable[str]
) -> None:
    then, today = flat(before), flat(now)
    patterns = [pattern for key in free for pattern in (key, f"{key}.*")]
    changed = [
        key
        for key in dict.fromkeys([*then, *today])
        if then.get(key) != today.get(key)
        and not any(fnmatchcase(key, pattern) for pattern in patterns)
    ]
    if changed:
        shown = ", ".join(f"{key} ({then.get(key)} -> {today.get(key)})" for key in changed)
        raise RunDirectoryError(
            f"{path}: a resumed run must keep its configuration; changed: {shown}",
            hint="--change KEY allows one",
        )


def _remove_run(path: Path) -> None:
    for name in _CONTENTS:
        _remove(path / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _forget_after(path: Path, step: int) -> None:
    # Imported here: it takes a moment, and most commands do without.
    from tandem import event_file

    # Steps after the checkpoint are done again: their lines would stand there twice.
    for file in _step_files(path):
        if file.exists():
            lines = (json.dumps(value) + "\n" for value in step_lines(file, step))
            write_atomically(file, "".join(lines))
    event_file.forget_after(path / "tensorboard", step)
    # A checkpoint that state.json does not name yet would count as the newest when others are
    # pruned, and push out the one that it does name.
    for folder in ("trajectories", "checkpoints", "checkpoints/critic"):
        for entry in (path / folder).glob("step_*"):
            if number_of(entry) > step:
                _remove(entry)


def _step_files(path: Path) -> tuple[Path, Path, Path]:
    return path / "metrics.jsonl", path / "evals.jsonl", path / "versions.jsonl"


def _make(path: Path) -> list[Path]:
    """Makes a directory; returns what had to be made for it, innermost first."""
    made = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        made.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    return made


def _remove_unused(made: Sequence[Path]) -> None:
    """Removes directories that _make() made for a run that did not begin."""
    if made and [entry.name for entry in made[0].iterdir()] == [_LOCK]:
        (made[0] / _LOCK).unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _lock(path: Path) -> TextIO:
    file = (path / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had made the directory may have removed it, and the file, in between.
        taken = not os.path.samestat(os.fstat(file.fileno()), (path / _LOCK).stat())
    except OSError:
        taken = True
    if taken:
        file.close()
        raise RunDirectoryError(f"{path} is in use by another process")
    return file
