"""Prompts whose responses are drafted, speculators of tiny models, and the counters of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import torch
from harness import TANDEM
from lanes import LONG
from safetensors.torch import save_file
from tandem.rpc.requests import Prompt

HEADS = {"method": "heads"}
DRAFTS = "tandem_draft_tokens_total"
ACCEPTED = "tandem_accepted_draft_tokens_total"
GREEDY = LONG | {"temperature": 0.0}
CUT = LONG | {"temperature": 0.7, "top_p": 0.8}


def batch() -> list[Prompt]:
    """Repetitive prompts for every strategy and for the senior alone, greedy and sampled."""
    found = []
    for index, tandem in enumerate([*TANDEM.values(), {"enabled": False}]):
        for sampling in (GREEDY, CUT):
            prompt = Prompt(
                [7, 8, 9, 10 + index] * 5,
                seed=len(found),
                sampling=sampling,
                tandem=tandem,
                return_other_logprobs=index % 2 == 0,
                stream_tokens=index % 3 == 0,
            )
            found.append(prompt)
    return found


def total(running: Any, name: str, method: str) -> float:
    """The value of a counter of drafts."""
    lines = harness.metrics_text(running.rollouts[0]).splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{method="{method}"')
    )


def write_speculator(
    directory: Path, model: Path, follows: dict[int, int] | None = None, **changes: Any
) -> Path:
    """Writes an MLP speculator with three heads: random, or with a table of what follows a token.

    The table's heads ignore the hidden state: a token's embedding is a direction of its own, which
    the head turns into the token that follows.
    """
    config = json.loads((model / "config.json").read_text())
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    width = vocabulary if follows is not None else 32
    generator = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "emb.0.weight": matrix(vocabulary, width),
        "head.0.weight": matrix(vocabulary, width),
    }
    tensors |= {"proj.0.weight": matrix(width, hidden), "proj.1.weight": matrix(width, width)}
    if follows is not None:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        tensors["emb.0.weight"] = torch.eye(vocabulary)
        for token, following in follows.items():
            tensors["head.0.weight"][following, token] = 1.0
    tensors |= {"ln.0.weight": torch.ones(width), "ln.0.bias": torch.zeros(width)}
    directory.mkdir()
    save_file(
        {f"speculator.{name}": tensor for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    speculator = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": vocabulary,
        "emb_dim": hidden,
        "inner_dim": width,
        "n_predict": 3,
        "tie_weights": True,
    }
    (directory / "config.json").write_text(json.dumps(speculator | changes))
    return directory
