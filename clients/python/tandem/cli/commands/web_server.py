"""The socket, https and the server of the commands that serve HTTP."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.errors import ConfigError, CredentialsError, ServerStartError
from tandem.rpc.credentials import (
    WatchedFiles,
    is_loopback,
    load_key_pair,
    watched_tokens,
)
from tandem.utils.optional import optional_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on. One that other machines can reach requires --api-key-file "
        "and --https-certificate-file, or --insecure."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="API keys, one per line; a request must send one of them. Default: no key is "
        "required.",
        metavar="FILE",
    ),
]
CertificateFile = Annotated[
    Path | None,
    typer.Option(help="Certificate (PEM) for https. Default: http.", metavar="FILE"),
]
PrivateKeyFile = Annotated[
    Path | None,
    typer.Option(help="The private key (PEM) of --https-certificate-file.", metavar="FILE"),
]
ModelName = Annotated[
    str | None,
    typer.Option(help="Model name in requests. Default: the name of the model's directory."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Serve other machines without keys or without https."),
]


class WebServer:
    """A socket that listens, with the keys and the https of the application behind it.

    Attributes:
        api_keys: keys, one of which a request must show; None: any request is answered.
        url: its address, without a path.
    """

    def __init__(
        self,
        command: str,
        host: str,
        port: int,
        *,
        api_key_file: Path | None,
        certificate: Path | None,
        key: Path | None,
        insecure: bool,
    ) -> None:
        """Opens the socket.

        Raises ConfigError for packages that `command` needs, and for options that do not go
        together, CredentialsError for files that cannot be used, ServerStartError for a port that
        is taken.
        """
        self._uvicorn = optional_module("uvicorn", command)
        optional_module("starlette", command)
        host = host.removeprefix("[").removesuffix("]")
        self._https = _https(certificate, key)
        self.api_keys = api_key_file and watched_tokens(api_key_file, "--api-key-file")
        if not is_loopback(host) and not insecure and not (self.api_keys and self._https):
            raise ConfigError(
                f"--host {host}: is not a loopback address; it requires --api-key-file and "
                "--https-certificate-file, or --insecure"
            )
        self._listener = _listener(host, port)
        shown = f"[{host}]" if ":" in host else host
        scheme = f"http{'s' * (self._https is not None)}"
        self.url = f"{scheme}://{shown}:{self._listener.getsockname()[1]}"

    def run(
        self, app: Starlette, stop_seconds: float, on_signal: Callable[[], None] = lambda: None
    ) -> None:
        """Serves until a signal ends it; `on_signal` is called when one comes."""
        from tandem.openai_server.protocol import BoundedProtocol

        # Messages about requests go to the error stream.
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
        config = self._uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_level="warning",
            access_log=False,
            # Clients reuse a connection for up to 90 s. One that is closed then fails a request.
            timeout_keep_alive=120,
            # The application ends its answers sooner.
            timeout_graceful_shutdown=int(2 * stop_seconds),
            ssl_context_factory=self._https and self._https.context,
        )

        class Server(self._uvicorn.Server):  # type: ignore[misc, name-defined]
            def handle_exit(self, *signal: Any) -> None:
                on_signal()
                super().handle_exit(*signal)

        Server(config).run(sockets=[self._listener])


def _listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises ConfigError, or ServerStartError for a port in use, which name the option at fault.
    """
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=found[0][0], dualstack_ipv6=both)
    except OSError as error:
        at_host = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        option = f"--host {host}" if at_host else f"--port {port}"
        problem = f"{option}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRINUSE:  # passes by itself, when a predecessor ends
            raise ServerStartError(problem) from None
        raise ConfigError(problem) from None


class _Https:
    """A certificate with its key, which each handshake takes as the files are then."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises CredentialsError for files that cannot be used."""
        self._watched = WatchedFiles(
            [certificate, key],
            lambda: load_key_pair(certificate, key, "--https-certificate-file"),
        )

    def context(self, *uvicorn: Any) -> ssl.SSLContext:
        """Returns the context of a server; `uvicorn` passes what it would make one of."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A context never changes: a handshake would meet the new certificate without its key.
        context.sni_callback = self._use_current
        return context

    def _use_current(self, connection: ssl.SSLObject, *_: Any) -> None:
        connection.context = self._watched.contents()


def _https(certificate: Path | None, key: Path | None) -> _Https | None:
    """Returns the files for https; None without any.

    Raises CredentialsError for files that cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise CredentialsError(
            "--https-certificate-file and --https-private-key-file must be given together"
        )
    return _Https(certificate, key)
