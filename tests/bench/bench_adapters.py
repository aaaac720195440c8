"""Adapters (LoRA) beside full training: seconds of a step, memory, bytes of an update.

    .venv/bin/python tests/bench/bench_adapters.py [--model DIR] [--rank 16] [--rounds 5]
    .venv/bin/python tests/bench/bench_adapters.py --base      # bases in float32, bfloat16 and int8

The trainers make supervised steps on the same sequences, in fp32, on the same cores in turn. The
memory is what a trainer has resident of its own after the steps, less the bytes of the model: the
program's own and those of a micro-batch's activations are a part of it on both sides. With --base
they are trainers of adapters alone, whose frozen model is stored in different ways, and the memory
is all that they have resident.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from alternate import alternate
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings

BARS = {"memory beyond the model": 0.1, "seconds of a step": 0.75, "bytes of an update": 0.02}


def resident(pid: int) -> int:
    """Bytes of memory that a process has of its own, swapped or not, without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    parts = [line for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return 1024 * sum(int(line.split()[1]) for line in parts)


def stepper(trainer: TrainerClient, samples: list[SupervisedSample]) -> Callable[[], int]:
    """Makes the next step of a run; returns its number of tokens."""
    steps = itertools.count(1)

    def step() -> int:
        number = next(steps)
        trainer.train_step(samples, run_id="bench", step=number, expected_version=number - 1)
        return sum(len(s.prompt_token_ids) + len(s.response_token_ids) for s in samples)

    return step


# How a trainer of adapters stores its frozen model.
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
                        trainer={
                            "model": str(options.model),
                            "batch": {"micro_batch_tokens": options.micro_batch_tokens},
                            "lora": {"rank": options.rank},
                        }
                        | stored,
                    )
                )
            )
            for name, stored in BASES.items()
        }
        pids = {name: one.trainer.process.pid for name, one in servers.items()}
        loaded = {name: resident(pid) for name, pid in pids.items()}
        most = dict(loaded)

        def watched(name: str, step: Callable[[], int]) -> Callable[[], int]:
            """Also notes the memory right after a step: what is free goes back later."""

            def make() -> int:
                tokens = step()
                most[name] = max(most[name], resident(pids[name]))
                return tokens

            return make

        alternate(
            {
                name: watched(name, stepper(TrainerClient(one.trainer.address), samples))
                for name, one in servers.items()
            },
            peer="float32",
            rounds=options.rounds,
            unit="tokens",
            pids=pids.values(),
        )
        for name in pids:
            print(
                f"  {name:9} resident {loaded[name] / 1e6:7.1f} MB once loaded, "
                f"{most[name] / 1e6:7.1f} MB right after a step"
            )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", action="store_true", help="compare how the base is stored")
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(20_000, (options.sequences, options.tokens), generator=generator)
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    if options.base:
        compare_bases(options, samples)
        return
    trained: dict[str, dict[str, Any]] = {"full": {}, "adapters": {"lora": {"rank": options.rank}}}
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        clusters = {
            name: LocalCluster(
                ClusterSettings(
                    directory=Path(directory) / name,
                    rollout=[{"senior": {"model": str(options.model)} | changes}],
                    trainer={
                        "model": str(options.model),
                        "batch": {"micro_batch_tokens": options.micro_batch_tokens},
                    }
                    | changes,
                )
            )
            for name, changes in trained.items()
        }
        with clusters["full"] as full, clusters["adapters"] as adapters:
            running = {"full": full, "adapters": adapters}
            pids = {name: one.trainer.process.pid for name, one in running.items()}
            trainers = {name: TrainerClient(one.trainer.address) for name, one in running.items()}
            print(f"{options.sequences} x {options.tokens} tokens, fp32, rank {options.rank}")
            ratios = alternate(
                {name: stepper(trainer, samples) for name, trainer in trainers.items()},
                peer="full",
                rounds=options.rounds,
                unit="tokens",
                pids=pids.values(),
            )
            for name, trainer in trainers.items():
                taken = float(resident(pids[name]))
                [sent] = trainer.publish_weights([running[name].rollouts[0].address]).results
                results[name] = {
                    "memory beyond the model": taken,
                    "bytes of an update": float(sent.bytes),
                }
            for side in results.values():
                side["memory beyond the model"] -= results["full"]["bytes of an update"]
    shares = {key: results["adapters"][key] / results["full"][key] for key in results["full"]}
    shares["seconds of a step"] = 1 / ratios["adapters"]
    for name, bar in BARS.items():
        sizes = [f"{side[name] / 1e6:.1f} MB" for side in results.values() if name in side]
        verdict = "met" if shares[name] <= bar else "missed"
        print(
            f"  {name:24} {shares[name]:6.3f} of full training, bar {bar}: {verdict}", *sizes[::-1]
        )


if __name__ == "__main__":
    main()
