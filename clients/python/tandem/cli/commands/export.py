"""`tandem export`: trained weights as a plain Hugging Face directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.errors import ConfigError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.stores.store import Store, is_url, shown
from tandem.terminal.output import Output
from tandem.utils.number_formats import NAMES

if TYPE_CHECKING:
    from tandem.utils.byte_progress import OnBytes

# The word of `start_from`, too: what the servers hold.
_SERVED = "served"


@command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A run directory (its last checkpoint), a checkpoint, a URL of either, or "
            "`served`: the running trainer's weights.",
            metavar="RUN_DIR|CHECKPOINT|served",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(help="Directory to write, or its URL.", metavar="DIR")
    ],
    dtype: Annotated[str, typer.Option(help=f"Number format: {', '.join(NAMES)}.")] = "fp32",
    critic: Annotated[
        bool, typer.Option("--critic", help="Write the critic's weights, not the trainer's.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="With `served`: address of the server. Default: the one in the cluster that "
            "`tandem up` runs, else 127.0.0.1:7702 (critic: 7703).",
            metavar="HOST:PORT",
        ),
    ] = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Export weights to a directory that transformers can load.

    Config, generation config and tokenizer are included. A checkpoint needs no
    server; transformers can also load it directly (in fp32).
    """
    from tandem.terminal.progress import work_shown
    from tandem.utils.number_formats import torch_name

    output = Output(as_json=as_json)
    wanted = torch_name(dtype, "--dtype")
    if source != _SERVED and address is not None:
        raise ConfigError(
            f"--address: only applies to `{_SERVED}`; {source} is exported from its files"
        )
    if source == _SERVED and is_url(destination):
        raise ConfigError(
            f"DIR: {shown(destination)}: the server writes only to its own file system",
            hint="save a checkpoint, and export that",
        )
    with work_shown(output, "export") as progress, _written(destination) as (folder, written):
        if source == _SERVED:
            written = _export_served(folder, dtype, address, credentials, critic=critic)
        else:
            _export_files(source, folder, dtype, progress.bytes_done, critic=critic)
    output.result({"path": str(written), "dtype": wanted}, f"{written}: {wanted}")


@contextmanager
def _written(destination: str) -> Iterator[tuple[Path, str]]:
    """Yields the directory to write, and what to call it; uploads it afterwards for a URL."""
    if not is_url(destination):
        yield Path(destination), str(Path(destination).absolute())
        return
    from tandem.stores.transfers import upload

    store = Store(destination, "DIR")
    if store.files():
        raise ConfigError(f"DIR: {store} exists", hint="choose another URL")
    with tempfile.TemporaryDirectory(prefix="tandem-export-") as folder:
        yield Path(folder) / "model", str(store)
        # Nothing loads a directory without it.
        upload(Path(folder) / "model", store, last="config.json")


def _export_files(
    source: str, destination: Path, dtype: str, progress: OnBytes, *, critic: bool
) -> Path:
    from tandem.run_directory.checkpoints import checkpoint_at, require_here
    from tandem.run_directory.export import export_checkpoint
    from tandem.stores.transfers import fetch_checkpoint

    found = checkpoint_at(fetch_checkpoint(source, "SOURCE") if is_url(source) else Path(source))
    require_here(found, "SOURCE")
    if not critic:
        return export_checkpoint(found.trainer, destination, dtype, progress)
    if found.critic is None:
        raise ConfigError(f"--critic: {source} has no critic checkpoint")
    return export_checkpoint(found.critic, destination, dtype, progress)


def _export_served(
    destination: Path, dtype: str, address: str | None, credentials: Credentials, *, critic: bool
) -> Path:
    from tandem.cluster.registry import connect
    from tandem.rpc.client import CriticClient, TrainerClient

    kind = CriticClient if critic else TrainerClient
    with connect(kind, address, "--address", credentials) as client:
        return Path(client.export_model(str(destination), dtype=dtype))
