"""`tandem record` and `tandem replay`: the calls of a command as a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.command_line import EXIT_FAILED, JsonFlag, command
from tandem.errors import ConfigError
from tandem.recording import files as recording
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials, variable
from tandem.rpc.transport import RECORD_VARIABLE
from tandem.terminal.output import Output
from tandem.utils.interrupt import Interrupt
from tandem.utils.words import counted


@command(context_settings={"allow_interspersed_args": False})
def record(
    out: Annotated[Path, typer.Option(help="File to write; it must not exist.", metavar="FILE")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Command whose calls are recorded.", metavar="COMMAND..."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Instead of a command: a server; calls to --port are forwarded to it and "
            "recorded until Ctrl-C.",
            metavar="HOST:PORT",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port on 127.0.0.1 for --target; 0: any free port."),
    ] = 0,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Record the calls of a command, or of any client that calls a port.

    For example `tandem record --out step.rec -- tandem train run.yaml`. The exit
    code is the command's. A recording contains prompts, responses and paths, but
    no authorization.
    """
    if (target is None) == (not arguments):
        raise ConfigError("record: give either a command or --target")
    recording.create(out)
    try:
        if target is not None:
            _record_port(Output(as_json=as_json), out, target, port, credentials)
        elif arguments:
            environment = os.environ | {RECORD_VARIABLE: str(out.resolve())}
            environment |= {variable(name): path for name, path in credentials.record().items()}
            # The command takes this process's place: signals and the exit code are its own.
            os.execvpe(arguments[0], arguments, environment)
    except (ConfigError, OSError) as error:
        out.unlink()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{(arguments or [''])[0]}: {error.strerror}") from None


def _record_port(
    output: Output, out: Path, target: str, port: int, credentials: Credentials
) -> None:
    from tandem.recording.proxy import RecordingProxy

    with (
        Interrupt() as interrupt,
        RecordingProxy(target, port, recording.Recorder(out), credentials) as proxy,
    ):
        interrupt.defer()
        address = f"127.0.0.1:{proxy.port}"
        text = f"{address} forwards to {target} and records; Ctrl-C stops it"
        output.result({"address": address, "target": target}, text)
        while not interrupt.requested:
            time.sleep(0.2)


@command()
def replay(
    file: Annotated[
        Path, typer.Argument(help="A recording made by `tandem record`.", metavar="FILE")
    ],
    text_map: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="Text to replace in requests and addresses; may be repeated. Needed for every "
            "server in the recording and every path that servers write to.",
            metavar="OLD=NEW",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Replay only this method; may be repeated.", metavar="METHOD"),
    ] = None,
    call: Annotated[
        int | None, typer.Option(min=1, help="Replay only the call with this number.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Compare the answers with the recorded ones, bit for bit.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Longest wait for one answer, in seconds.")
    ] = 600.0,
    print_it: Annotated[
        bool,
        typer.Option(
            "--print", help="Print the recording as JSON lines, without calling a server."
        ),
    ] = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Replay the calls of a recording and compare the answers.

    Stops at the first difference, with exit code 1. Calls overlap only where they
    did in the recording.
    """
    from tandem.recording.replay import Choice, Mapped, Replay, chosen
    from tandem.recording.replay import as_json as record_of

    output = Output(as_json=as_json or print_it)
    choice = Choice(frozenset(only or ()), call)
    if print_it:
        with output.shows_log():
            for entry in chosen(file, choice):
                output.json_line(record_of(entry))
        return
    mapped = Mapped.parse(text_map or [])
    with output.shows_log():
        outcome = Replay(
            file,
            choice,
            mapped,
            compare=compare,
            timeout_seconds=timeout,
            credentials=credentials,
        ).run()
    found = outcome.difference
    value = {"calls": outcome.calls, "answers": outcome.answers, "difference": None}
    if found is None or outcome.call is None:
        same = "the answers were not compared"
        if compare:
            same = f"{counted(outcome.answers, 'answer')} compared, all as recorded"
        output.result(value, f"{counted(outcome.calls, 'call')} replayed; {same}")
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
