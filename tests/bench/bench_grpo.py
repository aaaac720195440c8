"""One GRPO step through rollout and trainer servers, beside Hugging Face TRL's GRPOTrainer.

    .venv-peers/bin/python tests/bench/bench_grpo.py [--model DIR] [--samples 8] [--dtypes float32]

A step generates, rewards, trains and, in tandem, publishes the weights. All sides have the same
model, prompt, samples and response length, AdamW and no KL, and run on the same cores in turn.
Every response has its full length, so all sides make and learn the same number of tokens.
Our trainer reads the prompt of the group once (batch.shared_prefixes).

The sides are in float32 and, where the CPU has instructions for it, in bfloat16. There tandem's
lanes and trainer multiply rounded weights by rounded activations, over float32 masters; TRL's model
is bfloat16 in one side (trl_steps.py), and in another one float32 under autocast, its default.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import precision
from alternate import Comparison
from rollout.driven import DrivenProgram
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, Prompt
from tandem.settings.cluster import ClusterSettings
from transformers import AutoTokenizer

PROMPT = "Write one sentence about the sea, the wind and an old lighthouse keeper."
# The bars for the senior alone: in its better type by TRL's better type, and in bfloat16 by TRL in
# float32.
_BAR_BETTER, _BAR_FLOAT32 = 2.5, 5.0
_STRATEGIES: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "word": {"enabled": True, "selection_strategy": "word", "prob_senior": 0.5},
}


def reward(token_ids: Sequence[int]) -> float:
    """The fraction of distinct tokens: cheap, and different for most responses."""
    return len(set(token_ids)) / len(token_ids)


class TandemStep:
    """The steps of a run: generates, trains and publishes through the servers."""

    def __init__(self, cluster: LocalCluster, prompt: list[int], options: Any) -> None:
        self._rollout = RolloutClient(cluster.rollouts[0].address)
        self._trainer = TrainerClient(cluster.trainer.address)
        self._targets = [cluster.rollouts[0].address]
        self._prompt = prompt
        self._options = options
        self._steps = itertools.count(1)

    def run(self, tandem: dict[str, Any]) -> int:
        """Makes the next step; returns the number of response tokens."""
        step = next(self._steps)
        [samples] = self._rollout.generate(
            [
                Prompt(
                    self._prompt,
                    seed=step,
                    num_samples=self._options.samples,
                    sampling={"max_tokens": self._options.tokens, "ignore_eos": True},
                    tandem=tandem,
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


def _cluster(directory: Path, model: Path, dtype: str) -> LocalCluster:
    lanes = precision.lane("senior", dtype) | precision.lane("junior", dtype)
    return LocalCluster(
        ClusterSettings(
            directory=directory,
            rollout=[
                {"senior_model": str(model), "junior_model": str(model), "max_model_len": 256}
                | lanes
            ],
            trainer={
                "model": str(model),
                "optimizer": {"learning_rate": 1e-6},
                "batch": {"micro_batch_tokens": 1024, "shared_prefixes": True},
                "compute": precision.learner(dtype),
            },
        )
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    precision.add_dtypes(parser)
    options = parser.parse_args()

    prompt = AutoTokenizer.from_pretrained(options.model)(PROMPT)["input_ids"]
    sides: dict[str, Callable[[], int]] = {}
    ours, theirs, pids = [], [], []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def add_peer(dtype: str) -> None:
            shape = [str(options.samples), str(options.tokens)]
            program = Path(__file__).parent / "trl_steps.py"
            peer = stack.enter_context(
                DrivenProgram(
                    [sys.executable, program, options.model, directory / dtype, dtype, *shape]
                )
            )

            def step() -> int:
                peer.ask("step")
                return options.samples * options.tokens

            pids.append(peer.pid)
            theirs.append(f"TRL {dtype}")
            sides[f"TRL {dtype}"] = step

        def add_tandem(dtype: str) -> None:
            cluster = stack.enter_context(
                _cluster(directory / f"cluster-{dtype}", options.model, dtype)
            )
            pids.extend(server.process.pid for server in cluster.servers)
            run = TandemStep(cluster, prompt, options).run
            ours.append(f"off {dtype}")
            for name, strategy in _STRATEGIES.items():
                sides[f"{name} {dtype}"] = lambda strategy=strategy: run(strategy)

        for dtype in options.dtypes:
            add_peer(dtype)
            add_tandem(dtype)
        if "bfloat16" in options.dtypes:
            add_peer("autocast")
        comparison = Comparison(peer="TRL float32", unit="response tokens", pids=pids)
        print(
            f"GRPO step: 1 x {options.samples} samples x {options.tokens} tokens; "
            "off: only the senior, word: p = 0.5"
        )
        comparison.take_turns(sides, options.rounds)
    comparison.report()
    comparison.report_bar(comparison.fastest(ours), comparison.fastest(theirs), _BAR_BETTER)
    if "bfloat16" in options.dtypes:
        comparison.report_bar("off bfloat16", "TRL float32", _BAR_FLOAT32)


if __name__ == "__main__":
    main()
