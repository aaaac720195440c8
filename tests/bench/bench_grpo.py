"""One GRPO step through rollout and trainer servers, beside Hugging Face TRL's GRPOTrainer.

    .venv-peers/bin/python tests/bench/bench_grpo.py [--model DIR] [--samples 8] [--dtype bfloat16]

A step generates, rewards, trains and, in tandem, publishes the weights. Both sides have the same
model, prompt length, samples and response length, fp32, AdamW and no KL, and run on the same cores
in turn: TRL's own train() runs, and tandem's step takes its turn in a callback between two of TRL's
steps. Every response has its full length, so both sides make and learn the same number of tokens.
With `--dtype bfloat16` tandem's lanes and trainer multiply rounded weights by rounded activations;
TRL stays in fp32.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import precision
import torch
from alternate import Comparison
from datasets import Dataset
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, Prompt
from tandem.settings.cluster import ClusterSettings
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPT = "Write one sentence about the sea, the wind and an old lighthouse keeper."


def reward(token_ids: Sequence[int]) -> float:
    """The fraction of distinct tokens: cheap, and different for most responses."""
    return len(set(token_ids)) / len(token_ids)


class TandemStep:
    """Generates, trains and publishes through the servers."""

    def __init__(
        self, cluster: LocalCluster, prompt: list[int], tandem: dict[str, Any], options: Any
    ) -> None:
        self._rollout = RolloutClient(cluster.rollouts[0].address)
        self._trainer = TrainerClient(cluster.trainer.address)
        self._targets = [cluster.rollouts[0].address]
        self._prompt = prompt
        self._tandem = tandem
        self._options = options

    def run(self, step: int) -> int:
        """Makes step `step` of the run; returns the number of response tokens."""
        [samples] = self._rollout.generate(
            [
                Prompt(
                    self._prompt,
                    seed=step,
                    num_samples=self._options.samples,
                    sampling={"max_tokens": self._options.tokens, "ignore_eos": True},
                    tandem=self._tandem,
                )
            ]
        )
        self._trainer.train_step(
            [PolicySample(t, group_id="0", reward=reward(t.response_token_ids)) for t in samples],
            run_id="bench",
            step=step,
            expected_version=step - 1,
        )
        reply = self._trainer.publish_weights(self._targets)
        for result in reply.results:
            if result.status.code:
                raise RuntimeError(f"{result.target}: {result.status.message}")
        return sum(len(t.response_token_ids) for t in samples)


class Turns(TrainerCallback):
    """Times TRL's steps and lets the other sides have their turns in between."""

    def __init__(self, comparison: Comparison, sides: dict[str, TandemStep], tokens: int) -> None:
        self._comparison = comparison
        self._sides = sides
        self._tokens = tokens
        self._steps = itertools.count(1)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called before TRL generates and trains."""
        self._comparison.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called after TRL has updated its weights."""
        self._comparison.stop("Hugging Face TRL", self._tokens)
        for name, side in self._sides.items():
            self._comparison.start()
            self._comparison.stop(name, side.run(next(self._steps)))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=precision.DTYPES, default="float32")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompt = tokenizer(PROMPT)["input_ids"]
    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(
            directory=Path(directory) / "cluster",
            rollout=[
                {
                    "senior_model": str(options.model),
                    "junior_model": str(options.model),
                    "max_model_len": 256,
                    **precision.lane("senior", options.dtype),
                    **precision.lane("junior", options.dtype),
                }
            ],
            trainer={
                "model": str(options.model),
                "optimizer": {"learning_rate": 1e-6},
                "batch": {"micro_batch_tokens": 1024},
                "compute": precision.learner(options.dtype),
            },
        )
        with LocalCluster(settings) as cluster:
            comparison = Comparison(
                peer="Hugging Face TRL",
                unit="response tokens",
                pids=[server.process.pid for server in cluster.servers],
            )
            word = {"enabled": True, "selection_strategy": "word", "prob_senior": 0.5}
            sides = {
                "tandem off": TandemStep(cluster, prompt, {"enabled": False}, options),
                "tandem word, p = 0.5": TandemStep(cluster, prompt, word, options),
            }
            tokens = options.samples * options.tokens
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
                processing_class=tokenizer,
                reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
                train_dataset=Dataset.from_dict({"prompt": [PROMPT] * (options.rounds + 1)}),
                args=GRPOConfig(
                    output_dir=f"{directory}/trl",
                    max_steps=options.rounds + 1,
                    per_device_train_batch_size=options.samples,
                    num_generations=options.samples,
                    max_completion_length=options.tokens,
                    generation_kwargs={"min_new_tokens": options.tokens},
                    learning_rate=1e-6,
                    beta=0.0,
                    bf16=False,
                    gradient_checkpointing=False,
                    use_cpu=True,
                    save_strategy="no",
                    logging_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                ),
                callbacks=[Turns(comparison, sides, tokens)],
            )
            trainer.train()
            print(
                f"GRPO step: 1 x {options.samples} samples x {options.tokens} tokens, "
                f"{options.dtype} beside float32"
            )
            comparison.report()


if __name__ == "__main__":
    main()
