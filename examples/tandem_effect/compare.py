"""Tandem GRPO beside solo GRPO: three seeds of each, as many sampled responses, and a table.

    python examples/tandem_effect/compare.py [dotted.key=value ...]

The overrides go to every run. The runs are in the folder of `run_dir`, runs/tandem_effect. What is
done is not done again, and a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.metrics import eval_prefix, numbers
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.terminal.output import Output
from tandem.view.curves import read_curves

CONFIG = Path(__file__).with_name("run.yaml")
ARMS = {"solo": "tandem.enabled=false", "tandem": "tandem.enabled=true"}
SEEDS = (0, 1, 2)
# Student's t for a 95 % interval with the degrees of freedom that three seeds leave.
STUDENT_T = 4.303

# The columns: a key of evals.jsonl with its mode in front, or one of count_tokens().
COLUMNS = {
    "solo accuracy": ("eval/solo/accuracy", "{:.0%}"),
    "handoff accuracy": ("eval/handoff/accuracy", "{:.0%}"),
    "solo reward": ("eval/solo/reward/mean", "{:.2f}"),
    "handoff reward": ("eval/handoff/reward/mean", "{:.2f}"),
    "rounds": ("eval/handoff/rounds/mean", "{:.1f}"),
    "junior, nats/token": ("eval/legibility/junior/nats_per_token", "{:.2f}"),
    "gap, nats/token": ("eval/legibility/gap/nats_per_token", "{:.2f}"),
    "answer, tokens": ("tokens/answer", "{:.1f}"),
    "sampled tokens": ("tokens/sampled", "{:,.0f}"),
    "tokens in the loss": ("tokens/trained", "{:,.0f}"),
}
Numbers = Mapping[str, float]


def main(overrides: Sequence[str]) -> None:
    """Does what is left to do, and prints the table."""
    folder = loading.load(RunSettings, CONFIG, overrides).run_dir.parent
    before = evaluate_untrained(folder / "before.json", overrides)
    runs: dict[str, list[Numbers]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:
        for arm, override in ARMS.items():
            run_dir = folder / f"{arm}-{seed}"
            chosen = (override, f"seed={seed}", f"run_dir={run_dir}")
            tandem("train", *overrides, *chosen, "--resume", "auto")
            runs[arm].append(read_run(run_dir))
    output = Output()
    title = "held-out prompts, 95 % intervals: of a run over prompts, of a mean over seeds"
    output.result({}, output.table(title, ("", *COLUMNS), rows(before, runs)))


def tandem(command: str, *arguments: str, **options: object) -> str:
    """Runs the `tandem` command on the example; returns its captured output, if it is captured.

    Raises CalledProcessError when it fails: it has said why.
    """
    called = [sys.executable, "-m", "tandem", command, str(CONFIG), *arguments]
    return subprocess.run(called, check=True, text=True, **options).stdout


def evaluate_untrained(file: Path, overrides: Sequence[str]) -> Numbers:
    """Returns the senior's evaluations before any training, kept in `file`."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tandem("eval", *overrides, "--json", stdout=subprocess.PIPE))
    evaluations = json.loads(file.read_text())["evaluations"].values()
    return count_tokens({k: v for one in evaluations for k, v in numbers(one, eval_prefix(one))})


def read_run(run_dir: Path) -> Numbers:
    """Returns the last evaluation of a run, and its tokens."""
    curves = read_curves(run_dir)
    last = {name: curve.values[-1] for name, curve in curves.items()}
    return count_tokens(last) | {
        "tokens/sampled": sum(curves["tokens/response"].values),
        "tokens/trained": sum(curves["policy/weighted_tokens"].values),
    }


def count_tokens(values: Numbers) -> dict[str, float]:
    """Adds the mean length of the senior's solo answers."""
    legibility = "eval/legibility/"
    answers = values[f"{legibility}prompts"] * values[f"{legibility}samples"]
    return {**values, "tokens/answer": values[f"{legibility}tokens/response"] / answers}


def rows(before: Numbers, runs: Mapping[str, Sequence[Numbers]]) -> list[list[str]]:
    """Returns a line for every run, for the mean of an arm, and for the difference by seed."""
    lines = [["before", *(of_run(before, *column) for column in COLUMNS.values())]]
    for arm, ofs in runs.items():
        for seed, values in zip(SEEDS, ofs, strict=True):
            lines.append([f"{arm} {seed}", *(of_run(values, *c) for c in COLUMNS.values())])
    for arm, ofs in runs.items():
        means = (over_seeds([one[key] for one in ofs], form) for key, form in COLUMNS.values())
        lines.append([f"{arm}, mean", *means])
    pairs = list(zip(runs["tandem"], runs["solo"], strict=True))
    differences = (
        over_seeds([one[key] - other[key] for one, other in pairs], form)
        for key, form in COLUMNS.values()
    )
    return [*lines, ["tandem - solo", *differences]]


def of_run(values: Numbers, key: str, form: str) -> str:
    """Returns a number, with its interval over prompts where there is one."""
    if key not in values:
        return "-"
    interval = [values[end] for end in (f"{key}_low", f"{key}_high") if end in values]
    return with_interval(values[key], interval, form)


def over_seeds(values: Sequence[float], form: str) -> str:
    """Returns the mean over seeds, with its interval by Student's t."""
    mean = statistics.fmean(values)
    half = STUDENT_T * statistics.stdev(values) / math.sqrt(len(values))
    return with_interval(mean, (mean - half, mean + half), form)


def with_interval(value: float, interval: Sequence[float], form: str) -> str:
    """Returns a number and the ends of its interval, if it has one, as text."""
    ends = " to ".join(map(form.format, interval))
    return form.format(value) + (f" ({ends})" if ends else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    main(parser.parse_args().overrides)
