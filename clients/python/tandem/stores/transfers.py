"""Copies of directories between stores and this machine.

What a store has in part is never taken for whole: the file that makes a directory usable (the
manifest of a checkpoint, the config.json of a model) is uploaded last, and checkpoints are verified
when they are downloaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from tandem.errors import ConfigError, StorageError, file_error
from tandem.stores.manifest import MANIFEST, TRAINING_STATE, Manifest
from tandem.stores.store import Store, StoredFile
from tandem.utils.atomic_files import STATE
from tandem.utils.byte_progress import ByteCount, OnBytes
from tandem.utils.new_directory import new_directory
from tandem.utils.text_files import json_object

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Returns the folder of what was fetched: $TANDEM_CACHE, or tandem in the user's cache."""
    if named := os.environ.get("TANDEM_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem"


def fetch(
    store: Store,
    field: str,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: OnBytes | None = None,
) -> Path:
    """Returns a copy of the store's `wanted` files in the cache, which has the store's name.

    Another state of the store gives another directory, and the same one is not copied again. Errors
    as copy_to().
    """
    files = [file for name, file in store.files().items() if wanted(name)]
    target = cache_folder() / "stores" / _fingerprint(store, files) / store.name
    with _alone(target.parent):
        if not target.is_dir():
            _log.info(f"fetching {store} to {target}")
            copy_to(target, store, field, wanted, progress)
    return target


def copy_to(
    target: Path,
    store: Store,
    field: str,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: OnBytes | None = None,
) -> None:
    """Makes the new directory `target` a copy of the store's `wanted` files, or makes none.

    Raises ConfigError, beginning with `field`, for a store without such files, a checkpoint that is
    damaged or not whole there, and a `target` that exists; StorageError.
    """
    there = store.files()
    files = [file for name, file in there.items() if wanted(name)]
    if not files:
        raise ConfigError(f"{field}: {store} does not exist, or has none of the files")
    folders = {file.name.rpartition("/")[0] for file in files}
    checkpoints = [one for one in sorted(folders) if _in(one, TRAINING_STATE) in there]
    for folder in checkpoints:
        if _in(folder, MANIFEST) not in there:
            raise ConfigError(
                f"{field}: {store}: {folder or 'it'} is a checkpoint without {MANIFEST}",
                hint="its upload broke off, or has not ended yet",
            )
    with new_directory(target) as copied:
        download(store, copied, files, progress)
        for folder in checkpoints:
            _verify_copy(store, folder, copied, {file.name for file in files}, field)


def fetch_checkpoint(url: str, field: str, progress: OnBytes | None = None) -> Path:
    """Returns a copy of the checkpoint, or of the run directory with its last checkpoint, at a URL.

    Errors as fetch(), and ConfigError for what is neither.
    """
    store = Store(url, field)
    there = store.files()
    if MANIFEST in there or TRAINING_STATE in there:
        return fetch(store, field, progress=progress)
    if STATE not in there:
        raise ConfigError(f"{field}: {store} is neither a checkpoint nor a run directory")
    return fetch(store, field, of_last_checkpoint(store, field), progress)


def of_last_checkpoint(store: Store, field: str) -> Callable[[str], bool]:
    """Returns whether a name is of a run's last checkpoint, or of a file beside the checkpoints."""
    state = json_object(store.read(STATE).decode(), f"{field}: {store}/{STATE}", ConfigError)
    folders = [f"{state[part]}/" for part in ("trainer", "critic") if state.get(part)]
    return lambda name: not name.startswith("checkpoints/") or name.startswith(tuple(folders))


def download(
    store: Store, folder: Path, files: Sequence[StoredFile], progress: OnBytes | None = None
) -> None:
    """Copies files of a store into a folder. Raises StorageError for one that was cut off."""
    count = ByteCount(sum(file.size for file in files), progress)
    for file in files:
        copy = folder / file.name
        store.download(file.name, copy, count)
        if copy.stat().st_size != file.size:
            raise StorageError(f"{store}: {file.name} changed while it was read")


def upload(
    folder: Path, store: Store, last: str, progress: OnBytes | None = None, first: str | None = None
) -> None:
    """Makes the store a copy of a folder, whose file `last` is the last one there.

    What the store has of an earlier copy is replaced; it is not whole from then on until the end.
    """
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    names.sort(key=lambda name: (name == last, name != first))
    there = store.files()
    if last in there:
        store.remove(last)
    for name in there.keys() - set(names):
        store.remove(name)
    count = ByteCount(sum((folder / name).stat().st_size for name in names), progress)
    for name in names:
        store.upload(folder / name, name, count)


def remove(store: Store, first: str) -> None:
    """Removes all files of a store, `first` before the others, so that no part passes for whole."""
    for name in sorted(store.files(), key=lambda name: name != first):
        store.remove(name)


def matching(patterns: Collection[str], unread: Collection[str]) -> Callable[[str], bool]:
    """Returns whether a name matches one of `patterns` and none of `unread`."""

    def matches(name: str) -> bool:
        return any(fnmatch(name, one) for one in patterns) and not any(
            fnmatch(name, one) for one in unread
        )

    return matches


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from copying into the same folder meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise file_error(folder, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(store: Store, files: Sequence[StoredFile]) -> str:
    text = json.dumps([store.url, [[one.name, one.size, one.mark] for one in files]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _verify_copy(store: Store, folder: str, copied: Path, names: set[str], field: str) -> None:
    """Raises ConfigError unless the files of a checkpoint are those of its manifest."""
    place = f"{field}: {store.child(folder)}"
    manifest = Manifest.parse(store.read(_in(folder, MANIFEST)), f"{place}/{MANIFEST}")
    copy = Store(f"file://{(copied / folder).absolute()}", field)
    for entry in manifest.files:
        if _in(folder, entry.name) in names and (problem := entry.damage(copy)):
            raise ConfigError(f"{place}: {problem}")
