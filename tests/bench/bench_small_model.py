"""One tandem GRPO step of a model of a million parameters, beside the same step in plain torch.

    .venv/bin/python tests/bench/bench_small_model.py [--rounds 20]

At this size (examples/tandem_effect: 16 prompts × 8 samples × 24 tokens, coin before each token) a
step may be ruled by what surrounds the computation: calls, scheduling, publication. The peer is one
process without any of that: two layers in torch with a key-value cache, both models drawing every
token, a policy gradient over the senior's tokens, AdamW. Both sides have the same number of
parameters and tokens, fp32, and the cores of the machine, in turn.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
from pathlib import Path

import torch
from alternate import alternate
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, Prompt
from tandem.settings.cluster import ClusterSettings
from torch import nn
from torch.nn import functional

PROMPTS, SAMPLES, TOKENS, PROMPT_TOKENS = 16, 8, 24, 8
VOCABULARY, WIDTH, HEADS, LAYERS = 37, 192, 4, 2
# With two matrices where a Llama has three, so that both have the same number of parameters.
INNER = 1152


class Layer(nn.Module):
    """Attention with a cache, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """Returns the new hidden states [batch, tokens, width]."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.inner(self.norms[1](x))


class Transformer(nn.Module):
    """A decoder with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(PROMPT_TOKENS + TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, ids: torch.Tensor, offset: int = 0, caches: list[dict] | None = None
    ) -> torch.Tensor:
        """Returns logits [batch, tokens, vocabulary]."""
        x = self.tokens(ids) + self.positions(torch.arange(offset, offset + ids.shape[1]))
        for index, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[index])
        return self.head(self.norm(x))


class TorchStep:
    """Rollout, rewards and update in one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.senior, self.junior = Transformer(), Transformer()
        self.optimizer = torch.optim.AdamW(self.senior.parameters(), 3e-4)

    def run(self) -> int:
        """Makes a step; returns the number of response tokens."""
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(SAMPLES, 0)
        responses, by_senior = self.rollout(prompts)
        rewards = (responses % 2).float().mean(1).view(PROMPTS, SAMPLES)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        logits = self.senior(torch.cat([prompts, responses], 1)[:, :-1])[:, PROMPT_TOKENS - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
        loss = -(advantages * logprobs * by_senior).sum() / by_senior.sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.senior.parameters(), 1.0)
        self.optimizer.step()
        return responses.numel()

    @torch.no_grad()
    def rollout(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns responses and, for every token, whether the senior wrote it."""
        models = (self.junior, self.senior)
        caches = [[{} for _ in range(LAYERS)] for _ in models]
        ids, offset = prompts, 0
        tokens, authors = [], []
        for _ in range(TOKENS):
            drawn = [
                torch.multinomial(model(ids, offset, cache)[:, -1].softmax(-1), 1)
                for model, cache in zip(models, caches, strict=True)
            ]
            coin = torch.rand(len(prompts), 1) < 0.5
            offset += ids.shape[1]
            ids = torch.where(coin, drawn[1], drawn[0])
            tokens.append(ids)
            authors.append(coin)
        return torch.cat(tokens, 1), torch.cat(authors, 1)


class TandemStep:
    """Rollout, rewards, update and publication through the servers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.rollout = RolloutClient(cluster.rollouts[0].address)
        self.trainer = TrainerClient(cluster.trainer.address)
        self.targets = [cluster.rollouts[0].address]
        self.step = 0

    def run(self) -> int:
        """Makes a step; returns the number of response tokens."""
        self.step += 1
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
        groups = self.rollout.generate(
            [
                Prompt(
                    ids,
                    seed=PROMPTS * self.step + index,
                    num_samples=SAMPLES,
                    sampling={"max_tokens": TOKENS, "ignore_eos": True},
                    tandem={
                        "enabled": True,
                        "selection_strategy": "bernoulli",
                        "prob_senior": 0.5,
                    },
                )
                for index, ids in enumerate(prompts)
            ]
        )
        samples = [
            PolicySample(
                one,
                group_id=str(index),
                reward=sum(token % 2 for token in one.response_token_ids) / TOKENS,
            )
            for index, group in enumerate(groups)
            for one in group
        ]
        self.trainer.train_step(
            samples, run_id="bench", step=self.step, expected_version=self.step - 1
        )
        for result in self.trainer.publish_weights(self.targets).results:
            if result.status.code:
                raise RuntimeError(f"{result.target}: {result.status.message}")
        return sum(len(one.trajectory.response_token_ids) for one in samples)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    make = runpy.run_path("examples/tandem_effect/make.py")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for seed, name in enumerate(("senior", "junior")):
            make["write_model"](folder / name, seed)
        settings = ClusterSettings(
            directory=folder / "cluster",
            rollout=[
                {
                    "senior": {"model": str(folder / "senior"), "max_model_len": 40},
                    "junior": {"model": str(folder / "junior")},
                    "max_num_seqs": 256,
                }
            ],
            trainer={
                "model": str(folder / "senior"),
                "max_model_len": 40,
                "optimizer": {"learning_rate": 3e-4},
            },
        )
        with LocalCluster(settings) as cluster:
            print(f"tandem GRPO step: {PROMPTS} x {SAMPLES} samples x {TOKENS} tokens, fp32")
            alternate(
                {"plain torch": TorchStep().run, "Tandem": TandemStep(cluster).run},
                peer="plain torch",
                rounds=options.rounds,
                unit="response tokens",
                pids=[server.process.pid for server in cluster.servers],
            )


if __name__ == "__main__":
    main()
