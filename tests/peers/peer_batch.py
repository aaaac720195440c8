"""One batch for both sides of a comparison, and how close their losses and gradients must be.

The policy that learns, the older policy that wrote the batch, and the reference are tiny models of
one shape with different weights, so that ratios are clipped and the KL is not 0. Both sides start
from the same files, in float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from gradients import gradients_of, norm_of

# Largest difference of two losses, relative to max(1, |loss|), and norm of the difference of two
# gradients, relative to the gradient's norm. The weight of a sequence is the exponential of a sum
# over its tokens, in which rounding adds up: against TRL in float64, each side is off by 4 to 5e-6.
LOSS_TOLERANCE = 5e-6
GRADIENT_TOLERANCE = 5e-6
GRADIENT_TOLERANCE_OF_SEQUENCES = 2e-5

EOS, PAD, VOCABULARY = 0, 1, 97
TEMPERATURE = 0.8
MAX_COMPLETION_LENGTH = 24
GROUPS, GROUP_SIZE = 3, 4

# The linear maps of a layer of these families.
MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
}


@dataclass(frozen=True)
class Models:
    """Directories of one family's models; the critic's has a value head."""

    policy: Path
    rollout: Path
    reference: Path
    critic: Path

    def load(self, name: str) -> Any:
        """The model called `name` in `transformers`, for training."""
        head = "TokenClassification" if name == "critic" else "CausalLM"
        auto = getattr(transformers, f"AutoModelFor{head}")
        return auto.from_pretrained(getattr(self, name), dtype=torch.float32).train()


def make_models(directory: Path, family: str) -> Models:
    """Tiny random models; rollout and reference are the policy with noise."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=PAD,
        initializer_range=0.15,
        **changes,
    )
    models = Models(*(directory / role for role in ("policy", "rollout", "reference", "critic")))
    for path, noise in ((models.policy, 0.0), (models.rollout, 0.05), (models.reference, 0.4)):
        torch.manual_seed(1)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        _add_noise(model, 0.2, only_vectors=True)  # norms and biases that matter
        torch.manual_seed(2)
        _add_noise(model, noise)
        model.save_pretrained(path)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.tie_word_embeddings = False
    getattr(transformers, f"{name}ForTokenClassification")(config).save_pretrained(models.critic)
    return models


def _add_noise(model: torch.nn.Module, scale: float, only_vectors: bool = False) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(scale * torch.randn_like(parameter))
            elif not only_vectors:
                parameter.add_(scale * parameter.std() * torch.randn_like(parameter))


@dataclass(frozen=True)
class Response:
    """One response of L tokens.

    Attributes:
        group: index of its prompt.
        authors: 1 where the senior wrote, 0 where the junior did, [L].
        behaviour: log-probabilities under the distribution that it was drawn from, [L].
        old: log-probabilities under the senior's weights when it was drawn, [L].
    """

    group: int
    prompt: list[int]
    tokens: list[int]
    authors: list[int]
    reward: float
    behaviour: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)

    @property
    def truncated(self) -> bool:
        """Whether it was cut by length."""
        return self.tokens[-1] != EOS


def make_batch(models: Models) -> list[Response]:
    """GROUPS prompts with GROUP_SIZE responses of 1 to 24 tokens, most written by both authors."""
    torch.manual_seed(3)
    lengths = [5, 17, 24, 9, 1, 12, 24, 20, 8, 3, 15, 11]
    responses = []
    for index, length in enumerate(lengths):
        group, cut = index // GROUP_SIZE, index % 3 == 2
        prompt = [2 + (7 * group + position) % 90 for position in range(3 + 4 * group)]
        tokens = torch.randint(2, VOCABULARY, (length,)).tolist()
        authors = torch.randint(0, 4, (length,)).clamp(max=1).tolist()
        authors[0] = 1
        if not cut:
            tokens[-1] = EOS
        reward = float(torch.rand(())) + 0.3 * group
        responses.append(Response(group, prompt, tokens, authors, reward))
    with torch.no_grad():
        old = logprobs(models.load("rollout"), responses)
    return [
        replace(
            response,
            old=values.tolist(),
            behaviour=(values + 0.25 * torch.randn_like(values)).clamp(max=0.0).tolist(),
        )
        for response, values in zip(responses, old, strict=True)
    ]


def by_the_senior(batch: Sequence[Response]) -> list[Response]:
    """The same responses, as if the senior had written all of them."""
    return [replace(response, authors=[1] * len(response.tokens)) for response in batch]


def rows_of(model: torch.nn.Module, batch: Sequence[Response]) -> Iterator[torch.Tensor]:
    """The model's outputs before each response token, [L, outputs] for every response."""
    ids = padded([[*response.prompt, *response.tokens] for response in batch], torch.long)
    outputs = model(ids, use_cache=False).logits  # causal: padding on the right has no effect
    for row, response in zip(outputs, batch, strict=True):
        first = len(response.prompt) - 1
        yield row[first : first + len(response.tokens)]


def logprobs(model: torch.nn.Module, batch: Sequence[Response]) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens, [L] each."""
    return [values for values, _ in logprobs_and_entropies(model, batch)]


def logprobs_and_entropies(
    model: torch.nn.Module, batch: Sequence[Response]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities of the response tokens and entropies before them, [L] each."""
    result = []
    for response, logits in zip(batch, rows_of(model, batch), strict=True):
        rows = torch.log_softmax(logits / TEMPERATURE, -1)
        picked = rows[torch.arange(len(response.tokens)), torch.tensor(response.tokens)]
        result.append((picked, -(rows.exp() * rows).sum(-1)))
    return result


def values_of(model: torch.nn.Module, batch: Sequence[Response]) -> list[torch.Tensor]:
    """Values of the states before the response tokens, [L] each."""
    return [rows[:, 0] for rows in rows_of(model, batch)]


def padded(rows: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of different lengths as one tensor, zeros behind their ends, [S, longest]."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True
    )


@dataclass(frozen=True)
class Outcome:
    """The loss of one step, and the gradient of every parameter."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return norm_of(self.gradients.values())


def outcome_of(loss: torch.Tensor, model: torch.nn.Module) -> Outcome:
    """Runs the backward pass of a peer's loss; returns the loss and the gradients."""
    model.zero_grad()
    loss.backward()
    return Outcome(loss.item(), gradients_of(model))


def assert_same(ours: Outcome, peer: Outcome, tolerance: float = GRADIENT_TOLERANCE) -> None:
    """Fails unless losses and gradients agree, the gradients within `tolerance` of the norm."""
    assert ours.gradients.keys() == peer.gradients.keys()
    distance = norm_of(ours.gradients[name] - grad for name, grad in peer.gradients.items())
    print(
        f"loss {peer.loss:.6f} differs by {abs(ours.loss - peer.loss):.1e},"
        f" gradient {peer.norm:.4f} by {distance / peer.norm:.1e},"
        f" norm by {abs(ours.norm / peer.norm - 1):.1e}"
    )
    assert peer.norm > 1e-3, "there is nothing to compare"
    assert abs(ours.loss - peer.loss) <= LOSS_TOLERANCE * max(1.0, abs(peer.loss))
    assert distance <= tolerance * peer.norm
