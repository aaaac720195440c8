"""Tokens and values per second through the trainer and the critic, beside `transformers`.

    .venv/bin/python tests/bench/bench_training.py [--model DIR] [--sequences 8] [--dtype bfloat16]

The sides work on the same sequences, on the same cores in turn (learning.py). In bfloat16 the
servers multiply rounded weights by rounded activations (compute.activation_dtype), over float32
masters; the model of `transformers` is bfloat16, its optimizer's state, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import precision
import torch
from learning import compare
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=precision.DTYPES, default="float32")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    batch = torch.randint(
        peer.config.vocab_size // 2,
        (options.sequences, options.tokens),
        generator=torch.Generator().manual_seed(0),
    )
    critic = AutoModelForTokenClassification.from_pretrained(
        options.model, dtype=dtype, num_labels=1
    )
    print(f"{options.sequences} x {options.tokens} tokens, {options.dtype}")
    compare(
        options.model,
        peer,
        critic,
        batch,
        micro_batch_tokens=options.micro_batch_tokens,
        rounds=options.rounds,
        bar=1.3,
        dtype=options.dtype,
    )


if __name__ == "__main__":
    main()
