"""The file of a recording: RPCs with their messages, in the order in which they happened.

The first line is a JSON object with `format` and `version`. Entries follow, each a JSON object on a
line of its own and, where that has `bytes`, as many bytes of a message compressed with zlib and a
line feed. An entry is one write at the end of the file, so several threads and processes may record
into one file, and a crash costs at most the last entry. docs/guides/record.md has the table of
entries.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from tandem.errors import ConfigError, StorageError, file_error
from tandem.utils.text_files import json_object

FORMAT = "tandem-recording"
VERSION = 1
_log = logging.getLogger(__name__)

# Keys of metadata that may hold secrets; recordings do not have them.
SECRET_KEYS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})

# Bounds of an entry, so that a damaged file cannot ask for more memory. No message is larger than
# what a client takes, transport.MAX_RECEIVE_BYTES.
MAX_MESSAGE_BYTES = 64 << 20
_MAX_LINE_BYTES = 1 << 20
# zlib makes bytes that it cannot compress longer by less than 1 in 1000.
_MAX_COMPRESSED_BYTES = MAX_MESSAGE_BYTES + MAX_MESSAGE_BYTES // 1000
# Most bytes of the starts of calls that have not ended, which are in memory.
_MAX_OPEN_BYTES = 64 << 20

Metadata = Iterable[tuple[str, str | bytes]]


def create(path: Path) -> None:
    """Makes a recording without calls, which its owner alone may read: it has prompts and paths.

    Raises ConfigError if there is a file already.
    """
    line = json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(line.encode())
    except FileExistsError:
        raise ConfigError(f"{path}: already exists") from None
    except OSError as error:
        raise file_error(path, error) from None


class Recorder:
    """Appends calls to the file of a recording, which create() made. Thread-safe."""

    def __init__(self, path: Path) -> None:
        with _opened(path) as file:
            _require_header(path, file)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._numbers = itertools.count(1)

    def start(
        self, target: str, method: str, timeout: float | None, metadata: Metadata | None
    ) -> CallRecorder:
        """Records the start of a call of `method`, "/package.Service/Method", at `target`.

        Nothing is recorded of gRPC's own services: health checks are repeated until a server
        answers, and reflection describes the contract.
        """
        if method.startswith("/grpc."):
            return CallRecorder(self, "", ended=True)
        call = CallRecorder(self, f"{os.getpid()}-{next(self._numbers)}")
        call.add(
            "start",
            time=time.time(),
            target=target,
            method=method,
            timeout=timeout,
            metadata=_without_secrets(metadata),
        )
        return call

    def append(self, values: dict[str, Any], message: bytes | None) -> None:
        """Writes one entry. Raises StorageError if the disk does not take it."""
        data = b""
        if message is not None:
            data = zlib.compress(message, level=1)
            values["bytes"] = len(data)
            data += b"\n"
        entry = json.dumps(values, separators=(",", ":")).encode() + b"\n" + data
        try:
            written = os.write(self._file, entry)
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror}") from None
        if written < len(entry):
            raise StorageError(
                f"{self._path}: an entry of the recording was cut off: is the disk full?"
            )


class CallRecorder:
    """Records one call until its end; what comes after the end is not recorded. Thread-safe."""

    def __init__(self, recorder: Recorder, name: str, *, ended: bool = False) -> None:
        self._recorder = recorder
        self._name = name
        self._ended = ended
        self._lock = threading.Lock()

    def request(self, message: bytes) -> None:
        """Records a message to the server."""
        self.add("request", message)

    def half_close(self) -> None:
        """Records that the client sends no further message."""
        self.add("half_close")

    def response(self, message: bytes) -> None:
        """Records a message from the server."""
        self.add("response", message)

    def end(
        self, code: grpc.StatusCode, details: str | None = "", trailing: Metadata | None = None
    ) -> None:
        """Records the status with which the call ended."""
        metadata = _without_secrets(trailing)
        self.add("end", code=code.name, details=details or "", trailing_metadata=metadata)

    def cancel(self) -> None:
        """Records that the client gave the call up."""
        self.end(grpc.StatusCode.CANCELLED)

    def add(self, kind: str, message: bytes | None = None, **values: Any) -> None:
        """Writes an entry of this call."""
        with self._lock:
            if not self._ended:
                self._recorder.append({"kind": kind, "call": self._name, **values}, message)
            self._ended = self._ended or kind == "end"


def _without_secrets(metadata: Metadata | None) -> list[list[str]]:
    """Returns metadata as JSON; binary values, whose keys end with "-bin", in base64."""
    return [
        [key, base64.b64encode(value).decode() if isinstance(value, bytes) else value]
        for key, value in metadata or ()
        if key.lower() not in SECRET_KEYS
    ]


@dataclass(frozen=True)
class RecordedCall:
    """One call of a recording.

    Attributes:
        number: its place in the order of the starts, from 1.
        time: when it started, in seconds since 1970.
        target: the address of the server.
        method: "/package.Service/Method".
        timeout: seconds until its deadline; None if it had none.
        metadata: what the client sent, without secrets.
    """

    number: int
    time: float
    target: str
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]

    @property
    def name(self) -> str:
        """The method without its service."""
        return self.method.rpartition("/")[2]

    def __str__(self) -> str:
        return f"call {self.number} ({self.name} at {self.target})"


@dataclass(frozen=True)
class Status:
    """The end of a call: code, message and trailing metadata."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Entry:
    """One event of a call: "start", "request", "half_close", "response" or "end".

    Attributes:
        message: the bytes of a request or a response.
        status: of an end.
    """

    kind: str
    call: RecordedCall
    message: bytes = b""
    status: Status | None = None


def read_recording(path: Path, *, warns: bool = True) -> Iterator[Entry]:
    """Yields the entries of a recording in order; one at a time is in memory.

    If the last entry is incomplete, the recording ends before it, and `warns` says so. Raises
    ConfigError for a file that is no recording, or is damaged.
    """
    calls: dict[str, RecordedCall] = {}
    sizes: dict[str, int] = {}
    open_bytes = 0
    numbers = itertools.count(1)
    with _opened(path) as file:
        _require_header(path, file)
        for place, size, values, message in _raw_entries(path, file, warns=warns):
            try:
                kind, name = values["kind"], values["call"]
                status = None
                if kind == "start":
                    calls[name] = _recorded_call(next(numbers), values)
                    open_bytes += size - sizes.get(name, 0)
                    sizes[name] = size
                elif kind == "end":
                    status = Status(
                        grpc.StatusCode[values["code"]],
                        str(values["details"]),
                        _metadata(values["trailing_metadata"]),
                    )
                elif kind not in ("request", "half_close", "response"):
                    raise ValueError
                call = calls.pop(name) if kind == "end" else calls[name]
                if kind == "end":
                    open_bytes -= sizes.pop(name)
            except (KeyError, TypeError, ValueError, OverflowError):
                raise ConfigError(f"{place}: not an entry of a recording") from None
            if open_bytes > _MAX_OPEN_BYTES:
                raise ConfigError(f"{place}: too many calls in the recording are unfinished")
            yield Entry(kind, call, message, status)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise file_error(path, error) from None


def _require_header(path: Path, file: BinaryIO) -> None:
    """Reads the first line. Raises ConfigError unless this version of the format has it."""
    line = file.readline(_MAX_LINE_BYTES)
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a recording made by `tandem record`")
    if header.get("version") != VERSION:
        raise ConfigError(f"{path}: version {header.get('version')} of the format, not {VERSION}")


def _raw_entries(
    path: Path, file: BinaryIO, *, warns: bool
) -> Iterator[tuple[str, int, dict[str, Any], bytes]]:
    """Yields place, length of the line, values and message of every complete entry."""
    while True:
        place = f"{path}: byte {file.tell()}"
        line = file.readline(_MAX_LINE_BYTES)
        if not line:
            return
        if not line.endswith(b"\n"):
            if len(line) == _MAX_LINE_BYTES:
                raise ConfigError(f"{place}: not an entry of a recording")
            break
        values = json_object(line.decode(errors="replace"), place, ConfigError)
        size = values.get("bytes")
        if size is None:
            yield place, len(line), values, b""
            continue
        if not isinstance(size, int) or not 0 <= size <= _MAX_COMPRESSED_BYTES:
            raise ConfigError(f"{place}: not an entry of a recording")
        data = file.read(size + 1)
        if len(data) <= size:
            break
        yield place, len(line), values, _decompressed(place, data[:-1])
    if warns:
        _log.warning(f"{place}: the last entry is incomplete and was left out")


def _decompressed(place: str, data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        message = decompressor.decompress(data, MAX_MESSAGE_BYTES)
    except zlib.error:
        raise ConfigError(f"{place}: the message is damaged") from None
    if not decompressor.eof:
        raise ConfigError(f"{place}: the message is damaged, or larger than 64 MiB")
    return message


def _recorded_call(number: int, values: dict[str, Any]) -> RecordedCall:
    return RecordedCall(
        number,
        float(values["time"]),
        str(values["target"]),
        str(values["method"]),
        None if values["timeout"] is None else float(values["timeout"]),
        _metadata(values["metadata"]),
    )


def _metadata(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str | bytes], ...]:
    found: list[tuple[str, str | bytes]] = []
    for key, value in pairs:
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError
        found.append((key, base64.b64decode(value) if key.endswith("-bin") else value))
    return tuple(found)
