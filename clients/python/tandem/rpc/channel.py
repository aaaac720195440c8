"""Channels to servers, with the certificates and tokens of Credentials.

A channel of gRPC keeps the certificates that it was opened with. A secured channel therefore opens
another one for its next call when their files have changed; running calls end on the one where
they began. Every call takes the token that its file holds then.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.errors import ClosedClientError
from tandem.rpc.credentials import Certificates, CredentialFiles, Credentials

AUTHORIZATION = "authorization"

# A proxy of the environment (http_proxy, https_proxy, grpc_proxy) is for the internet: it does not
# reach the servers, and would be shown the token.
_NO_PROXY = ("grpc.enable_http_proxy", 0)

Options = Sequence[tuple[str, int]]


def open_channel(
    address: str,
    credentials: Credentials,
    options: Options,
    interceptors: Sequence[Any] = (),
    *,
    asynchronous: bool = False,
) -> Any:
    """Opens a channel to a server: encrypted if `credentials` name a ca_file.

    `interceptors` are gRPC's, those of grpc.aio for an asyncio channel. No channel uses a proxy.
    Without credentials it is a grpc.Channel or a grpc.aio.Channel, else it has the functions of one
    that stubs use, and close().

    Raises CredentialsError, as CredentialFiles does.
    """
    files = CredentialFiles(credentials, address)
    library = grpc.aio if asynchronous else grpc
    arguments: dict[str, Any] = {"options": [*options, _NO_PROXY]}
    if asynchronous:
        arguments["interceptors"] = interceptors

    def connect(held: Certificates | None) -> Any:
        if held is None:
            channel = library.insecure_channel(address, **arguments)
        else:
            secret = grpc.ssl_channel_credentials(held.ca, held.private_key, held.certificate)
            channel = library.secure_channel(address, secret, **arguments)
        return channel if asynchronous else grpc.intercept_channel(channel, *interceptors)

    if files.certificates is None and files.tokens is None:
        return connect(None)
    return (AsyncSecuredChannel if asynchronous else SecuredChannel)(files, connect)


@dataclass(eq=False)
class _Connected:
    """A channel of gRPC, the certificates that it was opened with, and its number of calls."""

    channel: Any
    certificates: Certificates | None
    calls: int = 0


class _Channel:
    """The functions of a channel that stubs use, over the newest of several channels."""

    def __init__(
        self, files: CredentialFiles, connect: Callable[[Certificates | None], Any]
    ) -> None:
        self._files = files
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self._newest = self._connected(self._certificates())
        self._older: list[_Connected] = []
        self.unary_unary = functools.partial(self._method, "unary_unary")
        self.unary_stream = functools.partial(self._method, "unary_stream")
        self.stream_unary = functools.partial(self._method, "stream_unary")
        self.stream_stream = functools.partial(self._method, "stream_stream")

    def _method(
        self,
        kind: str,
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        def begin(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            used, method = self._use(
                lambda channel: getattr(channel, kind)(
                    path, request_serializer, response_deserializer, **options
                )
            )
            end = functools.partial(self._end, used)
            try:
                started = method(request, timeout=timeout, metadata=self._authorized(metadata))
            except BaseException:
                end()
                raise
            self._at_end(kind, started, end)
            return started

        return begin

    def _certificates(self) -> Certificates | None:
        return self._files.certificates and self._files.certificates.contents()

    def _connected(self, certificates: Certificates | None) -> _Connected:
        return _Connected(self._connect(certificates), certificates)

    def _authorized(self, metadata: Any) -> Any:
        """Returns the metadata with the token, unless the caller sends one of its own."""
        pairs = tuple(metadata or ())
        if self._files.tokens is None or any(key == AUTHORIZATION for key, _ in pairs):
            return pairs
        return *pairs, (AUTHORIZATION, f"Bearer {self._files.tokens.contents()[0]}")

    def _use(self, method_of: Callable[[Any], Any]) -> tuple[_Connected, Any]:
        """Returns the channel for a call, whose end _end() must be told, and the call's method.

        Raises ClosedClientError if the channel is closed. gRPC crashes if it is asked for a method
        of a closed channel.
        """
        with self._lock:
            if self._closed:
                raise ClosedClientError("the channel is closed")
            certificates = self._certificates()
            if certificates is not self._newest.certificates:
                self._older.append(self._newest)
                self._newest = self._connected(certificates)
            idle = [one for one in self._older if not one.calls]
            self._older = [one for one in self._older if one.calls]
            used = self._newest
            method = method_of(used.channel)
            used.calls += 1
        for one in idle:
            self._close_idle(one.channel)
        return used, method

    def _end(self, used: _Connected) -> None:
        with self._lock:
            used.calls -= 1

    def _close_all(self) -> list[Any]:
        """Refuses calls from now on; returns the channels, which the caller closes."""
        with self._lock:
            self._closed = True
            return [self._newest.channel, *(one.channel for one in self._older)]

    @staticmethod
    def _at_end(kind: str, started: Any, end: Callable[[], None]) -> None:
        """Calls `end` at the end of the call."""
        raise NotImplementedError

    def _close_idle(self, channel: Any) -> None:
        raise NotImplementedError


class SecuredChannel(_Channel):
    """A synchronous channel with credentials."""

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        for channel in self._close_all():
            channel.close()

    @staticmethod
    def _at_end(kind: str, started: Any, end: Callable[[], None]) -> None:
        # A call with one reply has returned it; `started` is the reply.
        if kind.endswith("_unary") or not started.add_callback(end):
            end()

    def _close_idle(self, channel: Any) -> None:
        channel.close()


class AsyncSecuredChannel(_Channel):
    """An asyncio channel with credentials."""

    def __init__(
        self, files: CredentialFiles, connect: Callable[[Certificates | None], Any]
    ) -> None:
        super().__init__(files, connect)
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        for channel in self._close_all():
            await channel.close()
        await asyncio.gather(*self._closing)

    @staticmethod
    def _at_end(kind: str, started: Any, end: Callable[[], None]) -> None:
        started.add_done_callback(lambda _: end())

    def _close_idle(self, channel: Any) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


# Parts of gRPC's texts for handshakes that failed, and what they say; the first that occurs counts.
_HANDSHAKES = (
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS, but ca_file ({ca_file}) asks for it"),
    ("certificate has expired", "the server's certificate has expired"),
    ("certificate is not yet valid", "the server's certificate is not valid yet"),
    ("Hostname Verification", "the server's certificate does not name the host of {address}"),
    ("CERTIFICATE_VERIFY_FAILED", "no authority in ca_file ({ca_file}) signed the certificate"),
)


def why_refused(details: str, credentials: Credentials, address: str) -> str | None:
    """Returns the reason why TLS kept a connection from being made, None if it did not.

    `details` are gRPC's, of an UNAVAILABLE call.
    """
    if "failed to connect" not in details:
        return None
    names = credentials.record() | {"address": address}
    for text, meaning in _HANDSHAKES:
        if text in details and credentials.ca_file:
            return meaning.format_map(names)
    # A server that misses TLS, or a certificate, closes the connection. With TLS 1.3 the client's
    # handshake is done by then, and gRPC does not show the server's alert.
    if not re.search("Socket closed|Connection reset by peer|Unwrap failed", details):
        return None
    ended = "the server closed the connection"
    if not credentials.ca_file:
        return f"{ended}: it may require TLS, but ca_file is not set"
    if not credentials.certificate_file:
        return f"{ended}: it may require a client certificate, but certificate_file is not set"
    certificate = f"certificate_file ({names['certificate_file']})"
    return f"{ended}: it may refuse {certificate} as expired or from an unknown authority"
