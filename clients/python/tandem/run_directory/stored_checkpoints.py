"""Checkpoints in a directory of this machine or at a URL: which there are, and whether whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.stores.manifest import MANIFEST, TRAINING_STATE, Manifest
from tandem.stores.store import Store, is_url
from tandem.utils.byte_progress import ByteCount, OnBytes

# Folders of a run directory, and of that folder itself, that hold checkpoints.
_FOLDERS = ("", "critic", "checkpoints", "checkpoints/critic")
# Begins the names of directories that a server writes, or has left when it was killed.
_UNFINISHED = (".tandem-tmp-", ".tandem-old-")
# Contents of a checkpoint, each with a pattern of the names of its files.
_HOLDS = {
    "weights": r"model.*\.safetensors",
    "adapters": r"adapter_model\.safetensors",
    "optimizer": r"optimizer.*\.safetensors",
    "speculator": r"speculator/.*\.safetensors",
    "values": r"kept_values\.bin",
    "tokenizer": r"tokenizer\.json",
}


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was found.

    Attributes:
        store: its directory.
        manifest: what it should hold; None without a manifest that can be read.
        problems: why it is not whole, by names and sizes; empty if it is.
    """

    store: Store
    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def step(self) -> int | None:
        """The step of the run, if the directory has the name that runs give."""
        match = re.fullmatch(r"step_(\d+)", self.store.name)
        return int(match[1]) if match else None

    @property
    def holds(self) -> tuple[str, ...]:
        """The contents of the checkpoint, in words."""
        names = [file.name for file in self.manifest.files] if self.manifest else []
        return tuple(
            what
            for what, pattern in _HOLDS.items()
            if any(re.fullmatch(pattern, name) for name in names)
        )

    def damage(self, progress: OnBytes | None = None) -> list[str]:
        """Reads every byte; returns what is wrong with the checkpoint, in words."""
        if self.manifest is None or self.problems:
            return list(self.problems)
        count = ByteCount(self.manifest.total_bytes, progress)
        found = (file.damage(self.store, count) for file in self.manifest.files)
        return [problem for problem in found if problem is not None]


def open_place(place: str, field: str) -> Store:
    """Returns the directory at a path of this machine or at a URL."""
    return Store(place if is_url(place) else f"file://{Path(place).absolute()}", field)


def checkpoints_in(place: str, field: str) -> list[StoredCheckpoint]:
    """Returns the checkpoints of a run directory, of a folder of checkpoints, or the one there.

    Those that are not whole are among them, and those that a server is writing. Raises ConfigError,
    beginning with `field`, if there is none; StorageError.
    """
    store = open_place(place, field)
    found = list(_found(store))
    if not found:
        raise ConfigError(f"{field}: there is no checkpoint in {store if is_url(place) else place}")
    return found


def _found(store: Store) -> Iterator[StoredCheckpoint]:
    if (whole := _at(store)) is not None:
        yield whole
        return
    for folder in _FOLDERS:
        parent = store.child(folder)
        for name in parent.folders():
            if name.startswith(_UNFINISHED):
                problem = "it is not complete: a server writes it, or was killed meanwhile"
                yield StoredCheckpoint(parent.child(name), None, (problem,))
            elif (checkpoint := _at(parent.child(name))) is not None:
                yield checkpoint


def _at(store: Store) -> StoredCheckpoint | None:
    """Returns the checkpoint at a directory; None where there is none."""
    there = store.files()
    if MANIFEST not in there:
        if TRAINING_STATE not in there:
            return None
        return StoredCheckpoint(store, None, (f"{MANIFEST} is missing: it is not complete",))
    try:
        manifest = Manifest.parse(store.read(MANIFEST), MANIFEST)
    except ConfigError as error:
        return StoredCheckpoint(store, None, (error.message,))
    return StoredCheckpoint(store, manifest, tuple(manifest.problems(there)))
