"""The `tandem` command. Its help text, in tandem.cli.command_line, has the exit codes."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from tandem import __version__
from tandem.cli.command_line import EXIT_INTERRUPTED, EXIT_USAGE, app

# Importing a module of commands registers them, in the order in which --help lists them.
# isort: off
from tandem.cli.commands import (  # noqa: F401
    init,
    servers,
    training,
    speculator,
    watch,
    texts,
    serve_openai,
    serve_tinker,
    model,
    export,
    checkpoint,
    view,
    recording,
    certs,
)

# isort: on
from tandem.terminal.output import use_any_encoding


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def before_the_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print every call to a server.")
    ] = False,
) -> None:
    """Options that stand before a command."""
    if verbose:
        logging.getLogger("tandem").setLevel(logging.DEBUG)


def main() -> None:
    """Runs the command. Wrong usage and an interrupt become an exit code, too."""
    use_any_encoding()
    try:
        code = app(standalone_mode=False, prog_name="tandem")
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        # Without standalone_mode, click leaves it to the caller to show its usage errors.
        if not hasattr(error, "exit_code"):
            raise
        error.show()
        code = EXIT_USAGE
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
