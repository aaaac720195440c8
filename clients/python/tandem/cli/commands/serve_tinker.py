"""`tandem serve-tinker`: Tinker's API over a trainer and a rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.cli.commands.options import RolloutAddress, TrainerAddress
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


@command()
def serve_tinker(
    checkpoints: Annotated[
        Path,
        typer.Option(
            help="Directory of the checkpoints, on the trainer's file system.", metavar="DIR"
        ),
    ],
    trainer: TrainerAddress = None,
    rollout: RolloutAddress = None,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    model_name: ModelName = None,
    tandem: Annotated[
        bool, typer.Option("--tandem", help="Let the junior write, too, in every sample.")
    ] = False,
    junior_token_loss_weight: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Weight of the junior's tokens in losses."),
    ] = 0.0,
    unembed_optional: Annotated[
        bool,
        typer.Option(
            "--unembed-optional",
            help="Clients that ask for adapters of the output layer, too, get the others.",
        ),
    ] = False,
    api_key_file: ApiKeyFile = None,
    https_certificate_file: CertificateFile = None,
    https_private_key_file: PrivateKeyFile = None,
    insecure: Insecure = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Serve trainer and rollout server to the SDK of Tinker.

    TINKER_BASE_URL is the address that it prints, TINKER_API_KEY any text that
    begins with tml-. Ctrl-C stops it.
    """
    from tandem.cluster.registry import connect
    from tandem.openai_server.limits import STOP_SECONDS
    from tandem.rpc.client import RolloutClient, TrainerClient
    from tandem.utils.optional import optional_module

    output = Output(as_json=as_json)
    optional_module("tinker", "serve-tinker")
    server = WebServer(
        "serve-tinker",
        host,
        port,
        api_key_file=api_key_file,
        certificate=https_certificate_file,
        key=https_private_key_file,
        insecure=insecure,
    )
    from tandem.tinker_server.app import Settings, application

    if junior_token_loss_weight and not tandem:
        raise ConfigError("--junior-token-loss-weight: needs --tandem")
    with (
        connect(TrainerClient, trainer, "--trainer", credentials) as learner,
        connect(RolloutClient, rollout, "--rollout", credentials) as sampler,
    ):
        trained, sampled = learner.info().server.model, sampler.info()
        served = sampled.server.model
        if trained.vocabulary_digest != served.vocabulary_digest:
            raise ConfigError(
                f"--trainer: its model, {trained.path}, has another vocabulary than that of the "
                f"rollout server, {served.path}"
            )
        if tandem and not sampled.HasField("junior"):
            raise ConfigError("--tandem: the rollout server has no junior")
        settings = Settings(
            trainer=learner.address,
            rollout=sampler.address,
            checkpoints=str(checkpoints.absolute()),
            model=model_name,
            tandem=tandem,
            junior_token_loss_weight=junior_token_loss_weight,
            unembed_optional=unembed_optional,
            credentials=sampler.credentials,
            api_keys=server.api_keys,
        )
    model = model_name or Path(served.path).name
    output.result({"base_url": server.url, "model": model}, f"{model} at {server.url}")
    server.run(application(settings), STOP_SECONDS)
