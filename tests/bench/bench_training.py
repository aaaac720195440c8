"""Tokens and values per second through the trainer and the critic, beside `transformers`.

    .venv/bin/python tests/bench/bench_training.py [--model DIR] [--sequences 8] [--dtypes float32]

The sides work on the same sequences, on the same cores in turn (learning.py), in float32 and, where
the CPU has instructions for it, in bfloat16. In bfloat16 the servers multiply rounded weights by
rounded activations (compute.activation_dtype), over float32 masters; the model of `transformers` is
bfloat16, its optimizer's state, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import precision
import torch
from learning import Peer, compare
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

# The bars for trained tokens and for values, by the same type of `transformers`.
_BARS = {"float32": (1.15, 1.3), "bfloat16": (1.3, 1.3)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    precision.add_dtypes(parser)
    options = parser.parse_args()

    peers = {
        dtype: Peer(
            AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)),
            AutoModelForTokenClassification.from_pretrained(
                options.model, dtype=getattr(torch, dtype), num_labels=1
            ),
            _BARS[dtype],
        )
        for dtype in options.dtypes
    }
    vocabulary = peers["float32"].model.config.vocab_size
    batch = torch.randint(
        vocabulary // 2,
        (options.sequences, options.tokens),
        generator=torch.Generator().manual_seed(0),
    )
    print(f"{options.sequences} x {options.tokens} tokens, {' and '.join(options.dtypes)}")
    compare(
        options.model,
        peers,
        batch,
        micro_batch_tokens=options.micro_batch_tokens,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
