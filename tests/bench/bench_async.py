"""Steps per second of an asynchronous run, beside the same run in step.

    .venv/bin/python tests/bench/bench_async.py [--steps 6] [--rounds 3] [--staleness 1 4]

SmolLM2-135M; rollout server and trainer have one core each, for all sides. In step one of them
always waits for the other. Where a step's generation takes g, its training t and the publication p,
a step takes g + t + p in step, and no less than max(g, t) + p / staleness otherwise: this bound is
made of the times in step, and printed. The sizes are such that g and t are alike (--samples moves
them against each other: a server of one core reads its weights once for all samples). All sides
make steps of the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from alternate import Comparison
from tandem.cluster.local import LocalCluster
from tandem.run_directory.directory import RunDirectory
from tandem.session.connections import addresses_of
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import RunSettings
from tandem.training.loop import train

BAR = 1.6
IN_STEP = "in step"


class Side:
    """Runs with one staleness, each from the base model.

    Attributes:
        phases: seconds of generation, training and publication, of every step that was counted.
    """

    def __init__(
        self, cluster: LocalCluster, directory: Path, staleness: int, options: argparse.Namespace
    ) -> None:
        self.phases: list[list[float]] = []
        self._tokens = options.prompts * options.samples * options.tokens
        self._directory = directory
        self._runs = 0
        self._values: dict[str, Any] = {
            "steps": options.steps + 1,
            "tokenizer": str(options.model),
            "start_from": "base",
            "servers": addresses_of(cluster).model_dump(),
            "data": {"jsonl": str(directory / "rows.jsonl")},
            "reward": {"function": f"{directory}/reward.py:reward"},
            "batch": {"prompts_per_step": options.prompts, "samples_per_prompt": options.samples},
            "sampling": {"max_tokens": options.tokens, "ignore_eos": True},
            "tandem": {"enabled": False},
            "async": {"max_staleness": staleness},
            "checkpoint": {"every": 0, "at_end": False},
            "trajectories": {"every": 0},
            "trackers": [],
        }

    def run(self, comparison: Comparison, name: str) -> None:
        """Makes a run; the time of its first step, which nobody can draw ahead, is not counted."""
        self._runs += 1
        path = self._directory / f"{name.replace(' ', '-')}-{self._runs}"
        config = loading.validate(RunSettings, self._values | {"run_dir": str(path)}, "bench")
        lines: list[dict[str, Any]] = []

        def on_step(line: dict[str, Any]) -> None:
            if not lines:
                comparison.start()
            lines.append(line)

        with RunDirectory.open(config, "train") as run, open_session(config) as session:
            train(session, run, on_step, discard_unsaved=True)
        comparison.stop(name, (len(lines) - 1) * self._tokens)
        self.phases += [
            [line[f"time/{phase}_seconds"] for phase in ("generate", "train", "publish")]
            for line in lines[1:]
        ]


def on_core(pid: int, core: int) -> None:
    """Keeps every thread of a process, and those that they start, on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def write_inputs(directory: Path) -> None:
    """Writes the rows and the reward: the share of different letters."""
    rows = [{"prompt": f"Write a sentence about the number {i} and the sea."} for i in range(200)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(
        "def reward(prompt, response, **row):\n"
        "    return len(set(response)) / (1 + len(response))\n"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("needs two cores: one for the rollout server, one for the trainer")
    common = {"max_model_len": 256, "compute": {"num_threads": 1}}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory)
        settings = ClusterSettings(
            directory=directory / "cluster",
            rollout=[common | {"senior_model": str(options.model)}],
            trainer=common | {"model": str(options.model), "optimizer": {"learning_rate": 1e-6}},
        )
        with LocalCluster(settings) as cluster:
            servers = {"rollout": cluster.rollouts[0], "trainer": cluster.trainer}
            for server, core in zip(servers.values(), cores, strict=False):
                on_core(server.process.pid, core)
            pids = [server.process.pid for server in servers.values()]
            comparison = Comparison(peer=IN_STEP, unit="tokens", pids=pids)
            sides = {IN_STEP: Side(cluster, directory, 0, options)} | {
                f"async, {one}": Side(cluster, directory, one, options) for one in options.staleness
            }
            for _ in range(options.rounds + 1):
                for side_name, side in sides.items():
                    side.run(comparison, side_name)
            ratios = comparison.report()
    g, t, p = map(statistics.median, zip(*sides[IN_STEP].phases, strict=True))
    print(f"  a step in step: generation {g:.2f} s, training {t:.2f} s, publication {p:.2f} s")
    best = 0.0
    for staleness in options.staleness:
        ratio = ratios[f"async, {staleness}"]
        most = (g + t + p) / (max(g, t) + p / staleness)
        print(f"  max_staleness {staleness}: {ratio:.2f} x of {most:.2f} x at most")
        best = max(best, ratio)
    print(f"  {'reaches' if best >= BAR else 'MISSES'} the bar of {BAR} x: {best:.2f} x")


if __name__ == "__main__":
    main()
