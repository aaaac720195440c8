"""Accepted drafts: before and after a speculator is trained, and in a GRPO run with it beside.

    python examples/speculator/acceptance.py [dotted.key=value ...]

The overrides go to every command. The runs are in the folder of `run_dir`, runs/speculator. What is
done is not done again, and a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.terminal.output import Output

CONFIG = Path(__file__).with_name("run.yaml")
GRPO_STEPS = 20
# The columns: keys of a result of `tandem speculator eval --json`.
COLUMNS = {
    "accepted": ("acceptance_rate", "{:.0%}"),
    "accepted in a row": ("mean_accepted_length", "{:.2f}"),
    "tokens without a pass": ("free_fraction", "{:.0%}"),
    "times as fast": ("speed_up", "{:.2f}"),
}
Results = Sequence[Mapping[str, Any]]


def main(overrides: Sequence[str]) -> None:
    """Does what is left to do, and prints the table."""
    config = loading.load(RunSettings, CONFIG, overrides)
    folder = config.run_dir.parent
    lines: dict[str, Results] = {}
    head, policy = folder / "head", folder / "policy"
    for steps in (1, config.steps):
        # The run stops after its first step, where the speculator has learnt nothing yet.
        train("speculator train", head, overrides, f"steps={steps}")
    for checkpoint in checkpoints(head):
        file = folder / "evals" / f"head-{checkpoint.name}.json"
        lines[f"head, {checkpoint.name}"] = evaluate(file, overrides, checkpoint)
    trained = checkpoints(head)[-1]
    beside = speculator_beside(config, trained)
    train("train", policy, [f"steps={GRPO_STEPS}", *overrides], beside)
    for checkpoint in checkpoints(policy):
        for whose, speculator in (("head before GRPO", trained), ("its head", checkpoint)):
            name = f"GRPO {checkpoint.name}, {whose}"
            file = folder / "evals" / f"{name.replace(', ', '-').replace(' ', '-')}.json"
            senior = ("--checkpoint", str(checkpoint))
            lines[name] = evaluate(file, overrides, speculator, *senior)
    show(lines)


def train(command: str, run_dir: Path, overrides: Sequence[str], *own: str) -> None:
    """Runs or resumes a training run, whose own settings come last."""
    tandem(command, *overrides, f"run_dir={run_dir}", *own, "--resume", "auto")


def speculator_beside(config: RunSettings, checkpoint: Path) -> str:
    """Returns the override that trains the checkpoint's speculator on, beside the policy."""
    section = config.cluster.trainer["speculator"]
    chosen = {name: section[name] for name in ("adapter", "optimizer")}
    chosen["path"] = str(checkpoint / "speculator")
    return f"cluster.trainer.speculator={json.dumps(chosen)}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, in the order of their steps."""
    return sorted((run_dir / "checkpoints").glob("step_*"))


def evaluate(file: Path, overrides: Sequence[str], checkpoint: Path, *options: str) -> Results:
    """Returns the measurements of the checkpoint's speculator, which are kept in `file`.

    The senior is the base model, unless `options` name another checkpoint. The trainer of these
    measurements has no speculator, which would take the place of the chosen one.
    """
    if not file.exists():
        chosen = (
            f"cluster.rollout.senior_speculator={checkpoint / 'speculator'}",
            "cluster.trainer.speculator=null",
        )
        printed = tandem(
            "speculator eval", *overrides, *chosen, *options, "--json", stdout=subprocess.PIPE
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(printed)
    return json.loads(file.read_text())["results"]


def tandem(command: str, *arguments: str, **options: Any) -> str:
    """Runs the `tandem` command on the example; returns its captured output, if it is captured.

    Raises CalledProcessError when it fails: it has said why.
    """
    called = [sys.executable, "-m", "tandem", *command.split(), str(CONFIG), *arguments]
    return subprocess.run(called, check=True, text=True, **options).stdout


def show(lines: Mapping[str, Results]) -> None:
    """Prints the measurements: a line for each, its columns for each temperature."""
    [first, *_] = lines.values()
    columns = [f"{name}, temperature {one['temperature']:g}" for one in first for name in COLUMNS]
    rows = [
        [name, *(cell(one[key], form) for one in results for key, form in COLUMNS.values())]
        for name, results in lines.items()
    ]
    output = Output()
    output.result({}, output.table("drafts on held-out prompts", ("", *columns), rows))


def cell(value: float | None, form: str) -> str:
    """Returns a number as text; "-" where there is none."""
    return "-" if value is None else form.format(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    main(parser.parse_args().overrides)
