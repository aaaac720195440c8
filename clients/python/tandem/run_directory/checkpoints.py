"""The checkpoints of a run: the one that it continues from, and their paths."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from tandem.errors import ConfigError, RunDirectoryError
from tandem.stores.manifest import MANIFEST
from tandem.utils.atomic_files import STATE, kind_of_run, read_json


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SavedRollouts:
    """The rollouts that an asynchronous run had drawn ahead of a checkpoint.

    Attributes:
        staleness: `async.max_staleness`.
        origin: that of the run's Schedule.
        files: by step, in their order, the digest of its file.
    """

    staleness: int
    origin: int
    files: dict[str, str]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SavedState:
    """A checkpoint that belongs to the end of `step`.

    Attributes:
        trainer: path of the trainer's checkpoint, relative to the run directory.
        critic: the same of the critic's, if the run has a critic.
        digest: of the senior's weights; None if an earlier release saved them.
        examples_drawn: how many examples of the data the run had drawn until then; None if an
            earlier release saved it, which drew the same number in every step.
        kl_coefficient: that the next step begins with where `kl_control` adapts it; None without a
            KL, or if an earlier release saved it.
        rollouts: those of an asynchronous run; None for any other.
    """

    step: int
    version: int
    trainer: str
    critic: str | None = None
    digest: str | None = None
    examples_drawn: int | None = None
    kl_coefficient: float | None = None
    rollouts: SavedRollouts | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The directories of a checkpoint.

    Attributes:
        trainer: the trainer's step directory, absolute.
        critic: the critic's, if there is one.
        digest: the digest of the senior's weights, if it is known.
    """

    trainer: Path
    critic: Path | None = None
    digest: str | None = None


def last_checkpoint(path: Path) -> SavedState:
    """Returns the checkpoint that state.json of the run directory `path` names.

    Raises RunDirectoryError if it names none.
    """
    file = path / STATE
    if not file.exists():
        raise RunDirectoryError(f"{path} has no checkpoint", hint="--clean starts the run again")
    try:
        return SavedState(**read_json(file))
    except ValidationError as error:
        [problem, *_] = error.errors()
        field = ".".join(map(str, problem["loc"]))
        raise RunDirectoryError(f"{file}: {field}: {problem['msg']}") from None


def checkpoint_at(path: Path) -> Checkpoint:
    """Returns the checkpoint at `path`: a trainer's, or the last one of a run directory."""
    path = path.resolve()
    return Checkpoint(path) if kind_of_run(path) is None else checkpoint_of(path)


def checkpoint_of(path: Path) -> Checkpoint:
    """Returns the last checkpoint of the run directory `path`."""
    state = last_checkpoint(path)
    critic = None if state.critic is None else path / state.critic
    return Checkpoint(path / state.trainer, critic, state.digest)


def require_here(checkpoint: Checkpoint, field: str) -> None:
    """Raises ConfigError, beginning with `field`, unless this machine sees the checkpoint."""
    if not (checkpoint.trainer / MANIFEST).is_file():
        raise ConfigError(
            f"{field}: {checkpoint.trainer} is neither a checkpoint nor a run directory"
        )


class _File(BaseModel):
    name: str


class _Manifest(BaseModel):
    """The fields of manifest.json that say which files are the checkpoint's.

    Attributes:
        name: of the directory that the server wrote; empty in manifests of earlier releases.
    """

    name: str = ""
    files: list[_File]


def remove_checkpoint(path: Path) -> str | None:
    """Removes the directory `path` if it is a checkpoint that a server saved there.

    It is one while its manifest has its name and lists every file in it, the rule of the servers.
    Anything else stays as it is, and the reason is returned.
    """
    file = path / MANIFEST
    if path.is_symlink() or not file.is_file():
        return "it is not a checkpoint"
    try:
        manifest = _Manifest.model_validate(read_json(file))
    except (RunDirectoryError, ValidationError):
        return "its manifest.json is damaged"
    if manifest.name != path.name:
        return f"its manifest names the checkpoint {manifest.name!r}"
    listed = {path / MANIFEST, *(path / one.name for one in manifest.files)}
    folders = {one.parent for one in listed} - {path}
    entries = sorted(path.rglob("*"))
    for entry in entries:
        is_folder = entry.is_dir() and not entry.is_symlink()
        if entry not in (folders if is_folder else listed):
            return f"{entry.relative_to(path)} does not belong to the checkpoint"
    for entry in reversed(entries):  # a folder after what is in it
        if entry in folders:
            entry.rmdir()
        elif entry != file:
            entry.unlink()
    # The manifest goes last, so that the next removal completes one that was cut off.
    file.unlink()
    path.rmdir()
    return None


def checkpoint_name(step: int) -> str:
    """Returns the name of a step's checkpoint directory; names sort by step."""
    return f"step_{step:06d}"
