"""The demo: its rows, and what it makes of the commands that it runs."""

from __future__ import annotations

import contextlib
import json
import subprocess

import demo
import pytest
import sums


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that the demo runs in a folder of the test, with what they leave there."""
    run: list[list[str]] = []

    def tandem(*arguments):
        words = list(map(str, arguments))
        run.append(words)
        settings = dict(word.split("=", 1) for word in words if "=" in word)
        if words[0] == "export":
            arguments[2].mkdir()
        elif words[0] in ("sft", "train"):
            folder = demo.Path(settings["run_dir"])
            folder.mkdir(exist_ok=True)
            (folder / "evals.jsonl").write_text("".join(evaluations(folder.name)))

    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(demo, "MODEL", tmp_path)
    monkeypatch.setattr(demo, "tandem", tandem)
    return run


def evaluations(arm):
    """The lines of evaluations at two steps, whose numbers tell the arm and the step."""
    for step, value in ((0, 0.5), (12, 0.25 if arm == "solo" else 0.75)):
        for mode in ("solo", "junior_takeover", "legibility"):
            line = {"step": step, "mode": mode, "accuracy": value, "pattern/code": 1 - value}
            line |= {"junior/nats_per_token": 10 * value, "tokens/response": 80 * value}
            yield json.dumps(line | {"prompts": 2, "samples": 4}) + "\n"


def test_the_demo_teaches_trains_and_compares(commands, tmp_path, capsys):
    assert demo.main(["--seed", "3"]) == 0
    assert [one[0] for one in commands] == [*["sft", "export"] * 2, *["train"] * 2, *["view"] * 2]
    assert {word for one in commands for word in one if word.startswith("seed=")} == {"seed=3"}
    assert f"cluster.model={tmp_path}/seed-3/junior" in commands[2]
    assert "tandem.enabled=false" in commands[4]
    assert "tandem.enabled=false" not in commands[5]
    shown = capsys.readouterr().out
    assert (
        "\tbefore\tafter solo GRPO\tafter tandem GRPO\n"
        "the senior's answers are right\t50%\t25%\t75%\n"
        "the answers that the junior finishes are right\t50%\t25%\t75%\n"
        "the senior writes code\t50%\t75%\t25%\n"
        "the junior's nats per token of the answer\t5.00\t2.50\t7.50\n"
        "tokens of an answer\t5.0\t2.5\t7.5\n"
    ) in shown


def test_a_demo_that_was_interrupted_teaches_no_model_twice(commands, tmp_path):
    (tmp_path / "seed-0/junior").mkdir(parents=True)
    assert demo.main([]) == 0
    assert [one[0] for one in commands[:3]] == ["sft", "export", "train"]
    assert demo.main(["--clean", "--json"]) == 0
    assert commands[-8][0] == "sft"


@pytest.mark.parametrize("code", [3, 130])
def test_a_demo_ends_with_the_code_of_its_command(tmp_path, monkeypatch, capsys, code):
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(demo, "MODEL", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **options: Interrupted(code))
    assert demo.main([]) == code
    assert "$ tandem sft " in capsys.readouterr().err


class Interrupted(contextlib.AbstractContextManager):
    """A process during which Ctrl-C is pressed, and which ends by itself."""

    returncode = None

    def __init__(self, code):
        self.code, self.waits = code, 0

    def __exit__(self, *error):
        pass

    def wait(self):
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        self.returncode = self.code


def test_the_rows_of_the_demo_are_sums_in_words_and_in_code(tmp_path):
    sums.main(tmp_path, 0)
    found = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in tmp_path.iterdir()
    }
    by_sum = {name: {one["prompt"] for one in every} for name, every in found.items()}
    assert by_sum["words"] == by_sum["both"] == by_sum["train"] | by_sum["held_out"]
    assert by_sum["train"].isdisjoint(by_sum["held_out"])
    assert {one["prompt"]: one["solution"] for one in found["words"]}["7 + 5:"] == (
        " 7 plus 5 is 12. Answer 12"
    )
    in_code = [one["solution"] for one in found["both"] if one["prompt"] == "7 + 5:"]
    assert in_code == [" 7 plus 5 is 12. Answer 12", " m. Answer 12"]
