"""The experiment: does tandem keep a senior out of a dialect that its junior cannot read?

    python examples/tandem_effect/experiment.py [--task smollm2] [--seeds 8] [--arms solo,tandem]

For every seed it makes a senior, which writes both dialects, and a junior, which knows the readable
one only; checks by the gate that the experiment can show anything; and trains the arms. What is
done is not done again, and a run that was interrupted goes on. At the end it writes the tables,
results.json and curves.png into the folder of the task in runs/.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import make
import report
from tandem.terminal.output import Output
from tandem.view.curves import read_curves

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "demo"
RUNS = HERE.parents[1] / "runs"
SMOLLM2 = HERE.parents[1] / "models/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Model:
    """A model that supervised steps make.

    Attributes:
        start: the model that it begins as; a name is a model of the seed.
        rows: the file of the seed's folder with the texts that it learns.
        settings: those that differ from the task's.
    """

    start: str | Path
    rows: str
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Task:
    """The models and rows of an experiment.

    Attributes:
        folder: its folder in runs/.
        make: writes the rows of a seed, and the models that are made from nothing, into a folder.
        models: those to train by supervised steps, in this order.
        teach: the run file of the supervised steps.
        run: the run file of the arm "tandem".
        arms: those to run by default.
        jobs: runs at a time.
    """

    folder: str
    make: Callable[[Path, int], None]
    models: Mapping[str, Model]
    teach: Path
    run: Path
    arms: Sequence[str]
    jobs: int


# The settings of an arm that differ from the task's run file; {seed} is the folder of the seed.
ALONE = ["tandem.enabled=false"]
KL = [
    *ALONE,
    "cluster.trainer.reference_model={seed}/junior",
    "objective.kl_estimator=k1_gradient_k2",
]
ARMS = {
    "solo": ALONE,
    "tandem": [],
    "tandem-75": ["tandem.prob_senior=0.75"],
    # The predicted null: the junior is a copy of the senior.
    "copy": ["cluster.rollout.junior.model={seed}/senior"],
    # Towards the junior, in place of tandem.
    "kl-0.05": [*KL, "objective.kl_coefficient=0.05"],
    "kl-0.2": [*KL, "objective.kl_coefficient=0.2"],
    "kl-1": [*KL, "objective.kl_coefficient=1.0"],
    # As many tokens in the loss as tandem has, about half.
    "solo-half": [*ALONE, "batch.prompts_per_step=8"],
    # Without a pressure to be short.
    "solo-free": [*ALONE, f"reward.function={HERE}/reward.py:correct", "reward.correct_at=1.0"],
}


TOY = Task(
    folder="tandem_effect",
    make=make.main,
    models={
        "senior": Model("senior-blank", "senior.jsonl"),
        "junior": Model("junior-blank", "junior.jsonl"),
    },
    teach=HERE / "pretrain.yaml",
    run=HERE / "run.yaml",
    arms=list(ARMS),
    # A model this small gains nothing from a second thread.
    jobs=os.cpu_count() or 1,
)
TASKS = {
    "two-dialects": TOY,
    "three-dialects": replace(
        TOY,
        folder="tandem_effect_third",
        make=functools.partial(make.main, third_dialect=True),
        arms=["solo", "tandem", "kl-0.05", "kl-0.2", "kl-1"],
    ),
    # The demo, with more seeds and arms.
    "smollm2": Task(
        folder="tandem_effect_smollm2",
        make=lambda folder, seed: runpy.run_path(str(DEMO / "sums.py"))["main"](folder, seed),
        models={
            "junior": Model(SMOLLM2, "words.jsonl"),
            "senior": Model("junior", "both.jsonl", ["steps=80"]),
        },
        teach=DEMO / "teach.yaml",
        run=DEMO / "run.yaml",
        arms=["solo", "tandem", "kl-0.05", "kl-0.2", "kl-1"],
        jobs=1,
    ),
}


def main(task: Task, seeds: int, arms: Sequence[str], jobs: int) -> None:
    """Does what is left to do, and reports."""
    runs = RUNS / task.folder
    folders = [runs / f"seed-{seed}" for seed in range(seeds)]
    for seed, folder in enumerate(folders):
        # The last file that is written.
        if not (folder / "held_out.jsonl").exists():
            task.make(folder, seed)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda folder: teach(task, folder), folders))
        list(pool.map(lambda folder: check_gate(task, folder), folders))
        list(pool.map(lambda one: train(task, *one), [(f, arm) for f in folders for arm in arms]))
    trained = {arm: [read_curves(folder / arm) for folder in folders] for arm in arms}
    results = report.measured(trained)
    (runs / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report.plot(trained, runs / "curves.png")
    output = Output()
    for title, columns, rows in report.tables(results):
        output.result({}, output.table(title, columns, rows))


def teach(task: Task, folder: Path) -> None:
    """Trains the models of a seed by supervised steps, unless they are there."""
    for name, model in task.models.items():
        if (folder / name).exists():
            continue
        run = folder / f"teach-{name}"
        chosen = [
            f"run_dir={run}",
            f"data.jsonl={folder / model.rows}",
            f"cluster.model={folder / model.start}",
            f"cluster.directory={folder}/cluster-{name}",
            seed_of(folder),
            *model.settings,
        ]
        tandem(f"{folder.name}: {name}", "sft", task.teach, *chosen, "--resume", "auto")
        tandem(f"{folder.name}: {name}", "export", run, folder / name)
        # Its checkpoints are three times as large as the model.
        shutil.rmtree(run)


def check_gate(task: Task, folder: Path) -> None:
    """Ends the experiment unless it can show something.

    The junior must be another model, which solves the problems by itself, and the reward must
    favour the code at the start: a senior that does not drift proves nothing.
    """
    file = folder / "gate.json"
    if not file.exists():
        printed = tandem(
            f"{folder.name}: gate",
            "eval",
            task.run,
            *settings_of(folder, "gate"),
            "--gate",
            "--json",
        )
        file.write_text(printed)
    gate = json.loads(file.read_text())
    if gate["same_model"]:
        sys.exit(f"{folder.name}: the junior is a copy of the senior")
    if gate["authors"]["junior"]["accuracy"] < 0.95:
        sys.exit(f"{folder.name}: the junior solves too few problems alone; see {file}")
    if gate["patterns"]["code"]["favour"]["sign"] <= 0:
        sys.exit(f"{folder.name}: the reward does not favour the code; see {file}")


def train(task: Task, folder: Path, arm: str) -> None:
    """Makes a run, unless it is done."""
    chosen = [one.format(seed=folder) for one in ARMS[arm]]
    tandem(
        f"{folder.name}: {arm}",
        "train",
        task.run,
        *settings_of(folder, arm),
        *chosen,
        "--resume",
        "auto",
    )


def settings_of(folder: Path, arm: str) -> list[str]:
    """Returns the overrides that put a run on the models and rows of a seed."""
    return [
        f"run_dir={folder}/{arm}",
        f"data.jsonl={folder}/train.jsonl",
        f"eval.data.jsonl={folder}/held_out.jsonl",
        f"cluster.model={folder}/senior",
        f"cluster.rollout.junior.model={folder}/junior",
        f"cluster.directory={folder}/cluster-{arm}",
        seed_of(folder),
    ]


def seed_of(folder: Path) -> str:
    """Returns the override that names the seed of a folder."""
    return f"seed={folder.name.removeprefix('seed-')}"


def tandem(what: str, *arguments: object) -> str:
    """Runs the `tandem` command; returns its output. Ends the experiment with its error."""
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{what}: {done.stderr}")
    print(what, file=sys.stderr)
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="two-dialects")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--arms", help=f"default: those of the task; all: {','.join(ARMS)}")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: those of the task")
    arguments = parser.parse_args()
    chosen = TASKS[arguments.task]
    arms = arguments.arms.split(",") if arguments.arms else chosen.arms
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms: unknown: {', '.join(sorted(unknown))}")
    main(chosen, arguments.seeds, arms, arguments.jobs or chosen.jobs)
