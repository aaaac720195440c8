"""Hugging Face TRL's GRPOTrainer, whose every step waits for a line of the input.

The peer of bench_grpo.py, a process of its own because a process computes in one type alone. It
answers {} when it is ready and after each step (rollout/driven.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
from bench_grpo import PROMPT, reward
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# The type of the weights, and whether products are rounded to bfloat16 over weights in float32,
# which is TRL's default.
TYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


class _Turns(TrainerCallback):
    """Makes a step for each line of the input, and ends with the input."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def _answer(self) -> None:
        print(json.dumps({}), file=self._answers, flush=True)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Called before the first step."""
        self._answer()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called before TRL generates and trains."""
        if not sys.stdin.readline():
            os._exit(0)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called after TRL has updated its weights."""
        self._answer()


def main() -> None:
    """Trains until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("samples", type=int)
    parser.add_argument("tokens", type=int)
    options = parser.parse_args()

    dtype, autocast = TYPES[options.type]
    steps = 1000  # more than are asked for
    # TRL prints, and that must not stand among the answers.
    with contextlib.redirect_stdout(sys.stderr):
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [PROMPT] * steps}),
            args=GRPOConfig(
                output_dir=str(options.output),
                max_steps=steps,
                per_device_train_batch_size=options.samples,
                num_generations=options.samples,
                max_completion_length=options.tokens,
                generation_kwargs={"min_new_tokens": options.tokens},
                learning_rate=1e-6,
                beta=0.0,
                bf16=autocast,
                gradient_checkpointing=False,
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            callbacks=[_Turns(sys.__stdout__)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
