"""Rewards: builtins and the user's own functions."""

import math
import sys

import pytest

from tandem.data import Example
from tandem.errors import ConfigError
from tandem.rewards import answer_extractor, load_reward
from tandem.settings import RewardSettings

EXAMPLE = Example({"prompt": "w1", "answer": " w2", "bonus": 0.25}, "w1", [1])


def written(tmp_path, text):
    file = tmp_path / "judge.py"
    file.write_text(text)
    return RewardSettings(function=f"{file}:reward")


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, " x \n", "x"),
        (r"-?\d+", "3 + 4 = 7.", "7"),
        (r"answer: (\w+)", "answer: a; answer: b", "b"),
        (r"\d", "none", ""),
    ],
)
def test_the_last_match_is_the_answer(pattern, text, answer):
    assert answer_extractor(pattern)(text) == answer


def test_exact_match_compares_with_the_rows_answer():
    judge = load_reward(RewardSettings())
    assert (judge(EXAMPLE, "w2 "), judge(EXAMPLE, "w3")) == (1.0, 0.0)
    with pytest.raises(ConfigError, match="needs an `answer`"):
        judge(Example({"prompt": "w1"}, "w1", [1]), "w2")


def test_rewards_are_python_functions_from_a_file(tmp_path):
    text = "def reward(prompt, response, answer, **row):\n    return row['bonus']\n"
    assert load_reward(written(tmp_path, text))(EXAMPLE, "x") == 0.25


def test_a_file_may_define_dataclasses_and_hides_no_module(tmp_path):
    settings = written(
        tmp_path,
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(prompt, response, **row):\n    return Score(0.5).value\n",
    )
    assert load_reward(settings)(EXAMPLE, "x") == 0.5
    assert "judge" not in sys.modules


@pytest.mark.parametrize(
    "name", ["nothing", "no.such.module:f", ":f", "no/such/file.py:f", "math:no_such", "math:pi"]
)
def test_a_function_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=r"^reward\.function: "):
        load_reward(RewardSettings(function=name))


@pytest.mark.parametrize(
    ("text", "message"),
    [("def reward(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("import nope", "nope")],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, text, message):
    settings, before = written(tmp_path, text), set(sys.modules)
    with pytest.raises(ConfigError, match=rf"^reward\.function: .*judge\.py:reward: .*{message}"):
        load_reward(settings)
    assert set(sys.modules) == before


@pytest.mark.parametrize("value", [None, "much", math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(tmp_path, value):
    settings = written(tmp_path, f"def reward(*a, **row):\n    return float({str(value)!r})\n")
    if not isinstance(value, float):
        settings = written(tmp_path, f"def reward(*a, **row):\n    return {value!r}\n")
    with pytest.raises(ConfigError, match="not a finite number"):
        load_reward(settings)(EXAMPLE, "x")
