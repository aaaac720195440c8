"""Reading text and JSON so that what is wrong with a file is an error with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError


def read_text(path: Path, place: str, error: type[ConfigError] = ConfigError) -> str:
    """The text of a UTF-8 file; raises `error`, which begins with `place`, if it has none."""
    return decoded(read_bytes(path, place, error), place, error)


def read_bytes(path: Path, place: str, error: type[ConfigError] = ConfigError) -> bytes:
    """What a file holds; raises `error`, which begins with `place`, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        raise error(f"{place}: {failure.strerror}") from None


def decoded(data: bytes, place: str, error: type[ConfigError] = ConfigError) -> str:
    """UTF-8 as text; raises `error`, which begins with `place`, if it is none."""
    try:
        return data.decode()
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
