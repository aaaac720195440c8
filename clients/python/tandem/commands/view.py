"""`tandem view` and `tandem plot`: the trajectories and the curves of runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from tandem import settings as settings_module
from tandem.command_line import JsonFlag, command
from tandem.errors import ConfigError
from tandem.render import Output, picture, recording_console
from tandem.run_files import write_atomically
from tandem.settings import RunSettings

# Trajectories that a terminal shows by default.
_FEW = 8


@command()
def view(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN_DIR")],
    step: Annotated[
        str | None,
        typer.Option(
            help="A step, or a range FIRST:LAST whose ends are optional. Default: the last step, "
            "for a page all.",
            metavar="STEP",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A reward, or a range LOW:HIGH whose ends are optional.", metavar="REWARD"
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Text that the response contains, in upper or lower case.")
    ] = "",
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Most trajectories. Default: {_FEW}; all for a page and with --json."
        ),
    ] = None,
    advantage: Annotated[
        bool, typer.Option("--advantage", help="Show also the reward minus its group's mean.")
    ] = False,
    gap: Annotated[
        bool,
        typer.Option("--gap", help="Show also the log-prob gaps of tokens: senior minus junior."),
    ] = False,
    drafts: Annotated[
        bool, typer.Option("--drafts", help="Mark and count also the accepted drafts.")
    ] = False,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write a page for browsers, or a picture of what a terminal shows (.svg).",
            metavar="FILE",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with tokenizer.json. Default: the run's.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show trajectories, coloured by author; with --json one record per line.

    --output writes them as one HTML file, with filters, that needs no network,
    or as a picture.
    """
    from tandem.text import TextCodec
    from tandem.view.page import page
    from tandem.view.terminal import print_trajectories
    from tandem.view.trajectories import Filter, Range, read_step, recorded_steps

    output = Output(as_json=as_json)
    records_alone = as_json and output_file is None
    # A picture shows what a terminal does, and as much.
    as_picture = output_file is not None and output_file.suffix == ".svg"
    if records_alone and (advantage or gap or drafts):
        raise ConfigError("--advantage, --gap, --drafts: --json prints the records as they are")
    wanted = Filter(Range.parse(reward, "--reward") if reward is not None else None, text)
    steps = recorded_steps(run_dir)
    if step is not None:
        asked = Range.parse(step, "--step")
        known, steps = steps, [one for one in steps if one in asked]
        if not steps:
            raise ConfigError(f"--step {step}: {run_dir} holds steps {known[0]} to {known[-1]}")
    elif output_file is None or as_picture:
        steps = steps[-1:]
    found = (one for s in steps for one in read_step(run_dir, s) if wanted.admits(one))
    if records_alone:
        for one in itertools.islice(found, count):
            output.json_line(one.record)
        return
    if tokenizer is None:
        tokenizer = settings_module.load(RunSettings, run_dir / "config.yaml").tokenizer
    codec = TextCodec(tokenizer)
    if output_file is not None and not as_picture:
        name = run_dir.resolve().name
        chosen = itertools.islice(found, count)
        html = page(name, codec, chosen, advantage=advantage, gap=gap, drafts=drafts)
        write_atomically(output_file, html)
        output.result({"page": str(output_file)}, f"{output_file}: open it in a browser")
        return
    shown = list(itertools.islice(found, count or _FEW))
    total = len(shown) + sum(1 for _ in found)
    title = f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"
    title += f", {len(shown):,} of {total:,} trajectories"
    screen = Output(console=recording_console()) if as_picture else output
    print_trajectories(screen, codec, shown, title, advantage=advantage, gap=gap, drafts=drafts)
    if output_file is not None:
        write_atomically(output_file, picture(screen.console, f"tandem view {run_dir}"))
        output.result({"picture": str(output_file)}, str(output_file))


@command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A key of metrics.jsonl, eval/MODE/KEY of evals.jsonl, or a pattern such as "
            "'time/*'; may be repeated."
        ),
    ] = None,
    smoothing: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.999, help="Weight of the past in a moving average, as in TensorBoard."
        ),
    ] = 0.0,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Picture to write (.png, .svg, .pdf). Default for one run: metrics.png in its "
            "directory.",
            metavar="FILE",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw curves of the metrics and evaluations of one or several runs."""
    from tandem.view.curves import choose, draw, read_curves, without_repeats

    output = Output(as_json=as_json)
    if output_file is None:
        if len(run_dirs) > 1:
            raise ConfigError(
                "--output: several runs need it", hint="for example --output runs.png"
            )
        output_file = run_dirs[0] / "metrics.png"
    runs = {str(run_dir): read_curves(run_dir) for run_dir in run_dirs}
    names = choose(metric or [], (name for curves in runs.values() for name in curves))
    if not metric:
        names = without_repeats(runs, names)
    draw(runs, names, output_file, smoothing=smoothing)
    output.result({"picture": str(output_file), "metrics": names}, str(output_file))
