"""A directory at a URL: `s3://bucket/models/one`, `zip://one::file:///models.zip`, `file://…`.

fsspec has the protocols; those of object stores come with packages of their own (s3fs, gcsfs,
adlfs), which read credentials where such programs do. No URL is shown with the password that it may
hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, StorageError
from tandem.utils.byte_progress import ByteCount

_BLOCK_BYTES = 1 << 22
# The keys of fsspec's descriptions that change with a file's bytes; which there are depends on the
# protocol.
_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "CRC", "mtime", "created")


def is_url(name: str) -> bool:
    """Whether a text is a URL, and no path and no name of the Hub."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", name) is not None


def shown(url: str) -> str:
    """Returns a URL for people: without passwords, and a path for one of this machine."""
    return re.sub(r"://[^/@:]*(:[^/@]*)?@", "://", url).removeprefix("file://")


class StoreUrl(str):
    """A URL among the values of a settings file, which is fetched when all settings are known."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a store.

    Attributes:
        name: relative to the store's directory, with slashes.
        size: in bytes.
        mark: changes with the file's bytes, as far as the store can say.
    """

    name: str
    size: int
    mark: str


class Store:
    """The directory at `url`, which need not exist yet.

    Methods raise StorageError, which names the file, when the store fails or has no such file.
    """

    def __init__(self, url: str, field: str) -> None:
        """Opens a store, without a look at it.

        Raises ConfigError, beginning with `field`, for a protocol that is unknown or whose package
        is missing.
        """
        import fsspec

        self.url = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigError(f"{field}: {shown(url)}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{field}: {shown(url)}: {error}") from None
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        """Returns the URL for people."""
        return shown(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._root.rpartition("/")[2] or "root"

    def child(self, name: str) -> Store:
        """Returns the directory `name` of this one; the same one for an empty name."""
        child = object.__new__(Store)
        child.url = self._url_of(name)
        child._files, child._root = self._files, self._path(name)
        return child

    def files(self) -> dict[str, StoredFile]:
        """Returns the files of the directory and of its folders by name; none if there is none."""
        with self._failing(""):
            self._files.invalidate_cache()
            try:
                found: Mapping[str, Any] = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        # A store that has a file of the directory's own name lists it alone.
        begin = f"{self._root}/".lstrip("/")
        named = {path.lstrip("/").removeprefix(begin): info for path, info in found.items()}
        return {
            name: StoredFile(name, int(info["size"]), _mark(info))
            for name, info in sorted(named.items())
            if name and name != self._root.lstrip("/")
        }

    def folders(self) -> list[str]:
        """Returns the names of the folders in the directory; none if there is none."""
        with self._failing(""):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        paths = (one["name"].rstrip("/") for one in found if one["type"] == "directory")
        return sorted(path.rpartition("/")[2] for path in paths)

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a file."""
        with self._failing(name), self._files.open(self._path(name), "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file."""
        return b"".join(self.blocks(name))

    def download(self, name: str, target: Path, count: ByteCount) -> None:
        """Copies a file into a new file of this machine."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for block in self.blocks(name):
                file.write(block)
                count.add(len(block))

    def upload(self, source: Path, name: str, count: ByteCount) -> None:
        """Copies a file of this machine. Object stores show it once it is whole, disks at once."""
        path = self._path(name)
        with self._failing(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with source.open("rb") as file, self._files.open(path, "wb") as stream:
                while block := file.read(_BLOCK_BYTES):
                    stream.write(block)
                    count.add(len(block))

    def write(self, name: str, content: bytes) -> None:
        """Makes a file of these bytes."""
        path = self._path(name)
        with self._failing(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Removes a file, or nothing if there is none."""
        with self._failing(name):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _url_of(self, name: str) -> str:
        # The path of a chained URL is in its first part.
        first, chained, rest = self.url.partition("::")
        return f"{first.rstrip('/')}/{name}{chained}{rest}" if name else self.url

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Turns whatever a store raises into a StorageError with the file's URL.

        The packages of the protocols have exceptions of their own.
        """
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise StorageError(
                f"{shown(self._url_of(name))}: {type(error).__name__}: {reason}"
            ) from None


def _mark(info: Mapping[str, Any]) -> str:
    for key in _MARKS:
        if info.get(key) is not None:
            return f"{info[key]}"
    return f"{info.get('LastModified', info.get('last_modified', ''))}"
