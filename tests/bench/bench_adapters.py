"""Adapters (LoRA) beside full training: seconds of a step, memory, bytes of an update.

    .venv/bin/python tests/bench/bench_adapters.py [--model DIR] [--rank 16] [--rounds 5]
    .venv/bin/python tests/bench/bench_adapters.py --model qwen2.5-0.5b    # random weights
    .venv/bin/python tests/bench/bench_adapters.py --base      # bases in float32, bfloat16 and int8

The trainers make supervised steps on the same sequences, in fp32, on the same cores in turn. The
memory is what a trainer has resident of its own, less that of a trainer whose adapters have rank 1
and which has made no step: program and model, and next to nothing that trains. Once loaded a
trainer holds weights, gradients and the optimizer's state; right after a step, the activations of a
micro-batch, too, which both sides have; with --recompute both keep the inputs of layers alone, and
compute the rest again. With --base they are trainers of adapters alone, whose
frozen model is stored in different ways, and the memory is all that they have resident.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from alternate import Comparison, alternate
from rollout.models import QWEN, SMOLLM2, model_directory
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings


def resident(pid: int) -> int:
    """Bytes of memory that a process has of its own, swapped or not, without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    parts = [line for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return 1024 * sum(int(line.split()[1]) for line in parts)


class Memory:
    """The resident bytes of servers: once loaded, and the most right after a step."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.loaded = {name: resident(pid) for name, pid in pids.items()}
        self.most = dict(self.loaded)

    def watched(self, name: str, step: Callable[[], int]) -> Callable[[], int]:
        """Also notes the memory right after a step: what is free goes back later."""

        def make() -> int:
            tokens = step()
            self.most[name] = max(self.most[name], resident(self._pids[name]))
            return tokens

        return make

    def text(self) -> str:
        """Returns the figures of each server."""
        return "".join(
            f"; {name} {self.loaded[name] / 1e6:.0f} once loaded, {most / 1e6:.0f} after a step"
            for name, most in self.most.items()
        )


def stepper(trainer: TrainerClient, samples: list[SupervisedSample]) -> Callable[[], int]:
    """Makes the next step of a run; returns its number of tokens."""
    steps = itertools.count(1)

    def step() -> int:
        number = next(steps)
        trainer.train_step(samples, run_id="bench", step=number, expected_version=number - 1)
        return sum(len(s.prompt_token_ids) + len(s.response_token_ids) for s in samples)

    return step


def learner(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all trainers share."""
    return {
        "model": str(options.model),
        "batch": {"micro_batch_tokens": options.micro_batch_tokens},
        "strategy": {"recompute_granularity": "full" if options.recompute else "none"},
    }


# The formats of a frozen model, as a trainer of adapters stores it.
BASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}


def compare_bases(options: argparse.Namespace, samples: list[SupervisedSample]) -> None:
    """Measures trainers whose base models are stored in different ways, and prints."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                LocalCluster(
                    ClusterSettings(
                        directory=Path(directory) / name,
                        trainer=learner(options) | {"lora": {"rank": options.rank}} | stored,
                    )
                )
            )
            for name, stored in BASES.items()
        }
        pids = {name: one.trainer.process.pid for name, one in servers.items()}
        memory = Memory(pids)
        alternate(
            {
                name: memory.watched(name, stepper(TrainerClient(one.trainer.address), samples))
                for name, one in servers.items()
            },
            peer="float32",
            rounds=options.rounds,
            unit="tokens",
            pids=pids.values(),
        )
        for name in pids:
            print(
                f"  {name:9} resident {memory.loaded[name] / 1e6:7.1f} MB once loaded, "
                f"{memory.most[name] / 1e6:7.1f} MB right after a step"
            )


def compare_training(options: argparse.Namespace, samples: list[SupervisedSample]) -> None:
    """Measures trainers of all weights and of adapters, and prints."""
    sides: dict[str, dict[str, Any]] = {
        "full": {},
        "adapters": {"lora": {"rank": options.rank}},
        "base": {"lora": {"rank": 1}},
    }
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def start(name: str, rollouts: list[dict[str, Any]]) -> LocalCluster:
            settings = ClusterSettings(
                directory=Path(directory) / name,
                rollout=rollouts,
                trainer=learner(options) | sides[name],
            )
            return stack.enter_context(LocalCluster(settings))

        with start("base", []) as untrained:
            base = resident(untrained.trainer.process.pid)
        running = {
            name: start(name, [{"senior": {"model": str(options.model)} | sides[name]}])
            for name in ("full", "adapters")
        }
        pids = {name: one.trainer.process.pid for name, one in running.items()}
        trainers = {name: TrainerClient(one.trainer.address) for name, one in running.items()}
        memory = Memory(pids)
        print(
            f"{options.sequences} x {options.tokens} tokens in micro-batches of "
            f"{options.micro_batch_tokens}, fp32, rank {options.rank}"
        )
        comparison = Comparison(peer="full", unit="tokens", pids=pids.values())
        comparison.take_turns(
            {
                name: memory.watched(name, stepper(trainer, samples))
                for name, trainer in trainers.items()
            },
            options.rounds,
        )
        comparison.report()
        sent = {
            name: trainer.publish_weights([running[name].rollouts[0].address]).results[0].bytes
            for name, trainer in trainers.items()
        }
    print(f"  resident, MB: {base / 1e6:.0f} of the base (rank 1, untrained)", memory.text())
    report_bar("seconds of a step", 1 / comparison.ratio("adapters", "full"), 0.75)
    report_bar("CPU seconds of a step", comparison.cpu_ratios()["adapters"], 0.75)
    for name, taken in (("once loaded", memory.loaded), ("right after a step", memory.most)):
        share = (taken["adapters"] - base) / (taken["full"] - base)
        report_bar(f"memory beyond the base, {name}", share, 0.1)
    report_bar("bytes of an update", sent["adapters"] / sent["full"], 0.02)


def report_bar(name: str, share: float, bar: float) -> None:
    """Prints a share of full training and whether it is within its bar."""
    verdict = "met" if share <= bar else "MISSED"
    print(f"  {name:40} {share:6.3f} of full training, bar {bar}: {verdict}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default=str(SMOLLM2),
        help=f"Hugging Face directory, or {QWEN}: its shape with random weights",
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="recompute_granularity: full")
    parser.add_argument("--base", action="store_true", help="compare how the base is stored")
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(20_000, (options.sequences, options.tokens), generator=generator)
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    with tempfile.TemporaryDirectory() as folder:
        options.model = model_directory(options.model, Path(folder))
        if options.base:
            compare_bases(options, samples)
        else:
            compare_training(options, samples)


if __name__ == "__main__":
    main()
