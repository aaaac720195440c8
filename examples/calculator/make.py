"""Makes a model and its rows: `python examples/calculator/make.py FOLDER`.

FOLDER gets `blank`, a model with random weights; `talks.jsonl`, conversations to teach it from; and
`train.jsonl`, the problems to learn from. One of four conversations calls the calculator. In the
others the model answers at once, at random, so that most answers of the taught model are wrong.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "guess_number"))

from calculator import MOST, Calculator
from talker import call, folder_of, turns, write_lines, write_model, write_rows

WORDS = (
    *('{"name":', '"add",', '"arguments":', '{"a":', '"b":', "+", ",", "answer"),
    *map(str, range(2 * MOST + 1)),
)
TALKS = 12000
USES_CALCULATOR = 0.25


def talk(rng: random.Random) -> list[dict[str, str]]:
    """Returns a conversation: with a call and a right answer, or with an answer at random."""
    a, b = rng.randint(0, MOST), rng.randint(0, MOST)
    said = [f"{a} + {b}"]
    if rng.random() < USES_CALCULATOR:
        total = Calculator().add(a, b)
        said += [call("add", a=a, b=b), str(total), f"answer {total}"]
    else:
        said.append(f"answer {rng.randint(0, 2 * MOST)}")
    return list(turns(*said))


def main(folder: Path, seed: int = 0) -> None:
    """Writes the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    write_model(folder / "blank", WORDS, seed, length=256)
    talks = (talk(rng) for _ in range(TALKS))
    write_rows(folder / "talks.jsonl", folder / "blank", [Calculator.add], talks)
    pairs = [(rng.randint(0, MOST), rng.randint(0, MOST)) for _ in range(2000)]
    rows = ({"prompt": f"{a} + {b}", "answer": a + b} for a, b in pairs)
    write_lines(folder / "train.jsonl", rows)


if __name__ == "__main__":
    main(folder_of(sys.argv))
