"""`tandem serve-openai`: OpenAI's API over a rollout server."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.cli.commands.options import (
    AcceptanceRuleOption,
    RolloutAddress,
    SpeculativeOption,
    TokenizerOption,
)
from tandem.errors import ConfigError, CredentialsError, ServerStartError
from tandem.rpc.credentials import (
    NO_CREDENTIALS,
    Credentials,
    WatchedFiles,
    is_loopback,
    load_key_pair,
    watched_tokens,
)
from tandem.terminal.output import Output

if TYPE_CHECKING:
    from tandem._proto.rollout.v1 import rollout_pb2
    from tandem.settings.environment import ToolCallFormat


@command()
def serve_openai(
    rollout: RolloutAddress = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. One that other machines can reach requires --api-key-file "
            "and --https-certificate-file, or --insecure."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000,
    tokenizer: TokenizerOption = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="Model name in requests. Default: the name of the model's directory."),
    ] = None,
    tandem: Annotated[
        bool,
        typer.Option(
            "--tandem", help="Let the junior write, too, unless a request says otherwise."
        ),
    ] = False,
    speculative: SpeculativeOption = None,
    acceptance_rule: AcceptanceRuleOption = None,
    tool_calls: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools: hermes, qwen_xml, llama3 or mistral. "
            "Default: as its chat template names it.",
            metavar="FORMAT",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="API keys, one per line; a request must send one of them. Default: no key is "
            "required.",
            metavar="FILE",
        ),
    ] = None,
    https_certificate_file: Annotated[
        Path | None,
        typer.Option(help="Certificate (PEM) for https. Default: http.", metavar="FILE"),
    ] = None,
    https_private_key_file: Annotated[
        Path | None,
        typer.Option(help="The private key (PEM) of --https-certificate-file.", metavar="FILE"),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call the server, such as https://app.example.org, "
            "or *; may be repeated. Default: none.",
            metavar="ORIGIN",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without keys or without https."),
    ] = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Serve the current senior to tools that use OpenAI's HTTP API.

    Completions, chat completions with tools, and models under /v1, streamed or
    not, with log-probabilities; sessions of agents that are trained. Ctrl-C stops
    it.
    """
    from tandem.cli.commands.texts import codec_of
    from tandem.cluster.registry import connect
    from tandem.openai_server.limits import STOP_SECONDS
    from tandem.rpc.client import RolloutClient
    from tandem.utils.optional import optional_module

    uvicorn = optional_module("uvicorn", "serve-openai")
    optional_module("starlette", "serve-openai")
    from tandem.openai_server.app import Settings, application
    from tandem.openai_server.protocol import BoundedProtocol

    output = Output(as_json=as_json)
    host = host.removeprefix("[").removesuffix("]")
    https = _https(https_certificate_file, https_private_key_file)
    keys = api_key_file and watched_tokens(api_key_file, "--api-key-file")
    if not is_loopback(host) and not insecure and not (keys and https):
        raise ConfigError(
            f"--host {host}: is not a loopback address; it requires --api-key-file and "
            "--https-certificate-file, or --insecure"
        )
    with connect(RolloutClient, rollout, "--rollout", credentials) as client:
        info = client.info()
        served = info.server.model
        _check_drafts(speculative, acceptance_rule, info)
        # Without --tokenizer the application reads that of the model that is served then.
        codec = codec_of(client, tokenizer)
        settings = Settings(
            address=client.address,
            codec=None if tokenizer is None else codec,
            model=model_name,
            tandem=tandem,
            speculative={"method": speculative, "acceptance_rule": acceptance_rule},
            credentials=client.credentials,
            api_keys=keys,
            allowed_origins=allowed_origins or (),
            tool_calls=_tool_call_format(tool_calls),
        )
    # Messages about requests and sessions go to the error stream.
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    listener = _listener(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http{'s' * (https is not None)}://{shown}:{listener.getsockname()[1]}/v1"
    model = model_name or Path(served.path).name
    output.result({"base_url": url, "model": model}, f"{model} at {url}")
    app = application(settings)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_level="warning",
        access_log=False,
        # Clients reuse a connection for up to 90 s. One that is closed then fails a request.
        timeout_keep_alive=120,
        # The application ends its answers sooner.
        timeout_graceful_shutdown=int(2 * STOP_SECONDS),
        ssl_context_factory=https and https.context,
    )

    class Server(uvicorn.Server):
        def handle_exit(self, *signal: Any) -> None:
            app.state.stop()
            super().handle_exit(*signal)

    Server(config).run(sockets=[listener])


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


def _check_drafts(
    method: str | None, rule: str | None, info: rollout_pb2.GetServerInfoResponse
) -> None:
    """Raises ConfigError for drafts of an unknown kind, or that the rollout server cannot make."""
    from tandem._proto.rollout.v1 import rollout_pb2
    from tandem.preflight.checks import require_drafter
    from tandem.rpc.wire import enum_names

    for option, value, kind in (
        ("--speculative", method, rollout_pb2.SpeculativeMethod),
        ("--acceptance-rule", rule, rollout_pb2.AcceptanceRule),
    ):
        known = enum_names(kind.DESCRIPTOR)
        if value is not None and value not in known:
            raise ConfigError(f"{option}: {value!r} is not one of {', '.join(known)}")
    require_drafter(
        "--speculative",
        method or "none",
        has_junior=info.HasField("junior"),
        has_speculator=bool(info.speculator_heads),
        whose="the rollout server",
    )


def _tool_call_format(given: str | None) -> ToolCallFormat | None:
    from tandem.environments.tool_calls import PARSERS

    for name in PARSERS:
        if given == name:
            return name
    if given is not None:
        raise ConfigError(f"--tool-calls: {given!r} is not one of {', '.join(PARSERS)}")
    return None


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
