"""A run whose environment is random is killed again and again; what was said once stays said.

At each kill the episodes that had ended are noted: the finished run has every one of them, word for
word. And the finished run is, bit for bit, an uninterrupted one in which the environment says the
same.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import harness
import kills
import psutil
import pytest
from commands import tandem
from tandem.run_directory import episodes

GUESS = harness.REPOSITORY / "examples" / "guess_number"
# Steps of teaching: after so many the model calls tools, though not well.
TAUGHT = 150
# Nothing that it says or gives follows from a seed.
RANDOM = """
import secrets

import guess


class Random(guess.Guess):
    def reset(self, answer, **row):
        super().reset(answer)
        return " " + secrets.choice(["low", "middle", "high"])

    def guess(self, number: int) -> str:
        \"\"\"Guesses the number.

        Args:
            number: the guess.
        \"\"\"
        super().guess(number)
        self.done = secrets.randbelow(4) == 0
        return secrets.choice(["higher", "lower"])

    def get_reward(self) -> float:
        return secrets.randbelow(100) / 100
"""


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example: its rows, and a model that calls no tools."""
    folder = tmp_path_factory.mktemp("guess_number")
    runpy.run_path(str(GUESS / "make.py"))["main"](folder)
    return folder


@pytest.fixture(scope="module")
def taught(blank: Path) -> Path:
    """The folder, with a model that was taught a little."""
    tandem(
        "sft",
        GUESS / "teach.yaml",
        f"run_dir={blank}/teach",
        f"data.jsonl={blank}/games.jsonl",
        f"cluster.model={blank}/blank",
        f"cluster.directory={blank}/cluster",
        f"steps={TAUGHT}",
    )
    tandem("export", blank / "teach", blank / "taught")
    return blank


def arguments(
    model: Path, folder: Path, name: str, steps: int, executor: str = "thread"
) -> list[str]:
    """The command line of a run, without the command."""
    (folder / "random_guess.py").write_text(RANDOM)
    given = {
        "run_dir": folder / name,
        "steps": steps,
        "data.jsonl": model.parent / "train.jsonl",
        "cluster.model": model,
        "cluster.directory": folder / "cluster",
        "environment.class": folder / "random_guess.py:Random",
        "environment.python_path": GUESS,
        "environment.executor": executor,
        "environment.max_turns": 4,
        "batch.prompts_per_step": 4,
        "batch.samples_per_prompt": 4,
        "checkpoint.every": 1,
        "trajectories.every": 1,
    }
    return [str(GUESS / "run.yaml"), *(f"{key}={value}" for key, value in given.items())]


def lines_of(file: Path) -> list[str]:
    """The whole lines of a file; none if it is not there."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def ended(run: Path) -> set[tuple[str, ...]]:
    """The lines of each episode that has ended, with the step's file."""
    found = set()
    for file in (run / "episodes").glob("step_*.jsonl"):
        kept: dict[tuple[int, int], list[str]] = {}
        for text in lines_of(file):
            line = json.loads(text)
            kept.setdefault((line["prompt"], line["sample"]), []).append(text)
        found |= {(file.name, *one) for one in kept.values() if '"end"' in one[-1]}
    return found


class Killed:
    """A run that is started, and killed, until it is done."""

    def __init__(
        self, model: Path, folder: Path, steps: int, random: Random, executor: str
    ) -> None:
        self.path = folder / "killed"
        self.seen: set[tuple[str, ...]] = set()
        self.cut_off = 0
        self._command = [
            *kills.TRAIN,
            *arguments(model, folder, "killed", steps, executor),
            "--resume",
            "auto",
        ]
        self._log = folder / "killed.log"
        self._random = random

    def kill(self, *, drawing: bool) -> None:
        """Starts the run and kills it: while it draws episodes, or once a step was trained."""
        run = self.path
        with self._started() as client:
            began, steps = len(ended(run)), len(lines_of(run / "metrics.jsonl"))
            new = self._random.randint(1, 8)
            deadline = time.monotonic() + kills.ATTEMPT_SECONDS
            while client.poll() is None:
                if drawing and len(ended(run)) >= began + new:
                    break
                if not drawing and len(lines_of(run / "metrics.jsonl")) > steps:
                    time.sleep(self._random.uniform(0.0, 0.1))
                    break
                assert time.monotonic() < deadline, self._tail()
                time.sleep(0.005)
            assert client.poll() is None, f"the run ended before it was killed\n{self._tail()}"
            started = psutil.Process(client.pid).children(recursive=True)
            client.kill()
            client.wait()
            # Its servers end with it, and the processes of its environments.
            assert not psutil.wait_procs(started, timeout=30)[1]
        self.cut_off += sum('"reset"' in text for text in self._texts()) - len(ended(run))
        # Before its first checkpoint a run begins anew, and its record with it.
        if (run / "state.json").exists():
            self.seen |= ended(run)

    def finish(self) -> None:
        """Lets the run end."""
        with self._started() as client:
            client.wait(kills.ATTEMPT_SECONDS)
        assert client.returncode == 0, self._tail()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def _texts(self) -> Iterator[str]:
        for file in (self.path / "episodes").glob("step_*.jsonl"):
            yield from lines_of(file)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def kill_and_compare(model, folder, monkeypatch, *, points, steps, executor="thread"):
    killed = Killed(model, folder, steps, Random(points), executor)
    for point in range(points):
        killed.kill(drawing=point % 2 == 1)
    killed.finish()
    # Episodes were lost, and others had ended before a kill.
    assert killed.cut_off > 0
    assert killed.seen
    assert killed.seen <= ended(killed.path)

    # An uninterrupted run, in which the record says what the environment said.
    read = episodes._whole_episodes
    said = killed.path / episodes.FOLDER
    monkeypatch.setattr(episodes, "_whole_episodes", lambda path: read(said / path.name))
    tandem("train", *arguments(model, folder, "whole", steps))
    assert ended(folder / "whole") == ended(killed.path)
    assert kills.fingerprint(folder / "whole") == kills.fingerprint(killed.path)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_run_that_is_killed_twice_ends_as_an_uninterrupted_one(
    blank, tmp_path, monkeypatch, executor
):
    kill_and_compare(blank / "blank", tmp_path, monkeypatch, points=2, steps=3, executor=executor)


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_as_an_uninterrupted_one(taught, tmp_path, monkeypatch):
    kill_and_compare(taught / "taught", tmp_path, monkeypatch, points=10, steps=9)


def test_the_environment_of_these_tests_is_random(blank, tmp_path):
    """Without a record two runs differ, so the tests above can fail."""
    names = ("first", "second")
    for name in names:
        tandem("train", *arguments(blank / "blank", tmp_path, name, 1))
    first, second = (kills.fingerprint(tmp_path / name) for name in names)
    assert first["trajectories/step_1.parquet"] != second["trajectories/step_1.parquet"]
