"""Common parts of the commands of `tandem`: registration, failures, exit codes."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import (
    ConfigError,
    ProblemsError,
    ServerStartError,
    TandemError,
    UnavailableError,
)
from tandem.rpc.credentials import FIELDS, Credentials, variable
from tandem.terminal.output import Output

# The same start cannot succeed after EXIT_USAGE, which the user corrects; a finished run stays as
# it is after EXIT_UNTRAINED; after any other one it may.
EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_UNTRAINED, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    name="tandem",
    help="Tandem Reinforcement Learning: start servers, train, generate, evaluate.\n\n"
    "Exit codes: 0 success; 1 a failure that may be transient; 2 wrong usage, configuration "
    "or data; 3 server unreachable or not started; 4 all steps done, but none trained; "
    "130 stopped by Ctrl-C.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


_CREDENTIAL_HELP = {
    "ca_file": "Authorities (PEM) that sign the servers' certificates; turns TLS on.",
    "certificate_file": "This client's certificate (PEM), for servers that require one.",
    "private_key_file": "The private key (PEM) of --certificate-file.",
    "token_file": "Tokens, one per line; the first one is sent.",
}


def command(group: typer.Typer = app, **options: Any) -> Callable[[Callable], Callable]:
    """Registers a command. Its expected failures become a line, or JSON, and an exit code.

    A parameter `credentials` becomes four options, one for each field of Credentials.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        takes_credentials = "credentials" in inspect.signature(function).parameters

        @functools.wraps(function)
        def run(*, as_json: bool, **arguments: Any) -> None:
            if takes_credentials:
                arguments["credentials"] = Credentials(*map(arguments.pop, FIELDS))
            try:
                function(as_json=as_json, **arguments)
            except TandemError as error:
                raise typer.Exit(report(error, as_json=as_json)) from None

        if takes_credentials:
            _add_credential_options(run, function)
        return group.command(**options)(run)

    return register


def _add_credential_options(run: Callable[..., None], function: Callable[..., None]) -> None:
    """Gives `run` the parameters of `function`, with options in the place of `credentials`."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [one for name, one in signature.parameters.items() if name != "credentials"]
    for field in FIELDS:
        option = typer.Option(
            help=f"{_CREDENTIAL_HELP[field]} Default: ${variable(field)}.",
            metavar="FILE",
            rich_help_panel="Credentials",
        )
        parameters.append(
            inspect.Parameter(
                field,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[Path | None, option],
            )
        )
    run.__signature__ = signature.replace(parameters=parameters)


def report(error: TandemError, *, as_json: bool) -> int:
    """Prints the error on the error stream; returns the exit code."""
    if as_json:
        print(json.dumps(error.describe()), file=sys.stderr)
    else:
        say = Output().error
        say(f"tandem: {error}")
        hinted = "hint:" in str(error)
        if error.hint and not hinted:
            say(f"  hint: {error.hint}")
        for note in getattr(error, "__notes__", ()):
            say(f"  {note}")
    return exit_code(error)


def exit_code(error: TandemError) -> int:
    """Returns the exit code for an error."""
    if isinstance(error, ProblemsError):
        # One that the user has to correct decides, then one that is no server's.
        codes = {exit_code(problem) for problem in error.problems}
        return next(one for one in (EXIT_USAGE, EXIT_FAILED, EXIT_UNREACHABLE) if one in codes)
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, UnavailableError | ServerStartError):
        return EXIT_UNREACHABLE
    return EXIT_FAILED
