"""`tandem record` and `tandem replay`: the calls of a command as a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from tandem import recording
from tandem.command_line import EXIT_FAILED, JsonFlag, command
from tandem.errors import ConfigError
from tandem.render import Output


@command(context_settings={"allow_interspersed_args": False})
def record(
    out: Annotated[Path, typer.Option(help="File to write; it must not exist.", metavar="FILE")],
    arguments: Annotated[
        list[str],
        typer.Argument(help="Command whose clients record their calls.", metavar="COMMAND..."),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Run a command and record every call that its Python clients make.

    For example `tandem record --out step.rec -- tandem train run.yaml`. The exit
    code is the command's. A recording has prompts, responses and paths, but no
    authorization.
    """
    recording.create(out)
    environment = os.environ | {recording.VARIABLE: str(out.resolve())}
    try:
        # The command takes this process's place: signals and the exit code are its own.
        os.execvpe(arguments[0], arguments, environment)
    except OSError as error:
        out.unlink()
        raise ConfigError(f"{arguments[0]}: {error.strerror}") from None


@command()
def replay(
    file: Annotated[Path, typer.Argument(help="A recording of `tandem record`.", metavar="FILE")],
    text_map: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="Text to replace in requests and addresses; may be repeated. Every server of "
            "the recording needs one, and every place to which servers write.",
            metavar="OLD=NEW",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Method to replay alone; may be repeated.", metavar="METHOD"),
    ] = None,
    call: Annotated[
        int | None, typer.Option(min=1, help="Number of the only call to replay.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Compare the answers with the recorded ones, bit for bit.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds to wait for one answer.")
    ] = 600.0,
    print_it: Annotated[
        bool,
        typer.Option("--print", help="Print the recording as JSON lines; call no server."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Send the calls of a recording again and compare the answers.

    Ends at the first difference, with exit code 1. Calls overlap only where they
    did in the recording.
    """
    from tandem.replay import Choice, Mapped, Replay, chosen
    from tandem.replay import as_json as record_of

    output = Output(as_json=as_json or print_it)
    choice = Choice(frozenset(only or ()), call)
    if print_it:
        for entry in chosen(file, choice, output.note):
            output.json_line(record_of(entry))
        return
    mapped = Mapped.parse(text_map or [])
    outcome = asyncio.run(
        Replay(file, choice, mapped, output.note, compare=compare, timeout_seconds=timeout).run()
    )
    found = outcome.difference
    value = {"calls": outcome.calls, "answers": outcome.answers, "difference": None}
    if found is None or outcome.call is None:
        same = "the answers are not compared"
        if compare:
            same = f"all {outcome.answers} answers are those of the recording"
        output.result(value, f"{outcome.calls} calls replayed; {same}")
        return
    value["difference"] = {
        "call": outcome.call.number,
        "method": outcome.call.method,
        "place": outcome.place,
        "path": found.path,
        "recorded": found.recorded,
        "replayed": found.replayed,
    }
    place = f"{outcome.place}: {found.path}" if found.path else outcome.place
    output.result(
        value,
        f"{outcome.call}: {place}\n  recorded {found.recorded}\n  replayed {found.replayed}",
    )
    raise typer.Exit(EXIT_FAILED)
