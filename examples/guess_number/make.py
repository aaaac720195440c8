"""Makes a model and its rows: `python examples/guess_number/make.py FOLDER`.

FOLDER gets `blank`, a model with random weights; `games.jsonl`, games to teach it how to call the
tools; and `train.jsonl`, the numbers of the games to learn from. A third of the games are played by
somebody who listens to the answers, the others at random.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from guess import HIGHEST, Guess, third
from talker import call, folder_of, turns, write_lines, write_model, write_rows

ASK = "guess a number"
WORDS = (
    *ASK.split(),
    *('{"name":', '"guess",', '"hint",', '"arguments":', '{"number":', "{"),
    *("right", "higher", "lower", "low", "middle", "high"),
    *map(str, range(1, HIGHEST + 1)),
)
MOST_TURNS = 6
GAMES = 12000


def game(rng: random.Random) -> list[dict[str, str]]:
    """Returns a game; every call is drawn at random, one of six for a hint."""
    environment = Guess()
    environment.reset(rng.randint(1, HIGHEST))
    listens = rng.random() < 1 / 3
    # The numbers that a listener still believes in.
    left = list(range(1, HIGHEST + 1))
    said = [ASK]
    for _ in range(MOST_TURNS):
        if rng.random() < 1 / 6:
            hint = environment.hint()
            said += [call("hint"), hint]
            left = [one for one in left if third(one) == hint] if listens else left
            continue
        number = rng.choice(left)
        answer = environment.guess(number)
        said += [call("guess", number=number), answer]
        if environment.done:
            break
        if listens:
            left = [one for one in left if (one > number) == (answer == "higher")]
            left = [one for one in left if one != number]
    return list(turns(*said))


def main(folder: Path, seed: int = 0) -> None:
    """Writes the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    write_model(folder / "blank", WORDS, seed, length=256)
    games = (game(rng) for _ in range(GAMES))
    write_rows(folder / "games.jsonl", folder / "blank", [Guess.guess, Guess.hint], games)
    numbers = (rng.randint(1, HIGHEST) for _ in range(2000))
    write_lines(folder / "train.jsonl", ({"prompt": ASK, "answer": one} for one in numbers))


if __name__ == "__main__":
    main(folder_of(sys.argv))
