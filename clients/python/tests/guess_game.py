"""A game of guessing a number: an environment, a run of it on fake servers, and its player."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from commands import lines, records, tandem
from talking import called, let_write

from tandem.rpc.author_schedule import TOKEN, uniform

ENVIRONMENT = '''
import time
from pathlib import Path

class Guess:
    """A number from 0 to 3 to guess."""

    def reset(self, answer, seed, **row):
        self.answer, self.tries, self.done = answer, 0, False
        if row.get("breaks") == "reset":
            raise RuntimeError("no connection")
        return " Begin."

    def guess(self, number: int) -> str:
        """Says how a number compares.

        Args:
            number: the number.
        """
        self.tries += 1
        self.done = number == self.answer
        return "right" if self.done else "higher" if self.answer > number else "lower"

    async def hint(self) -> str:
        """Gives a hint."""
        return f"it is {self.answer}"

    def think(self, seconds: float) -> str:
        """Takes its time.

        Args:
            seconds: how much.
        """
        time.sleep(seconds)
        return "well"

    def fail(self) -> str:
        """Does not work."""
        raise ValueError("out of order")

    def get_reward(self):
        return 1.0 / max(1, self.tries) if self.done else 0.0
'''


def write_run(folder: Path, address: str, tokenizer: Path) -> Path:
    """Writes a run whose rows are numbers to guess; returns its file."""
    (folder / "env.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"Guess {i}.", "answer": i % 4} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_dir": "run",
        "steps": 2,
        "tokenizer": str(tokenizer),
        "servers": {"rollout": [address], "trainer": address},
        "data": {"jsonl": "rows.jsonl", "template": "chat"},
        "batch": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "sampling": {"max_tokens": 200},
        "environment": {"class": "env.py:Guess"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def guessing(seed: int, index: int, before: str) -> str:
    """Guesses one number after the other, in an order that the seed decides, then is done."""
    tried = before.count("<tool_call>")
    if "right" in before:
        return "Done."
    number = int(uniform(seed, index, 0, TOKEN) * 4 + tried) % 4
    return "I guess. " + called("guess", number=number)


def train(run_file: Path, *arguments: str, check: int = 0) -> Any:
    """Trains; `check` is the exit code."""
    return tandem("train", run_file, *arguments, check=check)


def resume(run_file: Path, *arguments: str) -> None:
    """Trains the second step from the record of its episodes, if there is one."""
    train(run_file, "steps=2", "--resume", "checkpoint.at_end=false", *arguments)


def crash_in_the_second_step(run_file: Path, *arguments: str) -> Path:
    """Trains two steps, of which only the first one is saved; returns the run's directory."""
    train(run_file, "steps=1", *arguments)
    run = run_file.parent / "run"
    state = (run / "state.json").read_bytes()
    resume(run_file, *arguments)
    (run / "state.json").write_bytes(state)
    return run


def train_in_trouble(
    world: Any, codec: Any, run_file: Path, troubles: Mapping[int, str], *arguments: str
) -> dict[str, Any]:
    """Trains a step of 64 episodes, one for each prompt, of which some have trouble.

    Exactly these have no reward. Returns the step's metrics, with the number of trained samples
    as "trained".

    Args:
        troubles: the trouble in the row of a prompt, by its number.
    """
    folder = run_file.parent
    rows = [{"prompt": str(i), "answer": 1, "trouble": troubles.get(i, "")} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    let_write(world, codec, guessing)
    trained: list[Any] = []
    world.on_samples = trained.extend
    batch = ("batch.prompts_per_step=64", "batch.samples_per_prompt=1")
    train(run_file, "steps=1", *batch, *arguments)
    drawn = records(folder / "run", 1)
    lost = {one["row"]["trouble"] for one in drawn if one["reward"] is None}
    assert lost == set(troubles.values())
    assert all(one["reward"] > 0 for one in drawn if not one["row"]["trouble"])
    [line] = lines(folder / "run" / "metrics.jsonl")
    return line | {"trained": len(trained)}
