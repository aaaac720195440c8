"""The directory of a run: its configuration, its records, and the checkpoint to continue from.

run.json                 {"run_id", "kind", "start", "servers", "inputs"}: kind is the command,
                         train or sft; what the run started from; the models and settings of
                         its servers; digests of the rows and of the reward's file
config.yaml              the resolved configuration of the last start
metrics.jsonl            one line per step, written as soon as the step is done
versions.jsonl           {"step", "version", "digest"}: the weights after every step; with a critic
                         "critic_version" and "critic_digest", too
evals.jsonl              one line per evaluation and mode
tensorboard/             the numbers of both as TensorBoard events
episodes/step_N.jsonl    what environments said in the episodes of a step
trajectories/step_N.parquet
                         one row per response of a step; earlier releases wrote JSON lines
evaluations/step_N.MODE.parquet
                         one row per answer of an evaluation after step N
checkpoints/step_NNNNNN/ the trainer's; the critic's lie in checkpoints/critic
rollouts/step_N.rollouts of an asynchronous run: the step was drawn ahead of the last checkpoint
state.json               SavedState: the last checkpoint, from which --resume continues
logs/attempt_N.log       one file for every start; --clean keeps them
.lock                    held while a process uses the directory; names that process

All names inside are relative to the directory, so that it can be moved.
"""

from __future__ import annotations

import difflib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from tandem._proto.types.v1 import server_pb2
from tandem.errors import ConfigError, RunDirectoryError, StorageError, file_error
from tandem.metrics import eval_prefix
from tandem.run_directory.account import RunAccount
from tandem.run_directory.checkpoints import (
    SavedState,
    checkpoint_at,
    last_checkpoint,
    remove_checkpoint,
    require_here,
)
from tandem.run_directory.episodes import FOLDER as EPISODES
from tandem.run_directory.lock import LOCK, locked
from tandem.run_directory.log import FILE_ONLY, logged_to
from tandem.run_directory.trajectories.files import EVALUATIONS, STEPS, TrajectoryFile
from tandem.run_directory.trajectories.writer import TrajectoryWriter
from tandem.settings import loading
from tandem.settings.run import EvalMode, EvalSettings, RunSettings, SpeculativeSettings
from tandem.settings.values import flat, read_mapping
from tandem.utils.atomic_files import (
    IDENTITY,
    STATE,
    is_checkpoint_of_step,
    kind_of_run,
    next_attempt,
    number_of,
    read_json,
    step_lines,
    temporary_name,
    write_atomically,
    writing,
)
from tandem.utils.text_files import encoded

_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from tandem.trackers.trackers import Trackers

# Settings that a resumed run may change, as patterns of dotted keys: no result depends on them. All
# others must stay as they were; see _resumable() for `speculative`.
RESUMABLE = (
    "run_dir",
    "steps",
    "epochs",
    "servers",
    "credentials",
    "checkpoint",
    "eval",
    "start_from",
    "start_optimizer",
    "trackers",
    "wandb",
    "trajectories",
    "environment.python_path",
    "environment.workers",
    "reward.python_path",
    "reward.executor",
    "reward.workers",
    "reward.timeout_seconds",
    "rewards.*.python_path",
    "rewards.*.executor",
    "rewards.*.workers",
    "rewards.*.timeout_seconds",
    "cluster.directory",
    "cluster.certs",
    "cluster.*_timeout_seconds",
    "cluster.*.server",
    "cluster.*.compute.num_threads",
    "cluster.*.max_num_seqs",
    "cluster.*.max_queue",
    "cluster.*.max_samples",
    "cluster.*.shutdown_checkpoint_directory",
)

# The keys of Session.facts() in run.json, which a resumed run must meet again.
_FACTS = ("servers", "inputs")

# Files whose lines a resumed run is checked against: records.NAME of --change.
_RECORDS = ("metrics", "versions")

_LOGS = "logs"
# Folder of the rollouts that were drawn ahead of the last checkpoint (training/rollout_files.py).
ROLLOUTS = "rollouts"
# Files that a run writes and --clean removes. run.json is replaced instead: a run directory that is
# half removed, or half begun, is still known as one.
_FILES = (
    STATE,
    "evals.jsonl",
    "metrics.jsonl",
    "versions.jsonl",
    "config.yaml",
)


class RunDirectory:
    """A run directory whose lock is held; a context manager.

    open() checks and locks, and leaves everything in the directory as it is. begin() starts to
    write: call it when the run can no longer be refused.

    Attributes:
        path: the directory, absolute.
        run_id: names the run to the servers; a resumed run keeps it.
        state: the checkpoint to continue from, None at the start of a run.
        start: what the run started from, as recorded; None before that.
        versions: (version, digest) of the weights after the steps that an earlier start did.
        critic_versions: the same for the critic.
        elapsed_seconds: run time until `state`, 0 at the start of a run.
        evaluated: (step, mode) of the evaluations that evals.jsonl has.
        log: logs/attempt_N.log, from begin() on.
        trajectories: writes responses and answers, from begin() on.
        account: what the steps so far trained and lost, including those of earlier starts.
    """

    log: Path
    trajectories: TrajectoryWriter

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
        self.evaluated: set[tuple[int, str]] = set()
        self.account = RunAccount()
        self._config = config
        self._kind = kind
        self._clean = clean
        self._changes = tuple(changes)
        self._begun = False
        self._facts: dict[str, Any] = {}
        self._metrics: TextIO
        self._trackers: Trackers
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
        wait_seconds: float = 0.0,
    ) -> Self:
        """Locks `config.run_dir` for a run of `kind`; makes the directory if there is none.

        A directory that already holds a run is refused without `resume` (continue after its last
        checkpoint; "auto": if it has one, else start) or `clean` (discard it); one that holds
        anything else is always refused. A directory created here is removed at the end, unless
        the run began. `changes` are the dotted keys of settings that a resumed run may change; the
        key of a section allows all that is below, and * stands for any name. While another process
        uses the directory, this one waits for at most `wait_seconds`, and logs it.

        Raises:
            RunDirectoryError: refused, or not to be created.
            RunDirectoryBusyError: in use by another process until the end of the wait.
            StorageError: its file system failed.
            ConfigError: start_from names no checkpoint, and the servers are to run on this machine.
        """
        if resume and clean:
            raise RunDirectoryError("--resume and --clean cannot be combined")
        if changes and not resume:
            raise RunDirectoryError("--change only applies with --resume")
        run = cls(config, kind, clean=clean, changes=changes)
        with ExitStack() as files:
            with _usable(run.path):
                _admit(run.path, resume, clean)
                made = _make(run.path)
                files.enter_context(locked(run.path, wait_seconds))
                files.callback(_remove_unused, made)
                # A predecessor may have begun the run, or ended it, meanwhile.
                _admit(run.path, resume, clean)
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
        """Whether a resumed run has no step left to do, and no evaluation after the last one."""
        steps = self._config.steps
        if self.state is None or steps is None or self.first_step <= steps:
            return False
        return not self.evaluations_due(self.state.step, steps)

    def evaluations_due(self, step: int, steps: int) -> list[EvalMode]:
        """Returns the modes that a run of `steps` steps evaluates after a step, and has not yet.

        Step 0 stands for the time before the first one.
        """
        settings = self._config.eval
        if not evaluates_after(settings, step, steps):
            return []
        return [mode for mode in settings.modes if (step, mode) not in self.evaluated]

    def begin(self, steps: int | None = None) -> None:
        """Starts to write: removes or truncates the records that `clean` and `resume` discard.

        `steps` is the run's number of steps, where the settings gave `epochs` instead. Warns of
        every directory that has the name of a step's checkpoint and is kept, because it does not
        belong to the run. Only the first call does anything.
        """
        if self._begun:
            return
        self._begun = True
        if steps is not None:
            self._config = self._config.model_copy(update={"steps": steps})
        with _usable(self.path):
            if self._clean:
                _remove_run(self.path)
            elif self.state is not None:
                _forget_after(self.path, self.state.step)
            self._write_identity()
            for folder in (STEPS, EVALUATIONS, "checkpoints", _LOGS):
                (self.path / folder).mkdir(exist_ok=True)
            write_atomically(self.path / "config.yaml", loading.dump(self._config))
            attempt = next_attempt(self.path / _LOGS)
            self.log = self.path / _LOGS / f"attempt_{attempt}.log"
            # Opened first, and so closed last.
            self._files.enter_context(logged_to(self.log))
            self._metrics = self._append_to("metrics.jsonl")
            self._versions = self._append_to("versions.jsonl")
            self._trackers = self._files.enter_context(self._open_trackers())
            self.trajectories = self._files.enter_context(
                TrajectoryWriter(self.path, self._config.trajectories)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with writing(self.path):
                self._files.__exit__(type(error) if error else None, error, None)
        except StorageError:
            # Closing writes the lines that a full disk did not take again; `error` says so already.
            if error is None:
                raise

    @property
    def first_step(self) -> int:
        """The step to do first: 1, or the one after the checkpoint."""
        return self.state.step + 1 if self.state else 1

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl and to the log."""
        text = json.dumps(line)
        with writing(self.path / "metrics.jsonl"):
            self._metrics.write(f"{text}\n")
        _log.info(text, extra=FILE_ONLY)
        self.account.add(line)

    def track(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Hands the numbers of a line to the trackers, under `prefix` and their keys."""
        self._trackers.add(line, prefix)

    @property
    def tracker_lines_waiting(self) -> int:
        """The number of lines that trackers lack now."""
        return self._trackers.waiting

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
        """Appends one line to evals.jsonl; hands it to the trackers under eval/<mode>/."""
        with writing(self.path / "evals.jsonl"), (self.path / "evals.jsonl").open("ab") as file:
            file.write(encoded(json.dumps(line) + "\n"))
        self.evaluated.add((line["step"], line["mode"]))
        self.track(line, eval_prefix(line))

    def record(self, start: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Adds what the run started from, and Session.facts(), to run.json.

        Those of a resumed run stay as they are.
        """
        if self.start is None:
            self.start, self._facts = dict(start), dict(facts)
            self._write_identity()

    def require_same_facts(self, facts: Mapping[str, Any]) -> None:
        """Raises RunDirectoryError if a resumed run meets other facts than it recorded."""
        if self.state is not None and self._facts:
            _require_same(self.path, self._facts, dict(facts), self._changes)

    def write_state(self, state: SavedState) -> None:
        """Makes `state` the checkpoint to resume from."""
        write_atomically(self.path / STATE, json.dumps(asdict(state)) + "\n")
        self.state = state

    def _read_earlier(self) -> None:
        """Reads the id, the last checkpoint and the time of the run that is resumed."""
        self._require_kind()
        identity = read_json(self.path / IDENTITY)
        self.run_id = identity["run_id"]
        self.start = identity.get("start")
        self._facts = {name: identity[name] for name in _FACTS if name in identity}
        self.state = last_checkpoint(self.path)
        before = _settings_of(self.path)
        if self._config.epochs is not None and self._config.epochs == before.get("epochs"):
            # The rows of a resumed run are those of its first start, which counted them.
            self._config = self._config.model_copy(update={"steps": before.get("steps")})
        now = self._config.model_dump(mode="json")
        _require_known(self._changes, {**before, **now, **self._facts})
        # A run may move between a cluster of its own and running servers.
        if not (before.get("cluster") and now["cluster"]):
            before["cluster"] = now["cluster"] = None
        _require_same(self.path, before, now, (*_resumable(before, now), *self._changes))
        # All three are read here, because begin() would find damage too late.
        metrics, evals, _ = [step_lines(file, self.state.step) for file in _step_files(self.path)]
        for line in metrics:
            self.account.add(line)
        if metrics:
            self.elapsed_seconds = metrics[-1].get("time_seconds") or 0.0
        # Those of steps after the checkpoint, too: servers may still hold them.
        versions = step_lines(self.path / "versions.jsonl")
        self.evaluated = {(line["step"], line.get("mode", "")) for line in evals}
        self._require_records(metrics, versions)
        self.versions = [(one.get("version", 0), one.get("digest", "")) for one in versions]
        self.critic_versions = [
            (one["critic_version"], one.get("critic_digest", ""))
            for one in versions
            if "critic_version" in one
        ]

    def _require_records(
        self, metrics: Sequence[Mapping[str, Any]], versions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raises RunDirectoryError unless the files that steps append to have a line of each."""
        assert self.state is not None
        done = range(1, self.state.step + 1)
        damaged = {}
        for name, lines in (("metrics", metrics), ("versions", versions)):
            there = {line["step"] for line in lines}
            if missing := [step for step in done if step not in there]:
                damaged[f"records.{name}"] = f"{name}.jsonl lacks {_steps(missing)}"
        problems = [what for key, what in damaged.items() if not _allowed(key, self._changes)]
        if problems:
            keys = " ".join(f"--change {key}" for key in damaged)
            raise RunDirectoryError(
                f"{self.path}: {'; '.join(problems)}",
                hint=f"put the files back, or continue without: {keys}",
            )

    def _open_trackers(self) -> Trackers:
        # TensorBoard's package takes a second to import.
        from tandem.trackers.trackers import TrackedRun, Trackers

        config = self._config.model_dump(mode="json")
        run = TrackedRun(self.path, self.run_id, self.first_step, config)
        return Trackers(self._config.trackers, run)

    def _require_kind(self) -> None:
        kind = kind_of_run(self.path)
        if kind not in (None, self._kind):
            raise RunDirectoryError(f"{self.path} holds a run of kind {kind}")

    def _write_identity(self) -> None:
        identity = {"run_id": self.run_id, "kind": self._kind} | self._facts
        if self.start is not None:
            identity["start"] = self.start
        write_atomically(self.path / IDENTITY, json.dumps(identity) + "\n")

    def _append_to(self, name: str) -> TextIO:
        # Line-buffered: a line is on disk as soon as it is written.
        return self._files.enter_context(
            (self.path / name).open("a", buffering=1, encoding="utf-8")
        )


def evaluates_after(settings: EvalSettings, step: int, steps: int) -> bool:
    """Whether a run of `steps` steps evaluates after a step; 0: before the first."""
    around = settings.at_start if step == 0 else settings.at_end if step == steps else False
    if around is None:
        around = settings.every > 0
    return around or (step > 0 and settings.every > 0 and step % settings.every == 0)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error(f"run_dir: {path}", error, RunDirectoryError) from None


def _admit(path: Path, resume: bool | str, clean: bool) -> None:
    holds_run = kind_of_run(path) is not None
    if resume is True and not holds_run:
        raise RunDirectoryError(f"{path} holds no run to resume")
    if holds_run and not (resume or clean):
        raise RunDirectoryError(
            f"{path} already holds a run",
            hint="--resume continues after its last checkpoint, --clean discards it",
        )
    # Files of a start that was cut off before it became a run, or of a run removed by hand.
    left = {LOCK, _LOGS, temporary_name(IDENTITY)}
    if path.exists() and not holds_run and {entry.name for entry in path.iterdir()} - left:
        raise RunDirectoryError(f"{path} is not empty and not a run directory")


def _require_same(
    path: Path, before: dict[str, Any], now: dict[str, Any], free: Iterable[str]
) -> None:
    then, today = flat(before), flat(now)
    changed = [
        key
        for key in dict.fromkeys([*then, *today])
        if then.get(key) != today.get(key) and not _allowed(key, free)
    ]
    if changed:
        shown = ", ".join(f"{key} ({then.get(key)} -> {today.get(key)})" for key in changed)
        raise RunDirectoryError(
            f"{path}: a resumed run must keep its configuration; changed: {shown}",
            hint=" ".join(f"--change {key}" for key in changed) + " allows it",
        )


def _resumable(*runs: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the settings that may differ between runs, as patterns of dotted keys."""
    drafts = (SpeculativeSettings.model_validate(run["speculative"]) for run in runs)
    if any(one.changes_responses for one in drafts):
        return RESUMABLE
    return (*RESUMABLE, "speculative")


def _settings_of(path: Path) -> dict[str, Any]:
    """Returns the settings that a run recorded, with today's defaults where it recorded none."""
    file = path / "config.yaml"
    values = _without_none(read_mapping(file, RunDirectoryError))
    try:
        return loading.validate(RunSettings, values, str(file)).model_dump(mode="json")
    except ConfigError as error:
        raise RunDirectoryError(error.message, hint=error.hint) from None


def _without_none(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_none(value) for key, value in values.items() if value is not None}
    return [_without_none(value) for value in values] if isinstance(values, list) else values


def _require_known(changes: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raises RunDirectoryError for a --change that names no setting and no fact of the run."""
    known = [*flat(values), *(f"records.{name}" for name in _RECORDS)]
    for change in changes:
        if not any(_allowed(key, (change,)) for key in known):
            close = difflib.get_close_matches(change, known, n=1)
            raise RunDirectoryError(
                f"--change {change}: the run has no such setting"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )


def _allowed(key: str, free: Iterable[str]) -> bool:
    """Whether a key is among the patterns `free`, or below one of them."""
    return any(fnmatchcase(key, one) or fnmatchcase(key, f"{one}.*") for one in free)


def _steps(steps: Sequence[int]) -> str:
    """Returns the first five steps in words."""
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' * (len(steps) > 1)} {shown}{' …' * (len(steps) > 5)}"


def _remove_run(path: Path) -> None:
    """Removes the files that a run writes, and no others."""
    # Imported here: it takes a moment, and most commands do without.
    from tandem.trackers import event_file

    for name in _FILES:
        (path / name).unlink(missing_ok=True)
    for file in (path / EPISODES).glob("step_*.jsonl"):
        file.unlink()
    for file in (path / ROLLOUTS).glob("step_*.rollouts"):
        file.unlink()
    _remove_trajectories(path, after=-1)
    _remove_checkpoints(path, 0)
    for file in event_file.event_files(path / "tensorboard"):
        file.unlink()
    for folder in (
        "checkpoints/critic",
        "checkpoints",
        STEPS,
        EVALUATIONS,
        EPISODES,
        ROLLOUTS,
        "tensorboard",
    ):
        with suppress(OSError):
            (path / folder).rmdir()


def _remove_trajectories(path: Path, after: int) -> None:
    """Removes the trajectories and answers of the steps after `after`, and half-written files."""
    for folder in (path / STEPS, path / EVALUATIONS):
        for file in folder.glob("step_*"):
            one = TrajectoryFile.of(file)
            if one is not None and one.step > after and not file.is_dir():
                file.unlink()
        for file in folder.glob(".step_*.tmp"):
            file.unlink()


def _remove_checkpoints(path: Path, last: int) -> None:
    """Removes the checkpoints of the steps after `last`."""
    for folder in ("checkpoints", "checkpoints/critic"):
        for entry in _entries_after(path / folder, last):
            if kept := remove_checkpoint(entry):
                _log.warning(
                    f"{entry} is kept: {kept}; while it is there, a server refuses to save a "
                    "checkpoint under this name"
                )


def _entries_after(folder: Path, last: int) -> list[Path]:
    """The entries of a folder that have the name of a step after `last`."""
    entries = sorted(folder.glob("step_*"))
    return [
        entry for entry in entries if is_checkpoint_of_step(entry.name) and number_of(entry) > last
    ]


def _forget_after(path: Path, step: int) -> None:
    # Imported here: it takes a moment, and most commands do without.
    from tandem.trackers import event_file

    # Steps after the checkpoint are done again, and their lines would be there twice.
    for file in _step_files(path):
        if file.exists():
            lines = (json.dumps(value) + "\n" for value in step_lines(file, step))
            write_atomically(file, "".join(lines))
    event_file.forget_after(path / "tensorboard", step)
    # A checkpoint after the one that state.json names would count as the newest when others are
    # pruned, and push out the named one.
    _remove_trajectories(path, step)
    _remove_checkpoints(path, step)


def _step_files(path: Path) -> tuple[Path, Path, Path]:
    return path / "metrics.jsonl", path / "evals.jsonl", path / "versions.jsonl"


def _make(path: Path) -> list[Path]:
    """Makes a directory with its parents; returns those that it made, innermost first."""
    made = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        made.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    return made


def _remove_unused(made: Sequence[Path]) -> None:
    """Removes directories that _make() made for a run that did not begin."""
    if made and [entry.name for entry in made[0].iterdir()] == [LOCK]:
        (made[0] / LOCK).unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
