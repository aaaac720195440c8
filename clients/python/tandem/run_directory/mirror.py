"""A copy of a run at a URL, from which the run resumes on another machine.

A checkpoint is uploaded file by file, its manifest last; then what resuming needs beside it, and
state.json, which names the checkpoint, at the very end. Whatever breaks off, the copy is that of
the checkpoint before.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import asdict
from pathlib import Path

from tandem.errors import ConfigError, StorageError
from tandem.run_directory.checkpoints import SavedState
from tandem.run_directory.directory import ROLLOUTS
from tandem.stores.manifest import MANIFEST, TRAINING_STATE
from tandem.stores.store import Store
from tandem.stores.transfers import copy_to, of_last_checkpoint, remove, upload
from tandem.utils.atomic_files import IDENTITY, STATE, read_json
from tandem.utils.byte_progress import ByteCount
from tandem.utils.text_files import json_object

_log = logging.getLogger(__name__)

_FIELD = "checkpoint.upload"
# Files that a resumed run reads beside a checkpoint.
_RECORDS = (IDENTITY, "config.yaml", "metrics.jsonl", "versions.jsonl", "evals.jsonl")
# Seconds between the tries of an upload.
RETRY_SECONDS = (1.0, 4.0, 15.0, 60.0)


class Mirror:
    """Uploads a run's checkpoints to `url` in a thread; a context manager.

    One that is saved while another is uploaded waits for it, and replaces one that waits.

    Attributes:
        uploads: number of checkpoints that are there as a whole.
        failures: number of those that could not be uploaded.
    """

    def __init__(self, run_dir: Path, url: str, keep: int, *, required: bool) -> None:
        """Prepares to upload; `keep` checkpoints stay at the URL, or all for 0.

        With `required`, settle() raises what an upload failed with.
        """
        self.uploads = self.failures = 0
        self._run_dir = run_dir
        self._store = Store(url, _FIELD)
        self._keep = keep
        self._required = required
        self._error: StorageError | None = None
        self._changed = threading.Condition()
        self._waiting: SavedState | None = None
        self._busy = self._closed = False
        self._stop = threading.Event()

    def require_own(self, run_id: str) -> None:
        """Raises ConfigError if the URL holds another run. A store that does not answer may."""
        try:
            there = self._store.files()
            if IDENTITY not in there:
                return
            text = self._store.read(IDENTITY).decode()
        except StorageError as error:
            if self._required:
                raise
            _log.warning(f"{_FIELD}: {error.message}; the run continues")
            return
        held = json_object(text, f"{_FIELD}: {self._store}/{IDENTITY}").get("run_id")
        if held != run_id:
            raise ConfigError(
                f"{_FIELD}: {self._store} holds the run {held}, not {run_id}",
                hint="choose another URL, or remove what is there",
            )

    def __enter__(self) -> Mirror:
        # An upload that hangs must not keep the process alive.
        threading.Thread(target=self._work, name="upload", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def add(self, state: SavedState) -> None:
        """Has the checkpoint of `state`, which is on disk, uploaded."""
        with self._changed:
            self._waiting = state
            self._changed.notify_all()

    def metrics(self) -> dict[str, int]:
        """Returns the numbers of checkpoints for a line of metrics.jsonl."""
        return {"checkpoint/uploads": self.uploads, "checkpoint/upload_failures": self.failures}

    def settle(self, *, wait: bool = True) -> None:
        """Raises what a required upload failed with, once; waits for uploads unless told not to."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self._busy and self._waiting is None)
            error, self._error = self._error, None
        if error is not None and self._required:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._closed:
                    return
                state, self._waiting = self._waiting, None
                self._busy = True
            error = self._upload_with_retries(state)
            with self._changed:
                self._busy = False
                self._error = error
                self.uploads += error is None
                self.failures += error is not None
                self._changed.notify_all()

    def _upload_with_retries(self, state: SavedState) -> StorageError | None:
        for seconds in (*RETRY_SECONDS, None):
            try:
                self._upload(state)
                _log.info(f"the checkpoint of step {state.step} is at {self._store}")
                return None
            except Exception as error:  # The run continues without an upload that fails.
                problem = error.message if isinstance(error, StorageError) else repr(error)
            if seconds is None or self._waiting is not None or self._stop.wait(seconds):
                break
        _log.warning(f"the checkpoint of step {state.step} could not be uploaded: {problem}")
        return StorageError(f"{_FIELD}: step {state.step}: {problem}")

    def _upload(self, state: SavedState) -> None:
        for folder in filter(None, (state.trainer, state.critic)):
            upload(
                self._run_dir / folder, self._store.child(folder), MANIFEST, first=TRAINING_STATE
            )
        rollouts = state.rollouts.files if state.rollouts is not None else ()
        names = [*_RECORDS, *(f"{ROLLOUTS}/step_{step}.rollouts" for step in rollouts)]
        for name in names:
            if (self._run_dir / name).exists():
                self._store.upload(self._run_dir / name, name, ByteCount(0, None))
        self._store.write(STATE, (json.dumps(asdict(state)) + "\n").encode())
        self._remove_others(state, set(names))

    def _remove_others(self, state: SavedState, names: set[str]) -> None:
        """Removes checkpoints that do not stay, and rollouts that no checkpoint names."""
        for folder in ("checkpoints", "checkpoints/critic"):
            parent = self._store.child(folder)
            steps = [one for one in parent.folders() if re.fullmatch(r"step_\d+", one)]
            earlier = sorted(one for one in steps if int(one[5:]) <= state.step)
            kept = earlier[-self._keep :] if self._keep else earlier
            for name in set(steps) - set(kept):
                remove(parent.child(name), MANIFEST)
        for name in self._store.child(ROLLOUTS).files():
            if f"{ROLLOUTS}/{name}" not in names:
                self._store.remove(f"{ROLLOUTS}/{name}")


def restore_run(run_dir: Path, url: str) -> str | None:
    """Fetches the run at `url` where `run_dir` is missing or empty; returns that in words.

    Nothing is done, and None returned, where the directory has files or the URL has no checkpoint.
    Raises ConfigError for a copy that is damaged; StorageError.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        return None
    store = Store(url, _FIELD)
    if STATE not in store.files():
        return None
    copy_to(run_dir, store, _FIELD, of_last_checkpoint(store, _FIELD))
    step = read_json(run_dir / STATE).get("step")
    return f"{run_dir} is empty: the run of {store} is fetched, with its checkpoint of step {step}"
