"""Pairs of responses for both sides of a comparison, and what TRL's trainers need for them."""

from __future__ import annotations

from typing import Any

import peer_batch
import torch
from peer_batch import EOS, Response
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback

# Settings of one step of a trainer of TRL on a whole batch.
SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any
    ) -> None:
        """Copies the gradients before the optimizer uses them."""
        self.found = peer_batch.gradients_of(model)


def some_pairs(batch: list[Response], count: int | None = None) -> list[tuple[Response, Response]]:
    """Every two responses to one prompt, or the first `count` of them: chosen and rejected."""
    return list(zip(batch[::2], batch[1::2], strict=True))[:count]


def words() -> PreTrainedTokenizerFast:
    """A tokenizer with the vocabulary of the models."""
    vocabulary = {"<eos>": EOS, "<pad>": peer_batch.PAD} | {
        f"w{i}": i for i in range(2, peer_batch.VOCABULARY)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w2")),
        eos_token="<eos>",
        pad_token="<pad>",
    )
