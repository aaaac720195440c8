"""Reading text and JSON; errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError


def read_text(path: Path, place: str, error: type[ConfigError] = ConfigError) -> str:
    """Reads a UTF-8 file. Raises `error`, beginning with `place`, if it is no such file."""
    return decoded(read_bytes(path, place, error), place, error)


def read_bytes(path: Path, place: str, error: type[ConfigError] = ConfigError) -> bytes:
    """Reads a file. Raises `error`, beginning with `place`, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        raise error(f"{place}: {failure.strerror}") from None


def decoded(data: bytes, place: str, error: type[ConfigError] = ConfigError) -> str:
    """Decodes UTF-8 bytes. Raises `error`, beginning with `place`, for other bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise error(f"{place}: not UTF-8: {failure.reason} at byte {failure.start}") from None


def json_object(text: str, place: str, error: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """Parses a JSON object. Raises `error`, beginning with `place`, for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise error(f"{place}: not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{place}: not a JSON object")
    return value
