"""Directories that are written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import ConfigError, file_error


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yields a temporary directory, which becomes `destination` at the end of the block.

    An exception in the block removes it instead. Raises ConfigError where `destination` exists and
    is not an empty directory, and for paths that cannot be used; StorageError for a full disk.
    """
    place = destination.absolute()
    temporary = place.with_name(f".{place.name}.new")
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(f"{destination} exists", hint="choose another directory")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if place.exists():
                place.rmdir()
            temporary.rename(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise file_error(error.filename or destination, error) from None
