"""Makes a model and its rows: `python examples/grid_world/make.py FOLDER`.

FOLDER gets `blank`, a model with random weights; `walks.jsonl`, walks at random to teach it how to
call the tool; and `train.jsonl`, the fields from which the walks to learn from begin.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "guess_number"))

from grid import DIRECTIONS, Grid, fields
from talker import call, folder_of, turns, write_lines, write_model, write_rows

WORDS = (
    *("at", '{"name":', '"move",', '"arguments":', '{"direction":'),
    *(f'"{direction}"' for direction in DIRECTIONS),
    *(name for kind in "FHG" for name in fields(kind)),
)
MOST_TURNS = 10
WALKS = 6000


def walk(rng: random.Random) -> list[dict[str, str]]:
    """Returns a walk; every direction is drawn at random."""
    start = rng.choice(fields("F"))
    grid = Grid()
    grid.reset(start)
    said = [f"at {start}"]
    for _ in range(MOST_TURNS):
        direction = rng.choice(list(DIRECTIONS))
        said += [call("move", direction=direction), grid.move(direction)]
        if grid.done:
            break
    return list(turns(*said))


def main(folder: Path, seed: int = 0) -> None:
    """Writes the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    write_model(folder / "blank", WORDS, seed, length=256)
    walks = (walk(rng) for _ in range(WALKS))
    write_rows(folder / "walks.jsonl", folder / "blank", [Grid.move], walks)
    starts = (rng.choice(fields("F")) for _ in range(2000))
    write_lines(folder / "train.jsonl", ({"prompt": f"at {one}", "start": one} for one in starts))


if __name__ == "__main__":
    main(folder_of(sys.argv))
