"""Writes the demo's rows: sums, with solutions in words and in a code.

    python examples/demo/sums.py FOLDER [SEED]

A prompt is "7 + 5:", the sum of two digits from 4 to 9. There are two ways to write the solution:

    words   " 7 plus 5 is 12. Answer 12"
    code    " m. Answer 12"             one letter stands for the sum, a for 0

FOLDER gets solutions of all 36 sums to learn from: `words.jsonl`, and `both.jsonl`, which has each
sum in words and in code. For reinforcement learning it gets two halves of the sums, without
solutions: `train.jsonl` and `held_out.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

DIGITS = range(4, 10)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def words(a: int, b: int) -> str:
    """Returns the solution in words."""
    return f" {a} plus {b} is {a + b}. Answer {a + b}"


def code(a: int, b: int) -> str:
    """Returns the solution in code."""
    return f" {ALPHABET[a + b]}. Answer {a + b}"


def main(folder: Path, seed: int) -> None:
    """Writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in DIGITS for b in DIGITS]
    random.Random(seed).shuffle(sums)
    half = len(sums) // 2
    write(folder / "words.jsonl", (row(*one, words(*one)) for one in sums))
    write(folder / "both.jsonl", (row(*one, way(*one)) for one in sums for way in (words, code)))
    write(folder / "train.jsonl", (row(*one) for one in sums[:half]))
    write(folder / "held_out.jsonl", (row(*one) for one in sums[half:]))


def row(a: int, b: int, solution: str = "") -> dict[str, str]:
    """Returns the row of a sum."""
    return {"prompt": f"{a} + {b}:", "answer": str(a + b), "solution": solution}


def write(file: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes rows as JSON lines."""
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.seed)
