"""The demo: what tandem does to a real pretrained model, in minutes on one machine.

    python examples/demo/demo.py [--seed 0] [--clean]

A junior learns to solve sums in words. A senior goes on from there and learns a code beside the
words, which the junior cannot read. Then the senior is trained twice from this start, by a reward
that likes short answers: alone, and in tandem with the junior. At the end stand the accuracy of the
senior by itself, and that of its answers when the junior finishes them.

All that it does are commands of `tandem`, which it shows. What is done is not done again: a demo
that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sums
from tandem.cluster.local import BUILD_DIR_VARIABLE
from tandem.models.importing import SMOLLM2_PACKAGE
from tandem.terminal.output import Output, use_any_encoding

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
RUNS = ROOT / "runs/demo"

# The supervised trainings: the model that each begins with, which may be one of the folder, its
# rows, and its number of steps.
TAUGHT = {"junior": (MODEL, "words.jsonl", 32), "senior": ("junior", "both.jsonl", 80)}
# The trainings by reward, and the settings of each that differ from run.yaml.
ARMS = {"solo": ["tandem.enabled=false"], "tandem": []}
# The lines of the table: a number of the evaluations of a step, by mode, and its format.
MEASURES: Mapping[str, tuple[Callable[[Mapping[str, Any]], float], str]] = {
    "the senior's answers are right": (lambda of: of["solo"]["accuracy"], "{:.0%}"),
    "the answers that the junior finishes are right": (
        lambda of: of["junior_takeover"]["accuracy"],
        "{:.0%}",
    ),
    "the senior writes code": (lambda of: of["solo"]["pattern/code"], "{:.0%}"),
    "the junior's nats per token of the answer": (
        lambda of: of["legibility"]["junior/nats_per_token"],
        "{:.2f}",
    ),
    "tokens of an answer": (
        lambda of: of["legibility"]["tokens/response"] / answers(of["legibility"]),
        "{:.1f}",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code of the command that failed, or 0."""
    use_any_encoding()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean", action="store_true", help="begin anew")
    parser.add_argument("--build-dir", type=Path, help="where the servers were built")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    if options.build_dir is not None:
        os.environ[BUILD_DIR_VARIABLE] = str(options.build_dir.resolve())
    folder = RUNS / f"seed-{options.seed}"
    if options.clean:
        shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    try:
        teach(folder, options.seed)
        for arm in ARMS:
            train(folder, options.seed, arm)
        for arm in ARMS:
            tandem("view", folder / arm, "--eval", "junior_takeover", "--count", 1)
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    output = Output(as_json=options.json)
    result = {arm: evaluations(folder / arm) for arm in ARMS}
    title = "sums that neither training by reward saw"
    columns = ("", "before", *(f"after {arm} GRPO" for arm in ARMS))
    output.result(result, output.table(title, columns, table(result)))
    output.note(f"{time.monotonic() - start:.0f} s; all of it is in {relative(folder)}")
    return 0


def teach(folder: Path, seed: int) -> None:
    """Makes the junior and the senior, unless they are there."""
    if not MODEL.exists():
        tandem("model", "import", SMOLLM2_PACKAGE, MODEL)
    sums.main(folder, seed)
    for name, (model, texts, steps) in TAUGHT.items():
        if (folder / name).exists():
            continue
        run = folder / f"teach-{name}"
        tandem(
            "sft",
            HERE / "teach.yaml",
            "--resume",
            "auto",
            f"steps={steps}",
            f"run_dir={run}",
            f"data.jsonl={folder / texts}",
            f"cluster.model={folder / model}",
            f"cluster.directory={folder / 'cluster'}",
            f"seed={seed}",
        )
        tandem("export", run, folder / name)
        # Its checkpoint is three times as large as the model.
        shutil.rmtree(run)


def train(folder: Path, seed: int, arm: str) -> None:
    """Trains the senior in one of the ARMS, unless that is done."""
    tandem(
        "train",
        HERE / "run.yaml",
        "--resume",
        "auto",
        f"run_dir={folder / arm}",
        f"data.jsonl={folder / 'train.jsonl'}",
        f"eval.data.jsonl={folder / 'held_out.jsonl'}",
        f"cluster.model={folder / 'senior'}",
        f"cluster.rollout.junior.model={folder / 'junior'}",
        f"cluster.directory={folder / 'cluster'}",
        f"seed={seed}",
        *ARMS[arm],
    )


def evaluations(run: Path) -> dict[str, dict[str, Any]]:
    """Returns the first and the last evaluations of a run, as "before" and "after", by mode."""
    found: dict[str, dict[str, Any]] = {"before": {}, "after": {}}
    for line in (run / "evals.jsonl").read_text().splitlines():
        evaluation = json.loads(line)
        found["before"].setdefault(evaluation["mode"], evaluation)
        found["after"][evaluation["mode"]] = evaluation
    return found


def table(result: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns the lines of the table: each measure before training, and after each of the ARMS."""
    shown = [result["solo"]["before"], *(result[arm]["after"] for arm in ARMS)]
    return [
        [name, *(form.format(number(one)) for one in shown)]
        for name, (number, form) in MEASURES.items()
    ]


def answers(evaluation: Mapping[str, Any]) -> int:
    """Returns the number of answers of an evaluation."""
    return evaluation["prompts"] * evaluation["samples"]


def tandem(*arguments: object) -> None:
    """Shows and runs a command of `tandem`, with its output on stderr.

    Raises CalledProcessError when it fails or is interrupted.
    """
    shown = [relative(one) if isinstance(one, Path) else str(one) for one in arguments]
    print("\n$ tandem", *shown, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tandem", *map(str, arguments)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        while process.returncode is None:
            # Ctrl-C reaches the command, too, which ends its step and saves.
            with suppress(KeyboardInterrupt):
                process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def relative(path: Path) -> str:
    """Returns a path as seen from the working directory."""
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
