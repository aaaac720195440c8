"""A response in turns beside the same response in one call, and turns without cached prefixes.

    .venv/bin/python tests/bench/bench_turns.py [--sequences 8 --turns 8 --tokens 32 --said 16]

SmolLM2-135M, random or imported; prompts of 64 tokens; one batch for each turn. The sides draw the
same number of tokens, and their rate is that of drawn tokens:

  one response        a single call of turns × tokens
  turns               each continues the response so far, nothing said between them
  turns, said         an environment says tokens between two turns, which the server must read
  turns, cold cache   the same as "turns, said", with a prompt of its own for each turn: all is read
                      again, as by a client that sends conversations to a server without a cache
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tandem
from alternate import Comparison
from rollout.servers import OFF, WORD, RolloutServer
from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc.requests import Prompt, ResponseSoFar

BAR = 0.95
PROMPT_TOKENS = 64


def main() -> None:
    """Prints the rates."""
    options = arguments()
    longest = PROMPT_TOKENS + options.turns * (options.tokens + options.said)
    for name, config in (("senior alone", OFF), ("word, p = 0.5", WORD)):
        settings = {
            "senior_model": str(options.model),
            "senior_dtype": options.dtype,
            "junior_model": str(options.model),
            "junior_dtype": options.dtype,
        }
        with (
            tempfile.TemporaryDirectory() as directory,
            RolloutServer(
                Path(directory), settings, sequences=options.sequences, longest=longest + 64
            ) as server,
        ):
            print(f"\n== {name}, {options.dtype}, {options.sequences} sequences ==")
            measure(server, config, options)


def measure(server: RolloutServer, config: MappingProxyType, options: argparse.Namespace) -> None:
    """Runs the sides in turn."""
    rounds = itertools.count()
    comparison = Comparison(peer="one response", unit="tokens", pids=[server.process.process.pid])

    def prompts(max_tokens: int) -> list[Prompt]:
        # Others in every round: nothing of an earlier one is in the cache.
        ids = np.random.default_rng(next(rounds)).integers(100, 40000, (options.sequences, 64))
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        return [Prompt(one.tolist(), seed=7, sampling=sampling, tandem=config) for one in ids]

    def one_response() -> None:
        server.client.generate(prompts(options.turns * options.tokens))

    def in_turns(said: int, *, cold: bool = False) -> None:
        asked = prompts(options.tokens)
        words = list(range(200, 200 + said))
        wholes: list[trajectory_pb2.Trajectory] = []
        for turn in range(options.turns):
            drawn = [one for [one] in server.client.generate(asked)]
            if turn == 0 or cold:
                wholes = drawn
            else:
                wholes = [
                    tandem.join(whole, words, one) for whole, one in zip(wholes, drawn, strict=True)
                ]
            asked = [
                next_prompt(prompt, whole, words, cold=cold)
                for prompt, whole in zip(asked, wholes, strict=True)
            ]

    sides = {
        "one response": one_response,
        "turns": lambda: in_turns(0),
        "turns, said": lambda: in_turns(options.said),
        "turns, cold cache": lambda: in_turns(options.said, cold=True),
    }
    for _ in range(options.rounds + 1):
        for side, run in sides.items():
            comparison.start()
            run()
            comparison.stop(side, options.sequences * options.turns * options.tokens)
    ratios = comparison.report()
    held = "met" if ratios["turns"] >= BAR else "missed"
    print(f"  bar of turns: at least {BAR} x one response, {held}")


def next_prompt(
    prompt: Prompt, whole: trajectory_pb2.Trajectory, said: list[int], *, cold: bool
) -> Prompt:
    """Returns the prompt of the next turn; a cold one begins with an id of its own."""
    if cold:
        ids = [*prompt.token_ids, *whole.response_token_ids, *said]
        return dataclasses.replace(prompt, token_ids=[ids[0] + 1, *ids[1:]])
    return dataclasses.replace(prompt, response=ResponseSoFar.after(whole, said))


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--said", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
