"""A small mixture of experts in the trainer and the critic, beside `transformers`.

    .venv/bin/python tests/bench/bench_experts.py [--experts 32] [--per-token 4] [--rounds 5]

A random Qwen3-MoE model is made for the run, in float32. Trained tokens per second: one supervised
update (forward, backward, AdamW), in which every token but the first of a sequence is learnt.
Values per second: the critic's values of the same tokens. The peer uses its grouped product.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from alternate import alternate
from tandem.client import CriticClient, TrainerClient
from tandem.cluster import LocalCluster
from tandem.requests import SupervisedSample
from tandem.settings import ClusterSettings
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForTokenClassification

VOCABULARY = 8192


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--expert-width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        moe_intermediate_size=options.expert_width,
        num_experts=options.experts,
        num_experts_per_tok=options.per_token,
        norm_topk_prob=True,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        head_dim=64,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    peer = Qwen3MoeForCausalLM(config).float().train()
    config.num_labels = 1
    peer_critic = Qwen3MoeForTokenClassification(config).float().eval()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, fused=True)
    batch = torch.randint(VOCABULARY, (options.sequences, options.tokens))

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
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        peer.save_pretrained(model)
        learner = {"model": str(model), "batch": {"micro_batch_tokens": batch.numel()}}
        settings = ClusterSettings(
            directory=Path(directory) / "cluster", trainer=learner, critic=learner
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

            print(
                f"{options.layers} layers of {options.experts} experts "
                f"[{options.hidden}, {options.expert_width}], {options.per_token} per token; "
                f"{options.sequences} x {options.tokens} tokens, fp32"
            )
            for unit, sides in (
                ("tokens", {"transformers": transformers_step, "trainer": trainer_step}),
                ("values", {"transformers": transformers_values, "critic": critic_values}),
            ):
                alternate(
                    sides,
                    peer="transformers",
                    rounds=options.rounds,
                    unit=unit,
                    pids=[server.process.pid for server in cluster.servers],
                )


if __name__ == "__main__":
    main()
