"""The files of a run directory: their names, reading them and replacing them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tandem.errors import RunDirectoryError, file_error
from tandem.utils import text_files
from tandem.utils.text_files import encoded, json_object

IDENTITY = "run.json"
STATE = "state.json"
# The commands that write run directories.
KINDS = ("train", "sft", "dpo", "reward-model")


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file."""
    return text_files.read_text(path, str(path), RunDirectoryError)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file."""
    return json_object(read_text(path), str(path), RunDirectoryError)


def step_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Returns the complete lines of a JSON-lines file of steps, up to the step `last`, or all.

    There are none if the file does not exist. Raises RunDirectoryError, which names the line, for a
    line that is no step.
    """
    if not path.exists():
        return []
    # The text after the last line feed is empty, or a line that a crash cut off.
    *complete, _ = read_text(path).split("\n")
    kept = []
    for place, value in placed_objects(path, complete):
        if not isinstance(value.get("step"), int):
            raise RunDirectoryError(f"{place}: step: not an integer")
        if last is None or value["step"] <= last:
            kept.append(value)
    return kept


def placed_objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of the lines of `path` that are not blank, each with its PATH:LINE."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, json_object(line, place, RunDirectoryError)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file so that no reader, and no crash, sees half of it.

    Raises StorageError, and leaves the file as it was, when it cannot, as on a full disk.
    """
    with replacing(path) as file:
        file.write(encoded(content) if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` at the end of the block, as a whole.

    Raises StorageError, and leaves the file as it was, when it cannot be written.
    """
    temporary = path.with_name(temporary_name(path.name))
    with writing(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into an error that names `path`, as file_error() does."""
    try:
        yield
    except OSError as error:
        raise file_error(path, error, RunDirectoryError) from None


def temporary_name(name: str) -> str:
    """Returns the name under which write_atomically() prepares the file `name`."""
    return f".{name}.tmp"


def kind_of_run(path: Path) -> str | None:
    """Returns the command that wrote the run directory `path`; None if it is not a run directory.

    Other tools write a run.json, too: the one of a run names a run id and a kind.
    """
    file = path / IDENTITY
    if not file.exists():
        return None
    identity = read_json(file)
    ours = isinstance(identity.get("run_id"), str) and identity.get("kind") in KINDS
    return identity["kind"] if ours else None


def is_checkpoint_of_step(name: str) -> bool:
    """Whether `name` is one that a run gives to the checkpoint of a step."""
    return re.fullmatch(r"step_\d+", name) is not None


def next_attempt(logs: Path) -> int:
    """Returns the N after the highest attempt_N of a folder."""
    return 1 + max(map(number_of, logs.glob("attempt_*")), default=0)


def number_of(path: Path) -> int:
    """Returns the N of step_N and attempt_N.log; 0 for other names."""
    match = re.fullmatch(r"[a-z]+_(\d+)", path.stem)
    return int(match[1]) if match else 0
