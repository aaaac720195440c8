"""The mixture of experts of the benchmarks: random weights, sizes by options."""

from __future__ import annotations

import argparse

from transformers import Qwen3MoeConfig

VOCABULARY = 8192


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model's sizes."""
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--expert-width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)


def config_of(options: argparse.Namespace) -> Qwen3MoeConfig:
    """Returns the config of the sizes."""
    return Qwen3MoeConfig(
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
        bos_token_id=0,
        eos_token_id=1,
    )
