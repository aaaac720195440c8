"""The rollout server beside llama.cpp, `transformers` and the machine's limits, as one table.

    .venv/bin/python tests/bench/bench_rollout.py [--sections solo,tandem] [--new-tokens 128]
    .venv/bin/python tests/bench/bench_rollout.py --model qwen2.5-0.5b --sections solo

All sides of a line alternate; the table has medians over the rounds, and the lines above it have
the spread and CPU seconds. docs/internals/benchmarks.md explains every figure. The first run builds
llama.cpp into .cache (5 minutes). --skip leaves sides out, for example those of bfloat16 on a CPU
without instructions for it: --skip 'tandem bfloat16' --skip 'transformers bfloat16'.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rollout import memory, solo, speculative, streaming, tandem_turns, weights
from rollout.bench import Bench, Options
from rollout.machine import describe
from rollout.models import QWEN, SMOLLM2, model_directory

SECTIONS = {
    "solo": solo.run,
    "tandem": tandem_turns.run,
    "streaming": streaming.run,
    "speculative": speculative.run,
    "weights": weights.run,
    "memory": memory.run,
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=str(SMOLLM2),
        help=f"Hugging Face directory, or {QWEN}: its shape with random weights",
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--sequences", default="1,4,8,16")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", action="append", default=[], help="pattern of names of sides")
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--sections: {sorted(unknown)} are none of {list(SECTIONS)}")

    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        options = Options(
            model=model_directory(arguments.model, folder),
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
            rounds=arguments.rounds,
            counts=tuple(map(int, arguments.sequences.split(","))),
            skip=tuple(arguments.skip),
        )
        print(
            f"{arguments.model}: prompts of {options.prompt_tokens} tokens, "
            f"{options.new_tokens} new ones, {options.rounds} rounds"
        )
        bench = Bench(options, folder)
        for section in sections:
            print(f"\n== {section} ==", flush=True)
            SECTIONS[section](bench)
        bench.limits.print()
        bench.table.print()


if __name__ == "__main__":
    main()
