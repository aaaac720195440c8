"""`tandem view` and `tandem plot`: the trajectories and the curves of runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.errors import ConfigError
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.terminal.output import Output, picture, recording_console
from tandem.utils.atomic_files import replacing, write_atomically
from tandem.utils.words import counted

# Trajectories that a terminal shows by default.
_FEW = 8


@command()
def view(
    run_dir: Annotated[
        Path,
        typer.Argument(help="A run directory, or a file of trajectories.", metavar="RUN_DIR"),
    ],
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--eval",
            help="Show the answers of an evaluation (solo, handoff, …) instead of steps.",
            metavar="MODE",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="A step, or a range FIRST:LAST whose ends are optional. Default: the last step; "
            "for a page or JSON lines, all steps.",
            metavar="STEP",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A reward, or a range LOW:HIGH whose ends are optional.", metavar="REWARD"
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="Text that the response contains, ignoring case.")] = "",
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Maximum number of trajectories. Default: {_FEW}; all for a page and with "
            "--json.",
        ),
    ] = None,
    advantage: Annotated[
        bool, typer.Option("--advantage", help="Also show the reward minus its group's mean.")
    ] = False,
    gap: Annotated[
        bool,
        typer.Option("--gap", help="Also show the tokens' log-prob gaps: senior minus junior."),
    ] = False,
    drafts: Annotated[
        bool, typer.Option("--drafts", help="Also mark and count the accepted drafts.")
    ] = False,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write an HTML page, a picture of the terminal output (.svg), or the records as "
            "JSON lines (.jsonl).",
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
    as a picture, or as JSON lines.
    """
    from tandem.models.tokenizer import TextCodec
    from tandem.view.about import about
    from tandem.view.page import page
    from tandem.view.terminal import print_trajectories
    from tandem.view.trajectories import Chosen, Filter, Range, recorded

    output = Output(as_json=as_json)
    suffix = "" if output_file is None else output_file.suffix
    # A picture shows what a terminal does, and as much.
    as_picture, as_lines = suffix == ".svg", suffix == ".jsonl"
    records_alone = as_lines or (as_json and output_file is None)
    if records_alone and (advantage or gap or drafts):
        which = str(output_file) if as_lines else "--json"
        raise ConfigError(f"--advantage, --gap, --drafts: {which} contains the records unchanged")
    wanted = Filter(Range.parse(reward, "--reward") if reward is not None else None, text)
    files = recorded(run_dir, evaluation or "")
    if step is not None:
        asked = Range.parse(step, "--step")
        known, files = files, [one for one in files if one.step in asked]
        if not files:
            held = f"{known[0].step} to {known[-1].step}"
            raise ConfigError(f"--step {step}: {run_dir} holds steps {held}")
    elif output_file is None or as_picture:
        files = files[-1:]
    found = (one for file in files for one in Chosen(file, wanted).read(count))
    if records_alone:
        records = (one.record for one in itertools.islice(found, count))
        if output_file is None:
            for record in records:
                output.json_line(record)
            return
        written = write_lines(output_file, records)
        output.result(
            {"records": str(output_file), "count": written},
            f"{output_file}: {counted(written, 'record')}",
        )
        return
    if tokenizer is None:
        if run_dir.is_file():
            raise ConfigError(
                f"{run_dir} names no tokenizer", hint="--tokenizer DIR: the model's directory"
            )
        tokenizer = loading.load(RunSettings, run_dir / "config.yaml").tokenizer
    codec = TextCodec(tokenizer)
    if output_file is not None and not as_picture:
        chosen = itertools.islice(found, count)
        said = about(run_dir, evaluation=evaluation is not None)
        html = page(said, codec, chosen, advantage=advantage, gap=gap, drafts=drafts)
        write_atomically(output_file, html)
        output.result({"page": str(output_file)}, f"{output_file}: open it in a browser")
        return
    total, shown, most = 0, [], count or _FEW
    for file in files:
        chosen_here = Chosen(file, wanted)
        total += chosen_here.count
        shown += chosen_here.read(most - len(shown))
    what = f"{evaluation} evaluation after step" if evaluation else "step"
    steps = f" {files[0].step}" if len(files) == 1 else f"s {files[0].step} to {files[-1].step}"
    title = f"{what[0].upper()}{what[1:]}{steps}, {len(shown):,} of "
    title += counted(total, "trajectory", "trajectories")
    screen = Output(console=recording_console()) if as_picture else output
    print_trajectories(screen, codec, shown, title, advantage=advantage, gap=gap, drafts=drafts)
    if output_file is not None:
        write_atomically(output_file, picture(screen.console, f"tandem view {run_dir}"))
        output.result({"picture": str(output_file)}, str(output_file))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Writes records as JSON lines; returns their number."""
    count = 0
    with replacing(path) as file:
        for record in records:
            # The escape of a character that UTF-8 cannot hold is the one of JSON, too.
            line = json.dumps(record, ensure_ascii=False) + "\n"
            file.write(line.encode("utf-8", "backslashreplace"))
            count += 1
    return count


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
                "--output: is required for several runs", hint="for example --output runs.png"
            )
        output_file = run_dirs[0] / "metrics.png"
    runs = {str(run_dir): read_curves(run_dir) for run_dir in run_dirs}
    names = choose(metric or [], (name for curves in runs.values() for name in curves))
    if not metric:
        names = without_repeats(runs, names)
    draw(runs, names, output_file, smoothing=smoothing)
    output.result({"picture": str(output_file), "metrics": names}, str(output_file))
