"""`tandem serve-openai`: OpenAI's API over a rollout server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from tandem.command_line import JsonFlag, command
from tandem.commands.options import RolloutAddress, TokenizerOption
from tandem.errors import ConfigError
from tandem.render import Output


@command()
def serve_openai(
    rollout: RolloutAddress = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. There is no authentication.")
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
    as_json: JsonFlag = False,
) -> None:
    """Serve the senior, as it is now, to tools that speak OpenAI's HTTP API.

    Completions, chat completions and models below /v1, streamed or whole, with
    log-probabilities. Ctrl-C ends it.
    """
    from tandem.client import RolloutClient
    from tandem.commands.texts import codec_of
    from tandem.optional import optional_module
    from tandem.running_clusters import address_of

    uvicorn = optional_module("uvicorn", "serve-openai")
    optional_module("starlette", "serve-openai")
    from tandem.openai_server.app import Settings, application

    output = Output(as_json=as_json)
    with RolloutClient(rollout or address_of("rollout", "--rollout")) as client:
        served = client.info().server.model
        settings = Settings(
            address=client.address,
            codec=codec_of(client, tokenizer),
            model=model_name or Path(served.path).name,
            max_model_len=served.max_model_len,
            tandem=tandem,
        )
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}") from None
    url = f"http://{host}:{listener.getsockname()[1]}/v1"
    output.result({"base_url": url, "model": settings.model}, f"{settings.model} at {url}")
    # Ctrl-C gives running requests a moment to end.
    config = uvicorn.Config(
        application(settings), log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listener])
