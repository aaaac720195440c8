"""Tokens per second through the trainer server, beside a `transformers` training step.

    .venv/bin/python tests/bench/bench_training.py [--model DIR] [--sequences 8] [--rounds 5]

One supervised update (forward, backward, AdamW) of the same sequences, fp32, on the same cores in
turn. Every token but the first of a sequence is learnt, so neither side can skip work.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from alternate import alternate
from tandem.client import TrainerClient
from tandem.cluster import LocalCluster
from tandem.requests import SupervisedSample
from tandem.settings import ClusterSettings
from transformers import AutoModelForCausalLM


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    batch = torch.randint(
        1000, 20000, (options.sequences, options.tokens), generator=torch.Generator().manual_seed(0)
    )
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, fused=True)

    def transformers_step() -> int:
        optimizer.zero_grad(set_to_none=False)
        peer(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        return batch.numel()

    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    steps = itertools.count(1)
    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(
            directory=Path(directory),
            trainer={
                "model": str(options.model),
                "batch": {"micro_batch_tokens": options.micro_batch_tokens},
            },
        )
        with LocalCluster(settings) as cluster, TrainerClient(cluster.trainer.address) as client:

            def trainer_step() -> int:
                step = next(steps)
                client.train_step(samples, run_id="bench", step=step, expected_version=step - 1)
                return batch.numel()

            print(f"{options.sequences} x {options.tokens} tokens, fp32")
            alternate(
                {"transformers": transformers_step, "trainer": trainer_step},
                peer="transformers",
                rounds=options.rounds,
                unit="tokens",
                pids=[server.process.pid for server in cluster.servers],
            )


if __name__ == "__main__":
    main()
