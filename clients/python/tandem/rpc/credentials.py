"""Credentials of clients: certificates and tokens, in files that are read again after a change."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from tandem.errors import CredentialsError, file_error

Contents = TypeVar("Contents")

# The servers' rule, too. gRPC refuses a text with other characters, and quotes it in its error.
_TOKEN = re.compile(r"[\x21-\x7e]+")

# More than any file of certificates or tokens has.
_MAX_FILE_BYTES = 1 << 20
# Seconds in which the other file of a pair follows the first one, and after which a file is no new
# one any more.
_REPLACEMENT_SECONDS = 0.5
_NEW_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """The files with which a client identifies itself and verifies a server. All are optional.

    A client without credentials uses those of the environment. Files that change are read
    again: running calls continue, new ones use the new contents.

    Attributes:
        ca_file: certificates (PEM) of the authorities that sign servers' certificates. With it the
            connection uses TLS, without it no encryption.
        certificate_file: the client's own certificate (PEM), for servers that require one.
        private_key_file: the private key (PEM) of certificate_file.
        token_file: tokens, one per line; the client sends the first with every call.
    """

    ca_file: str | os.PathLike[str] | None = None
    certificate_file: str | os.PathLike[str] | None = None
    private_key_file: str | os.PathLike[str] | None = None
    token_file: str | os.PathLike[str] | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """Returns the files that TANDEM_CA_FILE, TANDEM_CERTIFICATE_FILE, … name."""
        return cls(**{one.name: os.environ.get(variable(one.name)) or None for one in fields(cls)})

    def or_else(self, other: Credentials) -> Credentials:
        """Returns these credentials, with the files of `other` for the fields that are not set."""
        return Credentials(
            **{
                one.name: getattr(self, one.name) or getattr(other, one.name)
                for one in fields(self)
            }
        )

    def record(self) -> dict[str, str]:
        """Returns the absolute paths of the files that are set, by field."""
        paths = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: str(Path(path).absolute()) for name, path in paths.items() if path}


NO_CREDENTIALS = Credentials()
FIELDS = tuple(one.name for one in fields(Credentials))


def variable(field: str) -> str:
    """Returns the environment variable of a field of Credentials."""
    return f"TANDEM_{field.upper()}"


def is_loopback(address: str) -> bool:
    """Returns whether HOST, HOST:PORT or a Unix socket is known to be of this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    place = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::\d+)?", address)
    host = (place[1] or place[2]) if place else address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class WatchedFiles(Generic[Contents]):
    """The contents of files, read again once a file has changed. Thread-safe.

    While changed files cannot be used, as between the two writes that replace a certificate and its
    key, the contents of before hold, and a warning is logged.
    """

    def __init__(self, paths: list[Path], read: Callable[[], Contents]) -> None:
        """Reads the files. `read` returns their contents, or raises CredentialsError.

        Files that are being replaced are read again until they stay as they are.
        """
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._contents = self._first()

    def contents(self) -> Contents:
        """Returns the contents: the same object as long as the files stay as they are."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                try:
                    self._contents = self._read()
                except CredentialsError as error:
                    _log.warning("%s; the contents read before stay in use", error)
                self._stamp = stamp
            return self._contents

    def _first(self) -> Contents:
        while True:
            self._stamp = self._look()
            try:
                return self._read()
            except CredentialsError:
                if not self._change_within(_REPLACEMENT_SECONDS):
                    raise

    def _change_within(self, seconds: float) -> bool:
        """Waits for a change of files that were written a moment ago; returns whether there is one.

        Older files are not being replaced.
        """
        end = time.monotonic() + seconds
        while (stamp := self._look()) == self._stamp:
            if time.monotonic() > end or not any(map(_is_new, self._paths)):
                return False
            time.sleep(0.01)
        return stamp != self._stamp

    def _look(self) -> list[Any]:
        """Returns facts about the files that differ after a change."""
        return [_stamp(path) for path in self._paths]


def _is_new(path: Path) -> bool:
    """Whether the file, or the folder that lacks it, has changed within the last seconds."""
    for place in (path, path.parent):
        try:
            return time.time() - place.stat().st_mtime < _NEW_SECONDS
        except OSError:
            continue
    return False


def _stamp(path: Path) -> Any:
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_size, status.st_mtime_ns


def watched_tokens(path: Path, field: str) -> WatchedFiles[tuple[str, ...]]:
    """Returns the tokens of a file. Raises CredentialsError, which begins with `field`."""
    return WatchedFiles([path], lambda: _tokens(path, field))


def _tokens(path: Path, field: str) -> tuple[str, ...]:
    text = _bytes(path, field).decode(errors="replace")
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise CredentialsError(f"{field}: {path}: holds no token")
    for number, token in enumerate(tokens, start=1):
        if not _TOKEN.fullmatch(token):
            raise CredentialsError(
                f"{field}: {path}: token {number} has characters that are not visible ASCII",
                hint="write one token per line, without spaces",
            )
    return tokens


@dataclass(frozen=True)
class Certificates:
    """Certificates and key as bytes (PEM)."""

    ca: bytes
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)


class CredentialFiles:
    """The contents of the files of Credentials, for the calls to one address. Thread-safe.

    Attributes:
        certificates: for TLS; None without ca_file.
        tokens: None without token_file.
    """

    def __init__(self, credentials: Credentials, address: str) -> None:
        """Reads the files.

        Raises CredentialsError for a file that cannot be used, for fields that do not go together,
        and for a token that would travel to another machine without TLS.
        """
        paths = {name: Path(path) for name, path in credentials.record().items()}
        self.certificates: WatchedFiles[Certificates] | None = None
        self.tokens: WatchedFiles[tuple[str, ...]] | None = None
        for one, other in (
            ("certificate_file", "private_key_file"),
            ("private_key_file", "certificate_file"),
            ("certificate_file", "ca_file"),
        ):
            if one in paths and other not in paths:
                raise CredentialsError(
                    f"{one}: {paths[one]} needs {other}", hint=f"{variable(other)} names the file"
                )
        ca, token = paths.get("ca_file"), paths.get("token_file")
        if token is not None and ca is None and not is_loopback(address):
            raise CredentialsError(
                f"token_file: {token}: without TLS the token would travel to {address} in clear "
                "text",
                hint="ca_file turns TLS on",
            )
        if ca is not None:
            self.certificates = self._watched_certificates(paths)
        if token is not None:
            self.tokens = watched_tokens(token, "token_file")

    @staticmethod
    def _watched_certificates(paths: dict[str, Path]) -> WatchedFiles[Certificates]:
        named = {name: path for name, path in paths.items() if name != "token_file"}

        def read() -> Certificates:
            contents = {name: _bytes(path, name) for name, path in named.items()}
            _require_certificates(named, contents)
            if {name: _bytes(path, name) for name, path in named.items()} != contents:
                raise CredentialsError("certificates: the files are changing while they are read")
            return Certificates(
                contents["ca_file"],
                contents.get("certificate_file"),
                contents.get("private_key_file"),
            )

        return WatchedFiles(list(named.values()), read)


def load_key_pair(certificate: Path, key: Path, field: str) -> ssl.SSLContext:
    """Returns a server's context that has the certificate and its private key.

    Raises CredentialsError unless the private key is that of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise CredentialsError(
            f"{field}: {certificate} and {key} are not a certificate (PEM) and its unencrypted "
            f"private key: {_reason(error)}"
        ) from None
    return context


def _require_certificates(paths: dict[str, Path], contents: dict[str, bytes]) -> None:
    """Raises CredentialsError for files that are no certificates, or do not go together."""
    try:
        authorities = contents["ca_file"].decode("ascii", errors="replace")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities)
    except (OSError, ValueError) as error:
        raise CredentialsError(
            f"ca_file: {paths['ca_file']}: holds no certificate (PEM): {_reason(error)}"
        ) from None
    if "certificate_file" in paths:
        load_key_pair(paths["certificate_file"], paths["private_key_file"], "certificate_file")


def _reason(error: Exception) -> str:
    """Returns OpenSSL's name of the failure, else the system's."""
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _bytes(path: Path, field: str) -> bytes:
    try:
        # A pipe would be waited for, and a device has no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CredentialsError(f"{field}: {path}: is not a regular file")
        with path.open("rb") as file:
            contents = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise file_error(f"{field}: {path}", error, CredentialsError) from None
    if len(contents) > _MAX_FILE_BYTES:
        raise CredentialsError(f"{field}: {path}: has more than {_MAX_FILE_BYTES} bytes")
    return contents
