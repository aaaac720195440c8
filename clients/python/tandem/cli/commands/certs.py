"""`tandem certs`: certificates and tokens for a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.rpc.credentials import variable
from tandem.settings.values import dump_values
from tandem.terminal.output import Output


@command()
def certs(
    directory: Annotated[Path, typer.Argument(help="Directory to write.", metavar="DIR")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name or IP address of the servers; may be repeated. This machine's own "
            "(localhost, 127.0.0.1, ::1) are always included.",
            metavar="NAME",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, help="Days until the server and client certificates expire.")
    ] = 90,
    client: Annotated[
        str | None,
        typer.Option(
            help="Name of the client, for its certificate. Default: tandem-client.", metavar="NAME"
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace the certificates in DIR with new ones from the same authority, with the "
            "same names unless others are given. Authority and tokens are kept.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a certificate authority, certificates and tokens for a trial.

    DIR gets ca.crt, server.crt, client.crt with their keys, and reader.token,
    user.token and admin.token. Anyone who can read ca.key can make certificates
    that the servers trust.
    """
    from tandem.certs.authority import Request, make_certificates, renew_certificates

    output = Output(as_json=as_json)
    request = Request(host or (), client, days)
    made = (renew_certificates if renew else make_certificates)(directory, request)
    settings = {"server": made.server()}
    environment = {variable(name): path for name, path in made.client().record().items()}
    text = f"# in a server's configuration\n{dump_values(settings)}# for clients\n"
    text += "\n".join(f"export {name}={path}" for name, path in environment.items())
    output.result(
        {"directory": str(made.path), "settings": settings, "environment": environment}, text
    )
