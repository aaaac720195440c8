"""Tokens per second of a speculator's training, beside a supervised step of its base model.

    .venv/bin/python tests/bench/bench_speculator.py [--model DIR] [--sequences 8] [--rounds 5]

Trainer servers with the same model and the same sequences, fp32, on the same cores in turn: a
supervised step of the model; one with a speculator beside it; a speculator alone on the frozen
model. Every token but the first of a sequence is learnt by the model, and all that they can predict
by the heads. Two more servers with the speculator alone differ in `batch.logits_chunk_bytes`, the
budget of the logits of a loss: their peaks of memory differ by no more than the budgets do, however
many heads there are. Beside it stand the bytes of all logits of the heads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from alternate import alternate
from status_bytes import status_bytes
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings

_PEER = "supervised step"
_ALONE = "speculator alone"
_BAR = 2.0  # times the rate of the peer
_BUDGETS = (48 << 20, 144 << 20)  # bytes


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--n-predict", type=int, default=3)
    parser.add_argument("--inner-dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(1000, 20000, (options.sequences, options.tokens), generator=generator)
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    speculator = {
        "adapter": "mlp",
        "tie_weights": options.n_predict > 1,
        "n_predict": options.n_predict,
        "inner_dim": options.inner_dim,
        "optimizer": {"learning_rate": 1e-4},
    }
    servers: dict[str, dict[str, Any]] = {
        _PEER: {},
        "with a speculator": {"speculator": speculator},
        _ALONE: {"speculator": speculator | {"freeze_base_model": True}},
    }
    sides: dict[str, Callable[[], int]] = {}
    pids: list[int] = []
    with ExitStack() as stack:
        for name, settings in servers.items():
            trainer = {
                "model": str(options.model),
                "batch": {"micro_batch_tokens": options.micro_batch_tokens},
            }
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(
                LocalCluster(ClusterSettings(directory=directory, trainer=trainer | settings))
            )
            pids += [server.process.pid for server in cluster.servers]
            client = stack.enter_context(TrainerClient(cluster.trainer.address))
            sides[name] = _steps(client, samples, batch.numel())
        print(
            f"{options.sequences} x {options.tokens} tokens, fp32, "
            f"{options.n_predict} heads of width {options.inner_dim}"
        )
        ratios = alternate(sides, peer=_PEER, rounds=options.rounds, unit="tokens", pids=pids)
    met = "met" if ratios[_ALONE] >= _BAR else "missed"
    print(f"  bar of the speculator alone: {_BAR} x {_PEER}, {met}")
    peaks = [_peak_bytes(options, servers[_ALONE], samples, budget) for budget in _BUDGETS]
    rows = options.sequences * (options.tokens - options.n_predict - 1)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    print(
        f"  memory of the losses: {(peaks[1] - peaks[0]) >> 20} MiB more with a budget of "
        f"{(_BUDGETS[1] - _BUDGETS[0]) >> 20} MiB more; all logits of the heads have "
        f"{(4 * rows * vocabulary * options.n_predict) >> 20} MiB"
    )


def _peak_bytes(
    options: argparse.Namespace,
    settings: dict[str, Any],
    samples: list[SupervisedSample],
    budget: int,
) -> int:
    """Returns the peak of the resident set of a trainer after two steps."""
    batch = {"micro_batch_tokens": options.micro_batch_tokens, "logits_chunk_bytes": budget}
    trainer = {"model": str(options.model), "batch": batch} | settings
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(ClusterSettings(directory=Path(directory), trainer=trainer))
        with cluster, TrainerClient(cluster.trainer.address) as client:
            step = _steps(client, samples, tokens=0)
            step()
            step()
            return status_bytes("VmHWM", cluster.servers[0].process.pid)


def _steps(
    client: TrainerClient, samples: list[SupervisedSample], tokens: int
) -> Callable[[], int]:
    """Returns the work of a side: one step on all samples."""
    steps = itertools.count(1)

    def step() -> int:
        number = next(steps)
        client.train_step(samples, run_id="bench", step=number, expected_version=number - 1)
        return tokens

    return step


if __name__ == "__main__":
    main()
