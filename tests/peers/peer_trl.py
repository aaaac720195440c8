"""TRL's trainers on given batches: their settings, their tokenizer, and records of a step."""

from __future__ import annotations

from typing import Any

import peer_batch
import torch
from datasets import Dataset
from gradients import gradients_of
from peer_batch import EOS, Response
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback

# Settings of a trainer of TRL that learns a given batch on the CPU and writes nothing.
SETTINGS: dict[str, Any] = {
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
        self.found = gradients_of(model)


class RecordsPairs:
    """A trainer of TRL on pairs that takes rows of ids, and records its loss and its metrics."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Keeps the loss and the metrics."""
        loss = super().compute_loss(*arguments, **named)
        self.loss = loss.item()
        self.metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
        return loss


def some_pairs(batch: list[Response], count: int | None = None) -> list[tuple[Response, Response]]:
    """Every two responses to one prompt, or the first `count` of them: chosen and rejected."""
    return list(zip(batch[::2], batch[1::2], strict=True))[:count]


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A tokenizer with one word for every id of the models."""
    words = {"<eos>": EOS, "<pad>": peer_batch.PAD}
    words |= {f"w{index}": index for index in range(2, peer_batch.VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side=padding_side,
    )
