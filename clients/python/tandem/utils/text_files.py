"""Reading text and JSON, with errors that name the file, and writing any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, file_error

# The first bytes of a file that git-lfs has not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_text(path: Path, place: str, error: type[ConfigError] = ConfigError) -> str:
    """Reads a UTF-8 file. Raises `error`, beginning with `place`, if it is not such a file."""
    return decoded(read_bytes(path, place, error), place, error)


def read_bytes(path: Path, place: str, error: type[ConfigError] = ConfigError) -> bytes:
    """Reads a file. Raises `error` or StorageError, beginning with `place`, if it cannot."""
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise file_error(place, failure, error) from None
    _refuse_lfs_pointer(data, path, place, error)
    return data


def require_no_lfs_pointer(path: Path, place: str) -> None:
    """Raises ConfigError, beginning with `place`, for a file that git-lfs has not fetched yet.

    Also for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as failure:
        raise file_error(place, failure) from None
    _refuse_lfs_pointer(start, path, place, ConfigError)


def _refuse_lfs_pointer(data: bytes, path: Path, place: str, error: type[ConfigError]) -> None:
    if data.startswith(_LFS_POINTER):
        raise error(
            f"{place}: is a git-lfs pointer, not the file itself",
            hint=f"`git lfs pull` in {path.parent} fetches what it points to",
        )


def decoded(data: bytes, place: str, error: type[ConfigError] = ConfigError) -> str:
    """Decodes UTF-8 bytes. Raises `error`, beginning with `place`, for other bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise error(f"{place}: not UTF-8: {failure.reason} at byte {failure.start}") from None


def encoded(text: str) -> bytes:
    """Encodes any text as UTF-8.

    What UTF-8 has no bytes for, as half a surrogate pair that a model or a service sent, becomes
    its escape.
    """
    return text.encode(errors="backslashreplace")


def json_object(text: str, place: str, error: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """Parses a JSON object. Raises `error`, beginning with `place`, for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise error(f"{place}: not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{place}: not a JSON object")
    return value
