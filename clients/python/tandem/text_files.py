"""Reading text and JSON so that what is wrong with a file is an error with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError


def read_text(path: Path, place: str, error: type[ConfigError] = ConfigError) -> str:
    """The text of a UTF-8 file; raises `error`, which begins with `place`, if it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as failure:
        raise error(f"{place}: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise error(f"{place}: not UTF-8: {failure.reason} at byte {failure.start}") from None


def json_object(text: str, place: str, error: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """The object that a JSON text holds; raises `error`, which begins with `place`, if none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise error(f"{place}: not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{place}: not a JSON object")
    return value
