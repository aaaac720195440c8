"""`tandem checkpoint`: what checkpoints there are, and whether they are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.command_line import JsonFlag, app, command
from tandem.cli.commands.export import export
from tandem.errors import ConfigError
from tandem.terminal.output import Output

if TYPE_CHECKING:
    from tandem.run_directory.stored_checkpoints import StoredCheckpoint

checkpoint_app = typer.Typer(
    help="List, verify and export checkpoints, of this machine or at a URL.", no_args_is_help=True
)
app.add_typer(checkpoint_app, name="checkpoint")

Place = Annotated[
    str,
    typer.Argument(
        help="Run directory, folder of checkpoints, or checkpoint; also a URL of fsspec.",
        metavar="DIR|URL",
    ),
]


@command(checkpoint_app, name="ls")
def list_checkpoints(place: Place, as_json: JsonFlag = False) -> None:
    """List checkpoints: step, version of the weights, size, whether whole, contents.

    Whole: the manifest is there and every file has its size; `verify` also
    reads the files.
    """
    from tandem.run_directory.stored_checkpoints import checkpoints_in

    found = checkpoints_in(place, "DIR")
    output = Output(as_json=as_json)
    rows = [_row(one) for one in found]
    lines = [_line(row) for row in rows]
    output.result({"checkpoints": rows}, "\n".join(lines))


@command(checkpoint_app)
def verify(place: Place, as_json: JsonFlag = False) -> None:
    """Compare every file of checkpoints with their manifests, byte by byte.

    The exit code is 2 if one is damaged or not complete. What a server is
    writing is passed over.
    """
    from tandem.run_directory.stored_checkpoints import checkpoints_in
    from tandem.terminal.progress import work_shown

    output = Output(as_json=as_json)
    found = [one for one in checkpoints_in(place, "DIR") if not one.store.name.startswith(".")]
    damaged = {}
    with work_shown(output, "verify") as progress:
        for one in found:
            if damage := one.damage(progress.bytes_done):
                damaged[str(one.store)] = damage
    if damaged:
        problems = [f"{name}: {what}" for name, all_of in damaged.items() for what in all_of]
        raise ConfigError("\n".join(problems), hint="load the checkpoint before it")
    paths = [str(one.store) for one in found]
    output.result({"checkpoints": paths}, "\n".join(f"{path}: whole" for path in paths))


command(checkpoint_app)(export)


def _row(one: StoredCheckpoint) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "path": str(one.store),
        "kind": manifest and manifest.kind,
        "step": one.step,
        "version": manifest and manifest.step,
        "run_id": manifest and manifest.run_id,
        "bytes": manifest and manifest.total_bytes,
        "whole": not one.problems,
        "problems": list(one.problems),
        "holds": list(one.holds),
    }


def _line(row: dict[str, Any]) -> str:
    if not row["whole"]:
        return f"{row['path']}: not whole: {row['problems'][0]}"
    step = "" if row["step"] is None else f"step {row['step']}, "
    return (
        f"{row['path']}: {row['kind']}, {step}version {row['version']}, "
        f"{row['bytes'] / 1e6:.1f} MB, {', '.join(row['holds'])}"
    )
