"""Keeping the responses of a step: the Parquet file of a run beside its records as JSON lines.

    .venv/bin/python tests/bench/bench_trajectories.py [--responses 128] [--tokens 2048]

Both write the same responses to a temporary directory, in turn: what `tandem train` writes, and
what `tandem view --json` prints, which earlier releases wrote. The tokens are drawn from a Zipf
distribution over 150,000 ids, the authors change every 20 tokens, and the log-probabilities of both
models are random, so that they compress no better than those of a model. A ratio does not depend on
the machine, the times a token do. --projected TOKENS also prints what a step of so many tokens
would take: by default 512 prompts with 16 responses of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc.wire import to_tensor
from tandem.run_directory.trajectories.record import Response, trajectory_record
from tandem.run_directory.trajectories.writer import write_parquet

VOCABULARY = 150_000
PROMPT_TOKENS = 256
GROUP = 16
# The ratios that the file must keep: of the bytes, and of the processor's time.
TARGETS = {"bytes": 0.3, "seconds of the processor": 0.5}


def responses(count: int, tokens: int) -> list[Response]:
    """Returns responses of a step, GROUP to each prompt."""
    random = np.random.default_rng(0)
    made = []
    for index in range(count):
        if index % GROUP == 0:
            prompt = random.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
        trajectory = trajectory_pb2.Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=np.minimum(random.zipf(1.2, tokens), VOCABULARY - 1).tolist(),
            authorship_mask=((random.random(tokens) < 0.05).cumsum() % 2).astype("u1").tobytes(),
            author_logprobs=to_tensor(-random.exponential(0.5, tokens)),
            other_logprobs=to_tensor(-random.exponential(0.7, tokens)),
            sample_index=index % GROUP,
            seed=index,
        )
        trajectory.tandem.enabled = True
        text = " ".join(map(str, random.integers(0, 5000, tokens)))
        made.append(
            Response(
                trajectory,
                text,
                reward=float(index % 2),
                scores={"exact_match": float(index % 2)},
                group_id=f"step-1/prompt-{index // GROUP}",
                place=f"rows.jsonl:{index // GROUP}",
                row={"answer": "x" * 200},
            )
        )
    return made


def write_json(path: Path, made: Sequence[Response]) -> None:
    """Writes the records as JSON lines, as a whole and to the disk."""
    lines = (json.dumps(trajectory_record(one), ensure_ascii=False) + "\n" for one in made)
    with path.open("wb") as file:
        file.write("".join(lines).encode())
        os.fsync(file.fileno())


def measured(write: Callable[[], None], path: Path) -> dict[str, float]:
    """Returns bytes, and the seconds of clock and processor, of one write."""
    clock, processor = time.perf_counter(), time.process_time()
    write()
    return {
        "bytes": path.stat().st_size,
        "seconds": time.perf_counter() - clock,
        "seconds of the processor": time.process_time() - processor,
    }


def main() -> None:
    """Measures, prints, and says whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--projected", type=int, default=512 * 16 * 8192)
    options = parser.parse_args()
    made = responses(options.responses, options.tokens)
    tokens = options.responses * options.tokens
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "step.jsonl"), Path(folder, "step.parquet")
        write_parquet(new, made[:1])  # The import is not measured.
        rounds = [
            (measured(lambda: write_json(old, made), old),
             measured(lambda: write_parquet(new, made), new))
            for _ in range(options.rounds)
        ]  # fmt: skip
    best = [
        {name: min(one[side][name] for one in rounds) for name in rounds[0][side]}
        for side in (0, 1)
    ]
    projected = options.projected / tokens
    print(f"{options.responses} responses of {options.tokens:,} tokens")
    for name, one in zip(("JSON lines", "Parquet"), best, strict=True):
        print(
            f"{name:>10}: {one['bytes'] / tokens:5.1f} bytes and "
            f"{one['seconds'] / tokens * 1e6:.2f} us a token "
            f"({one['seconds of the processor'] / tokens * 1e6:.2f} us of the processor); "
            f"{options.projected:,} tokens: {one['bytes'] * projected / 1e9:.2f} GB, "
            f"{one['seconds'] * projected:.0f} s"
        )
    for name, most in TARGETS.items():
        ratio = best[1][name] / best[0][name]
        verdict = "met" if ratio <= most else "MISSED"
        print(f"ratio of {name}: {ratio:.3f} (target {most:g}: {verdict})")


if __name__ == "__main__":
    main()
