"""Makes a model and its rows: `python examples/guess_number/make.py FOLDER`.

FOLDER gets `blank`, a model with random weights; `games.jsonl`, games that are played at random, to
teach it how to call the tools; and `train.jsonl`, the numbers of the games to learn from.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from guess import HIGHEST, Guess
from talker import call, folder_of, turns, write_lines, write_model, write_rows

ASK = "guess a number"
WORDS = (
    *ASK.split(),
    *('{"name":', '"guess",', '"hint",', '"arguments":', '{"number":', "{"),
    *("right", "higher", "lower", "low", "middle", "high"),
    *map(str, range(1, HIGHEST + 1)),
)
MOST_TURNS = 8
GAMES = 6000


def game(rng: random.Random) -> list[dict[str, str]]:
    """Returns a game in which every call is drawn at random: one of six is for a hint."""
    environment = Guess()
    environment.reset(rng.randint(1, HIGHEST))
    said = [ASK]
    for _ in range(MOST_TURNS):
        if rng.random() < 1 / 6:
            said += [call("hint"), environment.hint()]
            continue
        number = rng.randint(1, HIGHEST)
        said += [call("guess", number=number), environment.guess(number)]
        if environment.done:
            break
    return list(turns(*said))


def main(folder: Path) -> None:
    """Writes the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_model(folder / "blank", WORDS, 0, length=256)
    games = (game(rng) for _ in range(GAMES))
    write_rows(folder / "games.jsonl", folder / "blank", [Guess.guess, Guess.hint], games)
    numbers = (rng.randint(1, HIGHEST) for _ in range(2000))
    write_lines(folder / "train.jsonl", ({"prompt": ASK, "answer": one} for one in numbers))


if __name__ == "__main__":
    main(folder_of(sys.argv))
