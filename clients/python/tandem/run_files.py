"""The files of a run directory: their names, how they are read and how they are replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem import text_files
from tandem.errors import RunDirectoryError
from tandem.text_files import json_object

IDENTITY = "run.json"
STATE = "state.json"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    return text_files.read_text(path, str(path), RunDirectoryError)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    return json_object(read_text(path), str(path), RunDirectoryError)


def step_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file of steps, up to the step `last`, or all.

    None if the file does not exist. RunDirectoryError names the line that is no step.
    """
    if not path.exists():
        return []
    # After the last line feed stands nothing, or a line that a crash cut off.
    *complete, _ = read_text(path).split("\n")
    kept = []
    for place, value in placed_objects(path, complete):
        if not isinstance(value.get("step"), int):
            raise RunDirectoryError(f"{place}: step: not an integer")
        if last is None or value["step"] <= last:
            kept.append(value)
    return kept


def placed_objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of the lines of `path` that are not blank, each with its PATH:LINE."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, json_object(line, place, RunDirectoryError)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file so that no reader, and no crash, sees half of it.

    Raises RunDirectoryError, and leaves the file as it was, when it cannot, as on a full disk.
    """
    temporary = path.with_name(temporary_name(path.name))
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a RunDirectoryError, which names `path`, of what the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{path}: {error.strerror}") from None


def temporary_name(name: str) -> str:
    """Under what name write_atomically() prepares the file `name`."""
    return f".{name}.tmp"


def kind_of_run(path: Path) -> str | None:
    """The command that wrote the run directory `path`; None if it holds no run."""
    file = path / IDENTITY
    return read_json(file).get("kind", "unknown") if file.exists() else None


def trajectory_file(path: Path, step: int) -> Path:
    """Where the run directory `path` keeps the trajectories of a step."""
    return path / "trajectories" / f"step_{step}.jsonl"


def next_attempt(logs: Path) -> int:
    """The N after the last attempt_N of a folder, whatever was removed in between."""
    return 1 + max(map(number_of, logs.glob("attempt_*")), default=0)


def number_of(path: Path) -> int:
    """The N of step_N, step_N.jsonl and attempt_N.log; 0 for other names."""
    match = re.fullmatch(r"[a-z]+_(\d+)", path.stem)
    return int(match[1]) if match else 0
