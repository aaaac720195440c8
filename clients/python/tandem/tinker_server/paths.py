"""Checkpoints by name: tinker://RUN/weights/NAME."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tandem.openai_server.errors import RequestError
from tandem.tinker_server import limits

# A run is named `SESSION:train:NUMBER`; a directory has no colon.
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?::[A-Za-z0-9_-]+)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIX = "tinker://"

TRAINING = "weights"
SAMPLER = "sampler_weights"
_FOLDERS = (TRAINING, SAMPLER)


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint: its run, its folder (`weights` or `sampler_weights`) and its name."""

    run: str
    folder: str
    name: str

    def __post_init__(self) -> None:
        """Raises RequestError for a name that could lead out of the run's folder."""
        if len(self.name) > limits.MAX_NAME_BYTES or not _NAME.fullmatch(self.name):
            raise RequestError(
                f"path: {self.name!r} is not a name of a checkpoint: up to {limits.MAX_NAME_BYTES} "
                "letters, digits, '.', '_' and '-', a letter or digit first",
                "path",
            )

    @classmethod
    def parse(cls, text: str, field: str = "path") -> CheckpointPath:
        """Returns the path that `text` names; raises RequestError, which names `field`."""
        parts = text.removeprefix(_PREFIX).split("/")
        known = text.startswith(_PREFIX) and len(parts) == 3 and parts[1] in _FOLDERS
        if not known or len(parts[0]) > limits.MAX_NAME_BYTES or not _RUN.fullmatch(parts[0]):
            raise RequestError(
                f"{field}: {text[:200]!r} is not {_PREFIX}RUN/({'|'.join(_FOLDERS)})/NAME", field
            )
        return cls(*parts)

    def __str__(self) -> str:
        """Returns the path as the API writes it."""
        return f"{_PREFIX}{self.run}/{self.folder}/{self.name}"

    def directory(self, root: str) -> str:
        """Returns the directory of the folder on the trainer's file system."""
        return str(PurePosixPath(root) / self.run.replace(":", "_") / self.folder)
