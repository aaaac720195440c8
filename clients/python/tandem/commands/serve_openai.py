"""`tandem serve-openai`: OpenAI's API over a rollout server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.command_line import JsonFlag, command
from tandem.commands.options import (
    AcceptanceRuleOption,
    RolloutAddress,
    SpeculativeOption,
    TokenizerOption,
)
from tandem.credentials import (
    NO_CREDENTIALS,
    Credentials,
    is_loopback,
    require_key_pair,
    watched_tokens,
)
from tandem.errors import ConfigError, CredentialsError
from tandem.render import Output

if TYPE_CHECKING:
    from tandem.rollout.v1 import rollout_pb2


@command()
def serve_openai(
    rollout: RolloutAddress = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen at. One that other machines reach needs --api-key-file and "
            "--https-certificate-file, or --insecure."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")
    ] = 8000,
    tokenizer: TokenizerOption = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="Name that requests give. Default: that of the model's directory."),
    ] = None,
    tandem: Annotated[
        bool,
        typer.Option("--tandem", help="Let the junior write too where a request does not say."),
    ] = False,
    speculative: SpeculativeOption = None,
    acceptance_rule: AcceptanceRuleOption = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="API keys, one a line: a request must show one of them. Default: none is asked "
            "for.",
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
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without keys or without https."),
    ] = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Serve the senior, as it is now, to tools that speak OpenAI's HTTP API.

    Completions, chat completions and models below /v1, streamed or whole, with
    log-probabilities. Ctrl-C ends it.
    """
    from tandem.client import RolloutClient
    from tandem.commands.texts import codec_of
    from tandem.optional import optional_module
    from tandem.preflight import longest_sequence
    from tandem.running_clusters import connect

    uvicorn = optional_module("uvicorn", "serve-openai")
    optional_module("starlette", "serve-openai")
    from tandem.openai_server.app import Settings, application

    output = Output(as_json=as_json)
    https = _https(https_certificate_file, https_private_key_file)
    keys = api_key_file and watched_tokens(api_key_file, "--api-key-file")
    if not is_loopback(host) and not insecure and not (keys and https):
        raise ConfigError(
            f"--host {host}: is not a loopback address; it needs --api-key-file and "
            "--https-certificate-file, or --insecure"
        )
    with connect(RolloutClient, rollout, "--rollout", credentials) as client:
        info = client.info()
        served = info.server.model
        _check_drafts(speculative, acceptance_rule, info)
        settings = Settings(
            address=client.address,
            codec=codec_of(client, tokenizer),
            model=model_name or Path(served.path).name,
            max_model_len=longest_sequence(info, junior=tandem or speculative == "junior"),
            tandem=tandem,
            speculative={"method": speculative, "acceptance_rule": acceptance_rule},
            credentials=client.credentials,
            api_keys=keys,
        )
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}") from None
    url = f"http{'s' * bool(https)}://{host}:{listener.getsockname()[1]}/v1"
    output.result({"base_url": url, "model": settings.model}, f"{settings.model} at {url}")
    # Ctrl-C gives running requests a moment to end.
    config = uvicorn.Config(
        application(settings),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        **https,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _check_drafts(
    method: str | None, rule: str | None, info: rollout_pb2.GetServerInfoResponse
) -> None:
    """Raises ConfigError for drafts of an unknown kind, or that the rollout server cannot make."""
    from tandem.preflight import require_drafter
    from tandem.rollout.v1 import rollout_pb2
    from tandem.wire import enum_names

    for option, value, kind in (
        ("--speculative", method, rollout_pb2.SpeculativeMethod),
        ("--acceptance-rule", rule, rollout_pb2.AcceptanceRule),
    ):
        known = enum_names(kind.DESCRIPTOR)
        if value is not None and value not in known:
            raise ConfigError(f"{option}: {value!r} is none of {', '.join(known)}")
    require_drafter(
        "--speculative",
        method or "none",
        has_junior=info.HasField("junior"),
        has_speculator=bool(info.speculator_heads),
        whose="the rollout server",
    )


def _https(certificate: Path | None, key: Path | None) -> dict[str, Path]:
    """Returns uvicorn's options for https; none without files.

    Raises CredentialsError for files that cannot be used.
    """
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise CredentialsError(
            "--https-certificate-file and --https-private-key-file need each other"
        )
    require_key_pair(certificate, key, "--https-certificate-file")
    return {"ssl_certfile": certificate, "ssl_keyfile": key}
