"""Makes a model and its rows: `python examples/tic_tac_toe/make.py FOLDER`.

FOLDER gets `blank`, a model with random weights; `games.jsonl`, games between two players that take
free cells at random, to teach it how to play; and `train.jsonl`, the games to learn from.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "guess_number"))

from board import FREE, MINE, THEIRS, TicTacToe, free
from talker import call, folder_of, turns, write_lines, write_model, write_rows

WORDS = (
    *("play", '{"name":', '"place",', '"arguments":', '{"cell":'),
    *("taken", FREE, MINE, THEIRS),
    *map(str, range(9)),
)
GAMES = 12000


def game(rng: random.Random) -> list[dict[str, str]]:
    """Returns a game of two players that play at random, as the first one sees it."""

    def at_random(messages: list[dict[str, str]]) -> str:
        board = messages[-1]["content"].split()[1:]
        return call("place", cell=rng.choice(free(board)))

    environment = TicTacToe()
    # The junior is asked in the middle of games.
    said = ["play" + environment.reset(at_random, rng.getrandbits(32), begun=rng.randint(0, 3))]
    while not environment.done:
        board = said[-1].split()[-9:]
        cell = rng.choice(free(board))
        said += [call("place", cell=cell), environment.place(cell)]
    return list(turns(*said))


def main(folder: Path, seed: int = 0) -> None:
    """Writes the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    write_model(folder / "blank", WORDS, seed, length=256)
    games = (game(rng) for _ in range(GAMES))
    write_rows(folder / "games.jsonl", folder / "blank", [TicTacToe.place], games)
    write_lines(folder / "train.jsonl", ({"prompt": "play"} for _ in range(2000)))


if __name__ == "__main__":
    main(folder_of(sys.argv))
