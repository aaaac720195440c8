"""Rows of results: one line of JSON each, printed and appended to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Rows:
    """Appends rows to a file. A row with the key "error" is one that could not be measured."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.errors = 0

    def add(self, **row: Any) -> None:
        """Adds a row; it is in the file when the call returns."""
        self.errors += "error" in row
        line = json.dumps(row)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
