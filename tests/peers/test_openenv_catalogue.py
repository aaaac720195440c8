"""Servers of OpenEnv's catalogue as environments of runs, as its repository has them.

OPENENV_CHECKOUT names a checkout of https://github.com/huggingface/OpenEnv (`make test-catalogue`).
"""

from __future__ import annotations

import importlib.util
import re

import fakes
import pytest
from commands import records
from openenv_catalogue import CHECKOUT, served
from openenv_servers import answering
from talking import called, let_write

pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="OPENENV_CHECKOUT names no checkout of OpenEnv's repository"
)


def prompt_of(one, codec):
    """The text of a prompt."""
    return "".join(codec.token_texts(one["prompt_token_ids"]))


def test_tools_of_mcp(world, codec, run_on, tmp_path):
    calls = [called("echo_message", message="hi"), called("echo_with_length", message="hello")]
    let_write(world, codec, answering([*calls, called("echo_message"), called("no"), "Done."]))
    with served("echo_env", tmp_path) as url:
        line = run_on(url, "steps=2")
    assert (line["step"], line["environment/stop_finished"]) == (2, 6)
    assert line["environment/failures"] == 0
    assert line["environment/tool_errors"] == 12
    for one in records(tmp_path / "run", 1):
        assert "echo_with_length" in prompt_of(one, codec)
        assert "<tool_response>hi</tool_response>" in one["text"]
        assert '{"message": "hello", "length": 5}' in one["text"]
        assert "Missing required argument" in one["text"]


def test_a_typed_action_with_a_reward_an_end_and_one_session(world, codec, run_on, tmp_path):
    moves = [called("step", action=to) for to in ["NORTH"] + 4 * ["DOWN"] + 4 * ["RIGHT"]]
    let_write(world, codec, answering(moves))
    with served("grid_world_env", tmp_path) as url:
        said = run_on(url, "environment.max_turns=12", check=2)
        assert f"environment.concurrent_episodes: {url} has 1 sessions at once" in said
        line = run_on(
            url, "environment.max_turns=12", "environment.concurrent_episodes=1", "steps=2"
        )
    assert (line["step"], line["environment/stop_environment"]) == (2, 6)
    assert (line["environment/failures"], line["environment/tool_errors"]) == (0, 6)
    # Seven steps cost 0.1 each, and the last one gives 1.
    assert (line["reward/min"], line["reward/max"]) == (pytest.approx(0.3), pytest.approx(0.3))
    for one in records(tmp_path / "run", 1):
        assert "Goal is at [4, 4]" in prompt_of(one, codec)
        assert "Input should be 'UP', 'DOWN', 'LEFT' or 'RIGHT'" in one["text"]


def test_a_game_of_two(roomy, world, codec, run_on, tmp_path):
    let_write(world, codec, answering([called("step", column=n) for n in (0, 1, 0, 1, 0, 1, 0)]))
    with served("connect4_env", tmp_path) as url:
        line = run_on(url, "steps=2", "environment.concurrent_episodes=1")
    assert (line["environment/stop_environment"], line["environment/failures"]) == (6, 0)
    assert (line["reward/min"], line["reward/max"]) == (1, 1)


def test_text_is_the_action_and_reset_has_columns_of_the_row(world, codec, run_on, tmp_path):
    if not importlib.util.find_spec("reasoning_gym"):
        pytest.skip("reasoning_gym is not installed")
    for file in tmp_path.glob("rows.jsonl"):
        row = '{"prompt": "Solve.", "dataset_name": "chain_sum", "size": 5}\n'
        file.write_text(row * 12)

    def sample(prompt, index, version):
        asked = codec.decode(list(prompt.prompt_token_ids))
        [task] = re.findall(r"problem: ([\d\s+-]+) =", asked)
        # A sum is computed; half of the samples are wrong.
        text = str(sum(int(one) for one in re.findall(r"[+-]?\d+", task.replace(" ", ""))) + index)
        ids = codec.encode(f"{text}<|im_end|>", special=False)
        turn = fakes.written(prompt, index, version, ids)
        turn.finish_reason = 1
        return turn

    world.sample = sample
    with served("reasoning_gym_env", tmp_path) as url:
        line = run_on(
            url,
            "steps=2",
            "environment.concurrent_episodes=1",
            text_field="answer",
            observation_field="question",
        )
    assert (line["environment/stop_environment"], line["environment/failures"]) == (6, 0)
    assert [one["reward"] == 1 for one in records(tmp_path / "run", 1)] == 3 * [True, False]


def test_a_game_of_open_spiel(roomy, world, codec, run_on, tmp_path):
    if not importlib.util.find_spec("pyspiel"):
        pytest.skip("open_spiel is not installed")
    let_write(world, codec, lambda seed, index, before: called("step", action_id=1))
    with served("openspiel_env", tmp_path) as url:
        line = run_on(url, "steps=2", "environment.max_turns=20", "sampling.max_tokens=100")
    assert (line["environment/stop_environment"], line["environment/failures"]) == (6, 0)
    assert {one["reward"] for one in records(tmp_path / "run", 1)} <= {1.0, -1.0}
