"""The demo: a real pretrained model, trained by Tandem Reinforcement Learning, on one machine.

    python -m tandem.demo [--config examples/demo/run.yaml] [dotted.key=value ...]

It imports the model, starts the servers, lets the senior alone answer held-out questions, trains
it with the frozen start as its junior, asks the same questions again, and says what changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tandem import settings as settings_module
from tandem.cluster import BUILD_DIR_VARIABLE
from tandem.command_line import EXIT_INTERRUPTED, report
from tandem.errors import RunDirectoryError, TandemError
from tandem.evaluate import Evaluation, evaluate
from tandem.interrupt import Interrupt
from tandem.models import SMOLLM2_PACKAGE, import_model
from tandem.render import Output, use_any_encoding
from tandem.run_dir import RunDirectory
from tandem.run_files import kind_of_run
from tandem.session import Session
from tandem.settings import RunSettings
from tandem.stats import paired_gain
from tandem.step_display import StepDisplay
from tandem.train import train
from tandem.view.terminal import print_trajectories
from tandem.view.trajectories import Trajectory, read_step

CONFIG = Path("examples/demo/run.yaml")
# In run.json: whose run directory it is.
KIND = "demo"


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    use_any_encoding()
    parser = argparse.ArgumentParser(prog="python -m tandem.demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--build-dir", type=Path, help="where the servers were built")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    output = Output(as_json=options.json)
    if options.build_dir is not None:
        os.environ[BUILD_DIR_VARIABLE] = str(options.build_dir.resolve())
    try:
        settings = settings_module.load(RunSettings, options.config, options.overrides)
        return run_demo(settings, output)
    except TandemError as error:
        return report(error, as_json=options.json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_demo(settings: RunSettings, output: Output) -> int:
    """Import, start, evaluate, train, evaluate, compare."""
    start = time.monotonic()
    model = import_model(SMOLLM2_PACKAGE, settings.tokenizer)
    what = "already imported" if model.already_there else "imported"
    output.note(f"model: {model.path} ({model.parameters / 1e6:.0f} M parameters, {what})")
    with (
        open_run(settings) as run,
        Interrupt(lambda: output.note("stopping after this step")) as stop,
        Session(settings, output.note) as session,
    ):
        before = evaluate(session)
        _say_accuracy(output, "before", before)
        stop.defer()
        run.begin()
        run.write_eval({"step": 0} | before.summary())
        lines: list[dict[str, Any]] = []
        with StepDisplay(output, 1, settings.steps) as display:

            def on_step(line: dict[str, Any]) -> None:
                lines.append(line)
                display.step(line)

            last = train(session, run, on_step, stop)
        if stop.requested:
            output.note(f"stopped after step {last}: {run.path}")
            return EXIT_INTERRUPTED
        after = evaluate(session)
        run.write_eval({"step": last} | after.summary())

        output.note(f"\ntime: {display.waiting()}\n")
        if not output.as_json:
            shown = _first_of_groups(read_step(run.path, last), 6)
            print_trajectories(output, session.codec, shown, f"Step {last}")
        result = compare(before, after, lines) | {
            "run_dir": str(run.path),
            "seconds": round(time.monotonic() - start, 1),
        }
        title = "Held-out questions, the senior alone, greedy"
        columns = ("", "accuracy", "95 % interval")
        output.result(result, output.table(title, columns, _summary(result)))
        output.note(f"run directory: {run.path}")
        output.note(f"more trajectories: {command()} view {run.path} --step {last}")
    return 0


def open_run(settings: RunSettings) -> RunDirectory:
    """The run directory, an earlier demo's to be thrown away.

    Raises:
        RunDirectoryError: it holds what no demo wrote; nobody asked us to throw that away.
    """
    kind = kind_of_run(settings.run_dir)
    if kind not in (None, KIND):
        raise RunDirectoryError(
            f"{settings.run_dir} holds a run of kind {kind}: the demo replaces its own alone",
            hint="run_dir=OTHER names another directory; or remove this one",
        )
    return RunDirectory.open(settings, KIND, clean=True)


def compare(before: Evaluation, after: Evaluation, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers that the demo ends with."""
    gain, half_width = paired_gain(before.correct, after.correct)
    shares = [line["tandem/senior_token_fraction"] for line in lines]
    return {
        "questions": before.prompts,
        "accuracy_before": before.accuracy,
        "interval_before": before.interval,
        "accuracy_after": after.accuracy,
        "interval_after": after.interval,
        "gain": gain,
        "gain_half_width": half_width,
        "senior_share": sum(shares) / len(shares) if shares else None,
        "steps": len(lines),
    }


def _say_accuracy(output: Output, when: str, result: Evaluation) -> None:
    low, high = result.interval
    output.note(
        f"held-out accuracy of the senior alone {when} training: {result.accuracy:.1%} "
        f"(95 %: {low:.1%} to {high:.1%}, {result.prompts} questions)"
    )


def _summary(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, how much, and its 95 % interval."""
    rows = []
    for when in ("before", "after"):
        low, high = result[f"interval_{when}"]
        accuracy = f"{result[f'accuracy_{when}']:.1%}"
        rows.append((f"{when} training", accuracy, f"{low:.1%} to {high:.1%}"))
    gain, half = result["gain"], result["gain_half_width"]
    share = result["senior_share"]
    return [
        *rows,
        ("gain", f"{gain:+.1%}", f"{gain - half:+.1%} to {gain + half:+.1%}"),
        ("questions", str(result["questions"]), ""),
        ("tokens by the senior", "-" if share is None else f"{share:.1%}", ""),
        ("steps, whole time", f"{result['steps']}, {result['seconds']:.0f} s", ""),
    ]


def command() -> str:
    """How to call `tandem` from here: by its name if that is on the path."""
    beside = Path(sys.executable).with_name("tandem")
    return "tandem" if shutil.which("tandem") else os.path.relpath(beside)


def _first_of_groups(trajectories: list[Trajectory], count: int) -> list[Trajectory]:
    # Those with both authors first: that is what there is to see.
    firsts: dict[str, Trajectory] = {}
    for one in sorted(
        trajectories, key=lambda t: len(set(t.record["authorship_mask"])), reverse=True
    ):
        firsts.setdefault(one.record["group_id"], one)
    return list(firsts.values())[:count]


if __name__ == "__main__":
    sys.exit(main())
