"""A small mixture of experts in the trainer and the critic, beside `transformers`.

    .venv/bin/python tests/bench/bench_experts.py [--experts 32] [--per-token 4] [--rounds 5]

A random Qwen3-MoE model is made for the run, in float32. What is measured is in learning.py; the
peer uses its grouped product.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from learning import Peer, compare
from mixture import VOCABULARY, add_sizes, config_of
from transformers import Qwen3MoeForCausalLM, Qwen3MoeForTokenClassification


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    config = config_of(options)
    torch.manual_seed(0)
    peer = Qwen3MoeForCausalLM(config).float()
    config.num_labels = 1
    critic = Qwen3MoeForTokenClassification(config).float()
    batch = torch.randint(VOCABULARY, (options.sequences, options.tokens))
    print(
        f"{options.layers} layers of {options.experts} experts "
        f"[{options.hidden}, {options.expert_width}], {options.per_token} per token; "
        f"{options.sequences} x {options.tokens} tokens, fp32"
    )
    with tempfile.TemporaryDirectory() as directory:
        peer.save_pretrained(directory)
        compare(
            Path(directory),
            {"float32": Peer(peer, critic, bars=(2.0, 2.0))},
            batch,
            micro_batch_tokens=batch.numel(),
            rounds=options.rounds,
        )


if __name__ == "__main__":
    main()
