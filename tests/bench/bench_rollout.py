"""Response tokens per second through the rollout server, beside `transformers.generate`.

    .venv/bin/python tests/bench/bench_rollout.py [--model DIR] [--sequences 16] [--rounds 5]

The same prompts and lengths, fp32, sampling at temperature 1, on the same cores in turn.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from alternate import alternate
from tandem.client import RolloutClient
from tandem.cluster import LocalCluster
from tandem.requests import Prompt
from tandem.settings import ClusterSettings
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 32


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    prompts = torch.randint(
        1000, 20000, (options.sequences, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    def transformers_generate() -> int:
        with torch.inference_mode():
            peer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
                pad_token_id=0,
            )
        return options.sequences * options.tokens

    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(
            directory=Path(directory),
            rollout=[
                {
                    "senior_model": str(options.model),
                    "junior_model": str(options.model),
                    "max_model_len": 256,
                }
            ],
        )
        with (
            LocalCluster(settings) as cluster,
            RolloutClient(cluster.rollouts[0].address) as client,
        ):

            def rollout(tandem: dict[str, object]) -> int:
                groups = client.generate(
                    Prompt(
                        row.tolist(),
                        seed=index,
                        sampling={"max_tokens": options.tokens, "ignore_eos": True},
                        tandem=tandem,
                    )
                    for index, row in enumerate(prompts)
                )
                return sum(len(t.response_token_ids) for group in groups for t in group)

            print(f"{options.sequences} sequences, {PROMPT_TOKENS} + {options.tokens} tokens, fp32")
            alternate(
                {
                    "transformers": transformers_generate,
                    "tandem off": lambda: rollout({"enabled": False}),
                    "tandem word, p = 0.5": lambda: rollout(
                        {"enabled": True, "selection_strategy": "word", "prob_senior": 0.5}
                    ),
                },
                peer="transformers",
                rounds=options.rounds,
                unit="tokens",
                pids=[server.process.pid for server in cluster.servers],
            )


if __name__ == "__main__":
    main()
