"""The demo: a real pretrained model, trained by Tandem Reinforcement Learning, on one machine.

    python examples/demo/demo.py [--config examples/demo/run.yaml] [dotted.key=value ...]

It imports the model, starts the servers, evaluates the senior on held-out questions (alone, taking
turns with the junior, and read by the junior), trains it with the frozen start as its junior,
asks the same questions again, and compares the answers. With `cluster=null` and addresses in
`servers` it takes servers that run, which have their model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.cli.command_line import EXIT_INTERRUPTED, report
from tandem.cluster.local import BUILD_DIR_VARIABLE
from tandem.errors import RunDirectoryError, TandemError
from tandem.evaluation import Evaluation, evaluate
from tandem.evaluation.answers import held_out
from tandem.evaluation.report import Measure, in_words, measures
from tandem.models.importing import SMOLLM2_PACKAGE, import_model
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.session.session import Session
from tandem.settings import loading
from tandem.settings.run import EvalMode, RunSettings
from tandem.terminal.output import Output, use_any_encoding
from tandem.terminal.progress import progress_shown
from tandem.terminal.steps import StepDisplay
from tandem.training.loop import train
from tandem.utils.atomic_files import kind_of_run
from tandem.utils.interrupt import Interrupt
from tandem.utils.progress import Progress
from tandem.utils.stats import paired_gain
from tandem.view.terminal import print_trajectories
from tandem.view.trajectories import Chosen, Trajectory, recorded

CONFIG = Path("examples/demo/run.yaml")
# The kind of the demo's run directory, in run.json.
KIND = "demo"


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    use_any_encoding()
    parser = argparse.ArgumentParser(prog="python examples/demo/demo.py", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--build-dir", type=Path, help="where the servers were built")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    output = Output(as_json=options.json)
    if options.build_dir is not None:
        os.environ[BUILD_DIR_VARIABLE] = str(options.build_dir.resolve())
    try:
        settings = loading.load(RunSettings, options.config, options.overrides)
        return run_demo(settings, output)
    except TandemError as error:
        return report(error, as_json=options.json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_demo(settings: RunSettings, output: Output) -> int:
    """Imports the model, starts, evaluates, trains, evaluates, compares; returns the exit code."""
    start = time.monotonic()
    progress = Progress()
    # Servers that run already have their model.
    if settings.cluster is not None:
        model = import_model(SMOLLM2_PACKAGE, settings.tokenizer)
        what = "already imported" if model.already_there else "imported"
        output.note(f"model: {model.path} ({model.parameters / 1e6:.0f} M parameters, {what})")
    with (
        output.shows_log(),
        open_run(settings) as run,
        Interrupt(lambda: output.note("stopping after this step")) as stop,
        open_session(settings, progress=progress) as session,
    ):
        with progress_shown(output, progress):
            before = evaluate(session)
        _say(output, "before training", before)
        stop.defer()
        run.begin()
        _record(run, session, 0, before)
        lines: list[dict[str, Any]] = []
        with StepDisplay(output, 1, settings.steps, work=progress) as display:

            def on_step(line: dict[str, Any]) -> None:
                lines.append(line)
                display.step(line)

            last = train(session, run, on_step, stop)
        if stop.requested:
            output.note(f"stopped after step {last}: {run.path}")
            return EXIT_INTERRUPTED
        with progress_shown(output, progress):
            progress.begin("")
            after = evaluate(session)
        _record(run, session, last, after)

        output.note(f"\ntime: {display.waiting()}\n")
        if not output.as_json:
            file = next(one for one in recorded(run.path) if one.step == last)
            shown = _first_of_groups(Chosen(file).read(), 6)
            print_trajectories(output, session.codec, shown, f"Step {last}")
        result = compare(before, after, lines) | {
            "run_dir": str(run.path),
            "seconds": round(time.monotonic() - start, 1),
        }
        title = f"{result['questions']} held-out questions, {_decoding(settings)}"
        columns = ("", "before", "after", "gain")
        output.result(result, output.table(title, columns, _summary(result)))
        output.note(f"run directory: {run.path}")
        output.note(f"more trajectories: {command()} view {run.path} --step {last}")
    return 0


def open_run(settings: RunSettings) -> RunDirectory:
    """Opens the run directory, and throws an earlier demo's away.

    Raises:
        RunDirectoryError: it holds files that no demo wrote.
    """
    kind = kind_of_run(settings.run_dir)
    if kind not in (None, KIND):
        raise RunDirectoryError(
            f"{settings.run_dir} holds a run of kind {kind}: the demo replaces only its own runs",
            hint="choose another directory with run_dir=OTHER, or remove this one",
        )
    return RunDirectory.open(settings, KIND, clean=True)


def compare(
    before: Mapping[EvalMode, Evaluation],
    after: Mapping[EvalMode, Evaluation],
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the result of the demo: both evaluations, their gains, and the steps."""
    fractions = [line["tandem/senior_token_fraction"] for line in lines]
    gains = {
        mode: paired_gain(first.grades.correct, after[mode].grades.correct)
        for mode, first in before.items()
        if first.grades is not None
    }
    [first, *_] = before.values()
    return {
        "questions": len(first.answers),
        "before": {mode: evaluation.summary() for mode, evaluation in before.items()},
        "after": {mode: evaluation.summary() for mode, evaluation in after.items()},
        "gain": {mode: {"mean": mean, "half_width": half} for mode, (mean, half) in gains.items()},
        "senior_token_fraction": sum(fractions) / len(fractions) if fractions else None,
        "steps": len(lines),
    }


def _say(output: Output, when: str, evaluations: Mapping[EvalMode, Evaluation]) -> None:
    for evaluation in evaluations.values():
        output.note(f"{when}, {in_words(evaluation.summary())}")


def _record(
    run: RunDirectory, session: Session, step: int, evaluations: Mapping[EvalMode, Evaluation]
) -> None:
    for mode, evaluation in evaluations.items():
        answers = evaluation.responses(held_out(session), session.codec)
        run.trajectories.write_evaluation(step, mode, answers)
        run.write_eval({"step": step} | evaluation.summary())


def _decoding(settings: RunSettings) -> str:
    temperature = settings.eval.temperature
    return f"temperature {temperature:g}" if temperature else "greedy"


def _summary(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of name, before, after and gain, by mode; below each its 95 % interval."""
    rows: list[tuple[str, str, str, str]] = []
    for mode in result["before"]:
        before, after = (
            {one.name: one for one in measures(result[when][mode])} for when in ("before", "after")
        )
        rows.append((mode, "", "", ""))
        for name in before | after:
            first, last = (found.get(name, Measure(name, "-")) for found in (before, after))
            gain = interval = ""
            if name == "accuracy":
                mean, half = result["gain"][mode]["mean"], result["gain"][mode]["half_width"]
                gain, interval = f"{mean:+.1%}", f"{mean - half:+.1%} to {mean + half:+.1%}"
            rows.append((f"  {name}", first.value, last.value, gain))
            if last.interval:
                rows.append(("  95 % interval", first.interval, last.interval, interval))
    fraction = result["senior_token_fraction"]
    return [
        *rows,
        ("training", "", "", ""),
        ("  tokens by the senior", "", "-" if fraction is None else f"{fraction:.1%}", ""),
        ("  steps, whole time", "", f"{result['steps']}, {result['seconds']:.0f} s", ""),
    ]


def command() -> str:
    """Returns how to call `tandem`: by its name if it is on the path, else by a relative path."""
    beside = Path(sys.executable).with_name("tandem")
    return "tandem" if shutil.which("tandem") else os.path.relpath(beside)


def _first_of_groups(trajectories: Iterable[Trajectory], count: int) -> list[Trajectory]:
    # Responses with both authors come first: they show the tandem.
    firsts: dict[str, Trajectory] = {}
    for one in sorted(
        trajectories, key=lambda t: len(set(t.record["authorship_mask"])), reverse=True
    ):
        firsts.setdefault(one.record["group_id"], one)
    return list(firsts.values())[:count]


if __name__ == "__main__":
    sys.exit(main())
