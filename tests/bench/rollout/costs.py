"""Bytes and operations of a model's passes, and the least time of a job by them.

docs/internals/benchmarks.md derives the formulas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollout.turns import Job

# Bytes of a stored value of a linear map.
VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Costs:
    """A model whose linear maps are stored in one format.

    Attributes:
        weight_bytes: W, bytes of the linear maps, head included, which every pass reads.
        prompt_flops: operations of a prompt token, which needs no logits.
        token_flops: F, operations of a token whose logits are computed.
    """

    weight_bytes: float
    prompt_flops: float
    token_flops: float

    @classmethod
    def of(cls, model: Path, form: str) -> Self:
        """Returns the costs of a Hugging Face directory of a dense decoder; `form`: VALUE_BYTES."""
        config = json.loads((model / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + config["num_key_value_heads"])
        layer = attention + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"] * layer
        head = hidden * config["vocab_size"]
        return cls((layers + head) * VALUE_BYTES[form], 2 * layers, 2 * (layers + head))


def least_seconds(
    job: Job, models: Sequence[Costs], authors: Sequence[bytes], read_bytes: float, flops: float
) -> float:
    """Returns the least time of a job by the authors of its tokens.

    Args:
        models: the junior and the senior, or the senior alone.
        authors: for each sequence the index in `models` of the author of each token.
    """
    prompt = weights = operations = 0.0
    for index, model in enumerate(models):
        written = [mask.count(index) for mask in authors]
        # Tokens behind the last one that a model writes are never consumed by it.
        consumed = [max(0, mask.rfind(index)) for mask in authors]
        readers = sum(count > 0 for count in written)
        prompt += readers * job.prompt_tokens * model.prompt_flops / flops
        # The first pass is that of the prompts, which operations bound.
        weights += max(0, max(written) - 1) * model.weight_bytes / read_bytes
        head = model.token_flops - model.prompt_flops
        operations += (sum(consumed) * model.prompt_flops + sum(written) * head) / flops
    return prompt + max(weights, operations)
