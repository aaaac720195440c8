"""Trained tokens and values per second of trainer and critic, beside `transformers`.

Trained tokens: one supervised update (forward, backward, AdamW), in which every token but the first
of a sequence is learnt, so neither side can skip work. Values: the critic's, of the same tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import precision
import torch
from alternate import Comparison
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings

_FLOAT32 = "transformers float32"


@dataclass(frozen=True)
class Peer:
    """The peer's models in one type, and what ours in this type must reach beside them.

    Attributes:
        model: with its own head.
        critic: the same with one output per token.
        bars: ratio of trained tokens per second, and of values per second.
    """

    model: torch.nn.Module
    critic: torch.nn.Module
    bars: tuple[float, float]


def compare(
    model: Path,
    peers: Mapping[str, Peer],
    batch: torch.Tensor,
    *,
    micro_batch_tokens: int,
    rounds: int,
) -> None:
    """Measures and prints, with whether the ratios reach the bars.

    `peers` are the model in the directory `model` by type, float32 first; our servers run in the
    same types. All sides take turns. `batch` [S, T] are token ids.
    """
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    tokens: dict[str, Callable[[], int]] = {}
    values: dict[str, Callable[[], int]] = {}
    pids = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for dtype, peer in peers.items():
            learner: dict[str, Any] = {
                "model": str(model),
                "batch": {"micro_batch_tokens": micro_batch_tokens},
                "compute": precision.learner(dtype),
            }
            settings = ClusterSettings(
                directory=directory / dtype,
                trainer=learner,
                critic=learner | {"untie_embeddings": True},
            )
            cluster = stack.enter_context(LocalCluster(settings))
            pids += [server.process.pid for server in cluster.servers]
            trainer = stack.enter_context(TrainerClient(cluster.trainer.address))
            critic = stack.enter_context(CriticClient(cluster.critic.address))
            tokens[f"transformers {dtype}"] = _peer_step(peer.model, batch)
            tokens[f"trainer {dtype}"] = _trainer_step(trainer, samples, batch.numel())
            values[f"transformers {dtype}"] = _peer_values(peer.critic, batch)
            values[f"critic {dtype}"] = _critic_values(critic, samples, batch.numel())
        for unit, sides, name, index in (
            ("tokens", tokens, "trainer", 0),
            ("values", values, "critic", 1),
        ):
            comparison = Comparison(peer=_FLOAT32, unit=unit, pids=pids)
            comparison.take_turns(sides, rounds)
            comparison.report()
            for dtype, peer in peers.items():
                bar = peer.bars[index]
                comparison.report_bar(f"{name} {dtype}", f"transformers {dtype}", bar)


def _peer_step(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[], int]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> int:
        optimizer.zero_grad(set_to_none=False)
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return batch.numel()

    return step


def _peer_values(critic: torch.nn.Module, batch: torch.Tensor) -> Callable[[], int]:
    critic.eval()

    def values() -> int:
        with torch.inference_mode():
            critic(batch, use_cache=False)
        return batch.numel()

    return values


def _trainer_step(
    trainer: TrainerClient, samples: list[SupervisedSample], tokens: int
) -> Callable[[], int]:
    steps = itertools.count(1)

    def step() -> int:
        number = next(steps)
        trainer.train_step(samples, run_id="bench", step=number, expected_version=number - 1)
        return tokens

    return step


def _critic_values(
    critic: CriticClient, samples: list[SupervisedSample], tokens: int
) -> Callable[[], int]:
    def values() -> int:
        critic.compute_values(samples)
        return tokens

    return values
