"""The checkpoints of a server's runs: what was written, what is in use, and deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from tandem.openai_server.errors import RequestError
from tandem.run_directory.checkpoints import remove_checkpoint
from tandem.tinker_server.paths import CheckpointPath


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, at a time (seconds of the epoch), with its client's notes."""

    path: CheckpointPath
    seconds: float
    metadata: Mapping[str, str]


class Checkpoints:
    """The checkpoints in one directory of the trainer's file system.

    Those that this server wrote are remembered. Whatever lies there can be loaded and deleted.
    """

    def __init__(self, root: str) -> None:
        """Arguments as in app.Settings: `root` is its `checkpoints`."""
        self._root = root
        # By directory: two spellings of a run's name are one directory.
        self._saved: dict[str, Saved] = {}
        self._used: set[str] = set()

    def folder(self, path: CheckpointPath) -> str:
        """Returns the directory in which the trainer writes the checkpoint by its name."""
        return path.directory(self._root)

    def directory(self, path: CheckpointPath) -> str:
        """Returns the checkpoint's own directory."""
        return f"{self.folder(path)}/{path.name}"

    def of(self, run: str) -> list[Saved]:
        """Returns the checkpoints of a run that this server wrote, in their order."""
        return [one for one in self._saved.values() if one.path.run == run]

    def all(self) -> list[Saved]:
        """Returns all checkpoints that this server wrote, in their order."""
        return list(self._saved.values())

    def __contains__(self, path: CheckpointPath) -> bool:
        """Whether this server wrote the checkpoint, and nobody has deleted it since."""
        return self.directory(path) in self._saved

    def add(self, saved: Saved) -> None:
        """Remembers a checkpoint that was written; one that it replaces is forgotten."""
        directory = self.directory(saved.path)
        self._saved.pop(directory, None)
        self._saved[directory] = saved

    @contextmanager
    def using(self, path: CheckpointPath) -> Iterator[None]:
        """Holds a checkpoint that is written, loaded or deleted.

        Raises RequestError if it is held already.
        """
        directory = self.directory(path)
        if directory in self._used:
            raise RequestError(
                f"path: {path} is in use: it is being written, loaded or deleted", "path"
            )
        self._used.add(directory)
        try:
            yield
        finally:
            self._used.remove(directory)

    async def delete(self, path: CheckpointPath) -> CheckpointPath:
        """Removes a checkpoint's directory, which must be on this machine.

        Returns the path under which it was written, in which its run may be spelt differently.

        Raises RequestError if there is none, if it is in use, and if it holds other files than
        those of the checkpoint.
        """
        with self.using(path):
            directory = Path(self.directory(path))
            if not directory.is_dir():
                raise RequestError(
                    f"path: there is no {path}: this machine has no directory {directory}",
                    "path",
                    status=HTTPStatus.NOT_FOUND,
                )
            try:
                reason = await asyncio.to_thread(remove_checkpoint, directory)
            except OSError as error:
                reason = f"{error.strerror}: {error.filename}"
            if reason is not None:
                raise RequestError(f"path: {path} was not deleted: {reason}", "path")
            saved = self._saved.pop(str(directory), None)
            return path if saved is None else saved.path
