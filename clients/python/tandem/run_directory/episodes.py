"""The record of what environments said: episodes/step_N.jsonl, a line for each of their calls.

A step that is drawn again, after a crash, gets the same answers from the record, whatever the
environment would say now. Only whole episodes are replayed: an environment that was cut off has
lost its state, and its episode begins anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from tandem.utils.atomic_files import write_atomically, writing

# An episode of a step: the index of its prompt, and its sample.
EpisodeKey = tuple[int, int]
FOLDER = "episodes"


def episodes_file(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's episodes."""
    return run_dir / FOLDER / f"step_{step}.jsonl"


class EpisodeRecord:
    """The record of a step's episodes, read and continued; a context manager.

    Entering it drops what is left of episodes that did not end.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._path = episodes_file(run_dir, step)
        self._whole: dict[EpisodeKey, list[dict[str, Any]]] = {}
        self._file: BinaryIO
        self._unsynced = False

    def __enter__(self) -> Self:
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._whole = _whole_episodes(self._path)
            lines = (line for episode in self._whole.values() for line in episode)
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines))
            self._file = self._path.open("ab")
        return self

    def __exit__(self, *exc: object) -> None:
        with writing(self._path):
            self.sync()
            self._file.close()

    def replay(self, key: EpisodeKey) -> list[dict[str, Any]]:
        """Returns the lines of a whole episode, in order; none if it is not recorded."""
        return self._whole.get(key, [])

    def forget(self, key: EpisodeKey) -> None:
        """Drops a recorded episode that does not fit any more: the models write otherwise now."""
        self._whole.pop(key, None)
        self.add(key, {"forgotten": True})

    def add(self, key: EpisodeKey, line: Mapping[str, Any]) -> None:
        """Appends a line of an episode; sync() brings it onto the disk."""
        prompt, sample = key
        with writing(self._path):
            text = json.dumps({"prompt": prompt, "sample": sample} | dict(line))
            self._file.write(text.encode() + b"\n")
            self._file.flush()
        self._unsynced = True

    def sync(self) -> None:
        """Returns once every line is on the disk."""
        if self._unsynced:
            with writing(self._path):
                os.fsync(self._file.fileno())
            self._unsynced = False


class NoRecord:
    """The record of episodes that are neither kept nor replayed, those of evaluations."""

    def replay(self, key: EpisodeKey) -> list[dict[str, Any]]:
        """Returns no lines."""
        return []

    def forget(self, key: EpisodeKey) -> None:
        """Does nothing: there is nothing to forget."""

    def add(self, key: EpisodeKey, line: Mapping[str, Any]) -> None:
        """Drops a line."""

    def sync(self) -> None:
        """Does nothing: nothing is on the disk."""


def _whole_episodes(path: Path) -> dict[EpisodeKey, list[dict[str, Any]]]:
    """Returns the episodes of a file that ended; a last line that was cut off is left out."""
    if not path.exists():
        return {}
    episodes: dict[EpisodeKey, list[dict[str, Any]]] = {}
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
            key = line["prompt"], line["sample"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.get("forgotten"):
            episodes.pop(key, None)
        else:
            episodes.setdefault(key, []).append(line)
    return {key: lines for key, lines in episodes.items() if "end" in lines[-1]}
