"""The time that a checkpoint holds up training: by a step, with a snapshot and without.

    .venv/bin/python tests/bench/bench_checkpoints.py [--model DIR] [--sequences 16] [--rounds 5]

Two trainers of the same model make the same supervised steps in fp32, on the same cores in turn.
One copies its state and writes beside the next step, the other writes first. The stall is the time
until the next step may begin; what writing costs that step is a figure of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings

BAR = 0.05
SIDES = {"beside the next step": True, "in its turn": False}


class Side:
    """A trainer that makes steps and saves them."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        folder: Path,
        samples: list[SupervisedSample],
        snapshot: bool,
    ) -> None:
        settings = ClusterSettings(
            directory=folder,
            rollout={"senior": {"model": str(model)}, "max_num_seqs": 1, "max_model_len": 64},
            trainer={"model": str(model), "checkpoint_snapshot": snapshot},
        )
        cluster = stack.enter_context(LocalCluster(settings))
        self._trainer = stack.enter_context(TrainerClient(cluster.trainer.address))
        self._folder = folder / "checkpoints"
        self._samples = samples
        self._steps: Iterator[int] = itertools.count(1)
        self.step_seconds: list[float] = []
        self.stalls: list[float] = []
        self.next_steps: list[float] = []
        self.writes: list[float] = []

    def step(self) -> float:
        """Makes a step; returns its seconds."""
        number = next(self._steps)
        begin = time.perf_counter()
        self._trainer.train_step(
            self._samples, run_id="bench", step=number, expected_version=number - 1
        )
        self._version = number
        return time.perf_counter() - begin

    def measure(self) -> None:
        """Makes a step alone, then saves and makes another one."""
        self.step_seconds.append(self.step())
        save = (str(self._folder), f"step_{self._version:06d}", 1)
        version = self._version
        begin = time.perf_counter()
        pending = self._trainer.start_checkpoint(*save, expected_version=version)
        self.stalls.append(time.perf_counter() - begin)
        self.next_steps.append(self.step())
        if pending:
            self._trainer.save_checkpoint(*save, expected_version=version)
        self.writes.append(time.perf_counter() - begin)


def shares(numbers: list[float], of: list[float]) -> tuple[float, str]:
    """Returns the median of ratios, and their range in words."""
    ratios = [one / other for one, other in zip(numbers, of, strict=True)]
    return statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(20_000, (options.sequences, options.tokens), generator=generator)
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            name: Side(stack, options.model.resolve(), folder / str(snapshot), samples, snapshot)
            for name, snapshot in SIDES.items()
        }
        for side in sides.values():
            side.step()
        for _ in range(options.rounds):
            for side in sides.values():
                side.measure()
    print(f"{options.sequences} x {options.tokens} tokens, fp32; medians, and ranges of the ratios")
    for name, side in sides.items():
        stall, spread = shares(side.stalls, side.step_seconds)
        slower, spread_of_next = shares(side.next_steps, side.step_seconds)
        verdict = f", bar {BAR}: {'met' if stall <= BAR else 'missed'}" if SIDES[name] else ""
        print(f"  {name}:")
        print(
            f"    step {statistics.median(side.step_seconds):.2f} s, "
            f"stall {statistics.median(side.stalls):.2f} s, "
            f"on disk after {statistics.median(side.writes):.2f} s"
        )
        print(f"    stall by a step {stall:.3f} ({spread}){verdict}")
        print(f"    the next step by one without a checkpoint {slower:.3f} ({spread_of_next})")


if __name__ == "__main__":
    main()
