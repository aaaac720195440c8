"""`tandem init`: a run file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.terminal.output import Output


@command()
def init(
    model: Annotated[
        str, typer.Argument(help="Directory, or ORG/NAME of the Hugging Face Hub.", metavar="MODEL")
    ],
    data: Annotated[
        str,
        typer.Argument(
            help="A .jsonl or .parquet file, a folder of *.parquet files, ORG/NAME[:CONFIG] of the "
            "Hugging Face Hub, or reasoning_gym:TASK.",
            metavar="DATA",
        ),
    ],
    junior: Annotated[
        str | None, typer.Option(help="Junior model. Default: MODEL.", metavar="MODEL")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Column with the prompt.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the answer.")] = None,
    output_file: Annotated[
        Path, typer.Option("--output", "-o", help="File to write.", metavar="RUN.yaml")
    ] = Path("run.yaml"),
    as_json: JsonFlag = False,
) -> None:
    """Write a commented run file for a model and a data set.

    If no column of the data is an answer, also write a reward.py next to it.
    """
    from tandem.cli.run_template import Request, write_run_file

    output = Output(as_json=as_json)
    with output.shows_log():
        written = write_run_file(Request(model, data, junior, prompt, answer), output_file)
    output.result(
        {"files": [str(path) for path in written]},
        "\n".join([*map(str, written), f"next: tandem train {output_file} --dry-run"]),
    )
