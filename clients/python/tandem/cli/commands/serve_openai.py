"""`tandem serve-openai`: OpenAI's API over a rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.cli.commands.options import (
    AcceptanceRuleOption,
    RolloutAddress,
    SpeculativeOption,
    TokenizerOption,
)
from tandem.cli.commands.web_server import (
    ApiKeyFile,
    CertificateFile,
    Host,
    Insecure,
    ModelName,
    Port,
    PrivateKeyFile,
    WebServer,
)
from tandem.errors import ConfigError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.terminal.output import Output

if TYPE_CHECKING:
    from tandem._proto.rollout.v1 import rollout_pb2
    from tandem.settings.environment import ToolCallFormat


@command()
def serve_openai(
    rollout: RolloutAddress = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    tokenizer: TokenizerOption = None,
    model_name: ModelName = None,
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
    api_key_file: ApiKeyFile = None,
    https_certificate_file: CertificateFile = None,
    https_private_key_file: PrivateKeyFile = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call the server, such as https://app.example.org, "
            "or *; may be repeated. Default: none.",
            metavar="ORIGIN",
        ),
    ] = None,
    insecure: Insecure = False,
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

    output = Output(as_json=as_json)
    server = WebServer(
        "serve-openai",
        host,
        port,
        api_key_file=api_key_file,
        certificate=https_certificate_file,
        key=https_private_key_file,
        insecure=insecure,
    )
    from tandem.openai_server.app import Settings, application

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
            api_keys=server.api_keys,
            allowed_origins=allowed_origins or (),
            tool_calls=_tool_call_format(tool_calls),
        )
    model = model_name or Path(served.path).name
    url = f"{server.url}/v1"
    output.result({"base_url": url, "model": model}, f"{model} at {url}")
    app = application(settings)
    server.run(app, STOP_SECONDS, app.state.stop)


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
