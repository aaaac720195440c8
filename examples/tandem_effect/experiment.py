"""The experiment: does tandem keep a senior out of a dialect that its junior cannot read?

    python examples/tandem_effect/experiment.py [--third-dialect] [--seeds 8] [--arms solo,tandem]

For every seed it makes and pre-trains a senior, which writes both dialects, and a junior, which
knows the verbose one only; checks by the gate that the experiment can show anything; and trains the
arms. What is done is not done again, and a run that was interrupted goes on. At the end it writes
the table, results.json and curves.png into runs/tandem_effect, with a third dialect into
runs/tandem_effect_third.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make
import report
from tandem.terminal.output import Output
from tandem.view.curves import read_curves

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "runs"

# The settings of an arm that differ from run.yaml; {seed} is the folder of the seed.
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


def main(seeds: int, arms: list[str], jobs: int, *, third_dialect: bool = False) -> None:
    """Does what is left to do, and reports."""
    runs = RUNS / ("tandem_effect_third" if third_dialect else "tandem_effect")
    folders = [runs / f"seed-{seed}" for seed in range(seeds)]
    for seed, folder in enumerate(folders):
        # The last file that is written.
        if not (folder / "held_out.jsonl").exists():
            make.main(folder, seed, third_dialect=third_dialect)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(pretrain, folders))
        list(pool.map(check_gate, folders))
        list(pool.map(lambda one: train(*one), [(f, arm) for f in folders for arm in arms]))
    trained = {arm: [read_curves(folder / arm) for folder in folders] for arm in arms}
    results = report.measured(trained)
    (runs / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report.plot(trained, runs / "curves.png")
    output = Output()
    for title, columns, rows in report.tables(results):
        output.result({}, output.table(title, columns, rows))


def pretrain(folder: Path) -> None:
    """Trains the senior and the junior of a seed on the texts that make.py wrote."""
    for name in ("senior", "junior"):
        if (folder / name).exists():
            continue
        chosen = [
            f"run_dir={folder}/pretrain-{name}",
            f"data.jsonl={folder}/{name}.jsonl",
            f"cluster.model={folder}/{name}-blank",
            f"cluster.directory={folder}/cluster-{name}",
            seed_of(folder),
        ]
        tandem(f"{folder.name}: {name}", "sft", HERE / "pretrain.yaml", *chosen, "--resume", "auto")
        tandem(f"{folder.name}: {name}", "export", folder / f"pretrain-{name}", folder / name)


def check_gate(folder: Path) -> None:
    """Ends the experiment unless it can show something.

    The junior must be another model, which solves the problems by itself, and the reward must
    favour the code at the start: a senior that does not drift proves nothing.
    """
    file = folder / "gate.json"
    if not file.exists():
        printed = tandem(
            f"{folder.name}: gate",
            "eval",
            HERE / "run.yaml",
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


def train(folder: Path, arm: str) -> None:
    """Makes a run, unless it is done."""
    chosen = [one.format(seed=folder) for one in ARMS[arm]]
    tandem(
        f"{folder.name}: {arm}",
        "train",
        HERE / "run.yaml",
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
    parser.add_argument(
        "--third-dialect", action="store_true", help="short words that are readable"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms.split(",")) - set(ARMS):
        parser.error(f"--arms: unknown: {', '.join(sorted(unknown))}")
    main(
        arguments.seeds,
        arguments.arms.split(","),
        arguments.jobs,
        third_dialect=arguments.third_dialect,
    )
