"""Runs the `tandem` command in this process, and reads the files that it wrote."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tandem.cli import app
from tandem.run_directory.trajectories.files import read_records, step_file


@dataclass(frozen=True)
class Printed:
    """The output of a command on both streams."""

    stdout: str
    stderr: str


def tandem(*arguments: Any, check: int = 0) -> Printed:
    """Runs the command, which must end with the exit code `check`.

    It runs in this process, which saves a start of Python for every call.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tandem", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        app.main()
    printed = Printed(out.getvalue(), err.getvalue())
    assert ended.value.code == check, printed.stderr + printed.stdout
    return printed


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(run: Path, step: int) -> list[dict[str, Any]]:
    """The trajectories of a step of a run."""
    return read_records(step_file(run, step))


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file except logs, by path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
