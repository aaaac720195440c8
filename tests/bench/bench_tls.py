"""GRPO steps over TLS for both sides with tokens, beside the same steps over plain connections.

    .venv/bin/python tests/bench/bench_tls.py [--model DIR] [--samples 8] [--tokens 64] [--rounds 9]

A step generates, rewards, trains, publishes the weights and reads every server's state, as the loop
of `tandem train` does. Each side has a rollout server and a trainer of its own; they work in turn,
on the same cores. Both do the same arithmetic, so the ratio is the cost of TLS and tokens. Without
--model the model is tiny and random, so that messages count for more than they do in a real run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alternate import Comparison
from tandem.certs.authority import Request, make_certificates
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, Prompt
from tandem.settings.cluster import ClusterSettings

SECURED = "mTLS and tokens"
PROMPT = list(range(5, 37))
# The most that TLS and tokens may cost.
TARGET = 0.03


def tiny_model(directory: Path) -> Path:
    """Writes a random Llama of 3 M parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def settings(directory: Path, model: Path, certs: Path | None) -> ClusterSettings:
    """Returns a rollout server and a trainer of a model."""
    return ClusterSettings(
        directory=directory,
        certs=certs,
        rollout=[{"senior_model": str(model), "max_model_len": 256}],
        trainer={"model": str(model), "optimizer": {"learning_rate": 1e-6}},
    )


class Steps:
    """GRPO steps on one cluster."""

    def __init__(self, cluster: LocalCluster, stack: ExitStack, options: Any) -> None:
        credentials = {"credentials": cluster.credentials}
        self._address = cluster.rollouts[0].address
        self._rollout = stack.enter_context(RolloutClient(self._address, **credentials))
        self._trainer = stack.enter_context(TrainerClient(cluster.trainer.address, **credentials))
        self._numbers = itertools.count(1)
        self._options = options

    def run(self, count: int) -> int:
        """Makes `count` steps; returns the number of response tokens."""
        return sum(self._step(next(self._numbers)) for _ in range(count))

    def _step(self, step: int) -> int:
        sampling = {"max_tokens": self._options.tokens, "ignore_eos": True}
        prompt = Prompt(
            PROMPT,
            seed=step,
            num_samples=self._options.samples,
            sampling=sampling,
            tandem={"enabled": False},
        )
        held = self._trainer.info().server.weights
        if self._rollout.weights_version() != held:
            raise RuntimeError("the rollout server holds other weights than the trainer")
        [samples] = self._rollout.generate([prompt])
        self._trainer.train_step(
            [
                PolicySample(one, group_id="0", reward=float(len(set(one.response_token_ids))))
                for one in samples
            ],
            run_id="bench",
            step=step,
            expected_version=held.version,
        )
        for result in self._trainer.publish_weights([self._address]).results:
            if result.status.code:
                raise RuntimeError(f"{result.target}: {result.status.message}")
        return sum(len(one.response_token_ids) for one in samples)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = Path(directory)
        model = options.model or tiny_model(place / "model")
        certs = make_certificates(place / "certs", Request()).path
        sides = {"plain": None, SECURED: certs}
        clusters = {
            name: stack.enter_context(LocalCluster(settings(place / name, model, one)))
            for name, one in sides.items()
        }
        steps = {name: Steps(cluster, stack, options) for name, cluster in clusters.items()}
        print(
            f"GRPO on {options.model or 'a tiny model'}: turns of {options.steps} steps of "
            f"{options.samples} samples of {options.tokens} tokens"
        )
        pids = [one.process.pid for cluster in clusters.values() for one in cluster.servers]
        comparison = Comparison(peer="plain", unit="response tokens", pids=pids)
        for _ in range(options.rounds + 1):
            for name, one in steps.items():
                comparison.start()
                comparison.stop(name, one.run(options.steps))
        cost = 1 / comparison.report()[SECURED] - 1
        cpu = comparison.cpu_ratios()[SECURED] - 1
        print(
            f"  {SECURED} cost {cost:+.1%} of the time, {cpu:+.1%} of the CPU seconds "
            f"(target: at most {TARGET:.0%} of the time)"
        )


if __name__ == "__main__":
    main()
