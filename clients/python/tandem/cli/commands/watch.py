"""`tandem watch`: the steps of a trainer as they are done, whichever client requested them."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.cli.commands.options import TrainerAddress
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.terminal.output import Output

# The metrics of a report that a line for people shows, where the report has them.
_SHOWN = (
    "reward/mean",
    "loss/total",
    "critic/loss",
    "policy/kl_to_ref",
    "policy/grad_norm",
    "policy/learning_rate",
    "policy/entropy",
    "mismatch/k3",
    "tandem/senior_token_fraction",
    "tokens/response",
)
# A year, because a watcher has no deadline.
_TIMEOUT_SECONDS = 365 * 86400.0


@command()
def watch(
    trainer: TrainerAddress = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of steps to print. Default: until Ctrl-C.")
    ] = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Print every step that a trainer makes from now on, whichever run it belongs to.

    With --json, all metrics of its report, one step per line.
    """
    from tandem.cluster.registry import connect
    from tandem.rpc.client import TrainerClient

    output = Output(as_json=as_json)
    options = {"timeout_seconds": _TIMEOUT_SECONDS}
    with connect(TrainerClient, trainer, "--trainer", credentials, **options) as client:
        reports = client.watch_steps()
        output.note(f"watching {client.address}; Ctrl-C stops")
        for count, response in enumerate(reports, start=1):
            line = _line(response.report)
            if as_json:
                output.json_line(line)
            else:
                output.note(_words(line))
            if count == steps:
                return


def _line(report: Any) -> dict[str, Any]:
    """Returns a report as JSON."""
    metrics = {
        name: value if math.isfinite(value) else None
        for name, value in sorted(report.metrics.items())
    }
    return {
        "run_id": report.run_id,
        "step": report.step,
        "version": report.weights.version,
        "skipped": report.skip_reason if report.skipped else None,
        "metrics": metrics,
    }


def _words(line: dict[str, Any]) -> str:
    head = f"{line['run_id']} step {line['step']}: version {line['version']}"
    if line["skipped"] is not None:
        return f"{head}, skipped: {line['skipped']}"
    metrics = line["metrics"]
    known = [name for name in _SHOWN if metrics.get(name) is not None]
    return ", ".join([head, *(f"{name} {metrics[name]:.4g}" for name in known)])
