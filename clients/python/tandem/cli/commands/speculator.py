"""`tandem speculator`: small models that draft the senior's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.command_line import JsonFlag, app, command
from tandem.cli.commands.options import DryRun, Overrides, RunFile
from tandem.cli.commands.training import (
    CheckpointOption,
    DiscardUnsaved,
    add_training,
    evaluated_session,
    found_checkpoint,
    load_run,
    show_preflight,
    weights_source,
)
from tandem.errors import ConfigError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.settings.run import RunSettings
from tandem.terminal.output import Output
from tandem.terminal.progress import work_shown
from tandem.utils.number_formats import NAMES
from tandem.utils.words import counted

if TYPE_CHECKING:
    from tandem.rpc.client import TrainerClient

speculator_app = typer.Typer(
    help="Train, measure and export speculators, which draft the senior's tokens.",
    no_args_is_help=True,
)
app.add_typer(speculator_app, name="speculator")


def _require_section(settings: RunSettings) -> None:
    """Raises ConfigError unless the trainer of the run's own cluster trains a speculator."""
    if settings.cluster is None or settings.cluster.trainer is None:
        return
    section = settings.cluster.trainer.get("speculator")
    if not isinstance(section, dict) or not section.get("adapter"):
        raise ConfigError(
            "cluster.trainer.speculator: the trainer does not train a speculator",
            hint="its `adapter` names the kind: mlp or arctic_lstm",
        )


def _require_speculator(trainer: TrainerClient) -> None:
    """Raises ConfigError unless the running trainer trains a speculator."""
    if not trainer.info().has_speculator:
        raise ConfigError(
            f"servers.trainer: the trainer at {trainer.address} does not train a speculator",
            hint="the section `speculator` of its configuration turns it on",
        )


add_training(
    "sft",
    "Train a speculator on the senior's own responses.\n\n"
    "This is `tandem sft` with sft.responses: senior, by a trainer whose\n"
    "configuration has the section `speculator`. With the override\n"
    "sft.responses=rows it learns from the rows' answers.",
    group=speculator_app,
    name="train",
    implied=("sft.responses=senior",),
    check=_require_section,
    check_trainer=_require_speculator,
)


@command(speculator_app, name="eval")
def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Number of prompts that the server answers concurrently.")
    ] = 1,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of times that all prompts are answered; the interval is over these "
            "repeats.",
        ),
    ] = 5,
    discard_unsaved: DiscardUnsaved = False,
    dry_run: DryRun = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Measure drafts on held-out prompts: how many are accepted, and the speed.

    The first rollout server answers every prompt with and without drafts, by the
    senior only, greedily and at sampling.temperature. The method is that of
    eval.speculative, or of speculative; if neither names one, it is heads, the
    rollout server's senior.speculator.

    --checkpoint leaves its weights in the trainer and the rollout servers; the
    next run still begins with the base model.
    """
    from tandem.evaluation.drafts import measure_drafts
    from tandem.evaluation.report import draft_rows

    output = Output(as_json=as_json)
    settings = _with_drafts(load_run(run_file, overrides, credentials, dry_run=dry_run))
    path = found_checkpoint(checkpoint, settings)
    if dry_run:
        show_preflight(output, settings, "drafts")
        return
    with evaluated_session(
        output, settings, "drafts", checkpoint, discard_unsaved=discard_unsaved
    ) as session:
        version = session.weights().version
        results = [one.summary() for one in measure_drafts(session, concurrency, repeats)]
    method = settings.eval_speculative.method
    title = (
        f"{counted(results[0]['prompts'], 'prompt')}, {concurrency:,} at a time, "
        f"{counted(repeats, 'repeat')}, drafts by {method}; senior "
        f"version {version}, {weights_source(path)}"
    )
    columns = ("", *(f"temperature {one['temperature']:g}" for one in results))
    output.result(
        {
            "checkpoint": path and str(path),
            "method": method,
            "concurrency": concurrency,
            "version/senior": version,
            "results": results,
        },
        output.table(title, columns, draft_rows(results)),
    )


def _with_drafts(settings: RunSettings) -> RunSettings:
    """Returns the settings with drafts of evaluations: of heads where no method is named."""
    drafts = settings.eval_speculative
    if drafts.method != "none":
        return settings
    heads = drafts.model_copy(update={"method": "heads"})
    evaluation = settings.eval.model_copy(update={"speculative": heads})
    return settings.model_copy(update={"eval": evaluation})


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
    """Export a checkpoint's speculator to a directory of its own.

    A rollout server's `senior.speculator` and a trainer's `speculator.path`
    accept such a directory.
    """
    from tandem.run_directory.checkpoints import checkpoint_at, require_here
    from tandem.run_directory.export import export_speculator
    from tandem.utils.number_formats import torch_name

    output = Output(as_json=as_json)
    wanted = torch_name(dtype, "--dtype")
    found = checkpoint_at(Path(source))
    require_here(found, "SOURCE")
    with work_shown(output, "export") as progress:
        written = export_speculator(found.trainer, destination, dtype, progress.bytes_done)
    output.result({"path": str(written), "dtype": wanted}, f"{written}: {wanted}")
