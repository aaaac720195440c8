"""Trained tokens and values per second of trainer and critic, beside `transformers`.

Trained tokens: one supervised update (forward, backward, AdamW), in which every token but the first
of a sequence is learnt, so neither side can skip work. Values: the critic's, of the same tokens.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import precision
import torch
from alternate import alternate
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings


def compare(
    model: Path,
    peer: torch.nn.Module,
    peer_critic: torch.nn.Module,
    batch: torch.Tensor,
    *,
    micro_batch_tokens: int,
    rounds: int,
    bar: float,
    dtype: str = "float32",
) -> None:
    """Measures and prints, with whether the ratios reach `bar`.

    `peer` and `peer_critic` are the model in the directory `model`, in `dtype`, with its own head
    and with one output per token; `batch` [S, T] are token ids.
    """
    peer.train()
    peer_critic.eval()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, fused=True)

    def transformers_step() -> int:
        optimizer.zero_grad(set_to_none=False)
        peer(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        return batch.numel()

    def transformers_values() -> int:
        with torch.inference_mode():
            peer_critic(batch, use_cache=False)
        return batch.numel()

    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    steps = itertools.count(1)
    learner = {
        "model": str(model),
        "batch": {"micro_batch_tokens": micro_batch_tokens},
        "compute": precision.learner(dtype),
    }
    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(
            directory=Path(directory),
            trainer=learner,
            critic=learner | {"untie_embeddings": True},
        )
        with (
            LocalCluster(settings) as cluster,
            TrainerClient(cluster.trainer.address) as trainer,
            CriticClient(cluster.critic.address) as critic,
        ):

            def trainer_step() -> int:
                step = next(steps)
                trainer.train_step(samples, run_id="bench", step=step, expected_version=step - 1)
                return batch.numel()

            def critic_values() -> int:
                critic.compute_values(samples)
                return batch.numel()

            for unit, theirs, name, ours in (
                ("tokens", transformers_step, "trainer", trainer_step),
                ("values", transformers_values, "critic", critic_values),
            ):
                ratios = alternate(
                    {"transformers": theirs, name: ours},
                    peer="transformers",
                    rounds=rounds,
                    unit=unit,
                    pids=[server.process.pid for server in cluster.servers],
                )
                print(f"  bar {bar} x: {'met' if ratios[name] >= bar else 'missed'}", flush=True)
