"""`tandem speculator`: small models that draft the senior's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.command_line import JsonFlag, app, command
from tandem.commands.training import add_training
from tandem.errors import ConfigError
from tandem.number_formats import NAMES
from tandem.render import Output
from tandem.settings import RunSettings

speculator_app = typer.Typer(
    help="Train, measure and export speculators, which draft the senior's tokens.",
    no_args_is_help=True,
)
app.add_typer(speculator_app, name="speculator")


def _require_speculator(settings: RunSettings) -> None:
    """Raises ConfigError unless the trainer of the run's own cluster trains a speculator."""
    if settings.cluster is None or settings.cluster.trainer is None:
        return
    section = settings.cluster.trainer.get("speculator")
    if not isinstance(section, dict) or not section.get("adapter"):
        raise ConfigError(
            "cluster.trainer.speculator: the trainer trains no speculator",
            hint="its `adapter` names the kind: mlp or arctic_lstm",
        )


add_training(
    "sft",
    "Train a speculator on the senior's own responses.\n\n"
    "This is `tandem sft` with sft.responses: senior, by a trainer whose\n"
    "configuration has the section `speculator`. With the override\n"
    "sft.responses=rows it learns the rows' answers.",
    group=speculator_app,
    name="train",
    implied=("sft.responses=senior",),
    check=_require_speculator,
)


@command(speculator_app)
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, or a run directory (its last checkpoint).",
            metavar="CHECKPOINT|RUN_DIR",
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to write.", metavar="DIR")],
    dtype: Annotated[str, typer.Option(help=f"Number format: {', '.join(NAMES)}.")] = "fp32",
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint's speculator as a directory of its own.

    `senior_speculator` of a rollout server and `speculator.path` of a trainer
    name such a directory.
    """
    from tandem.checkpoints import checkpoint_at, require_here
    from tandem.export import export_speculator
    from tandem.number_formats import torch_name

    output = Output(as_json=as_json)
    wanted = torch_name(dtype, "--dtype")
    found = checkpoint_at(Path(source))
    require_here(found, "SOURCE")
    written = export_speculator(found.trainer, destination, dtype)
    output.result({"path": str(written), "dtype": wanted}, f"{written}: {wanted}")
