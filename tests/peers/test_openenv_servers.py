"""Environments that are OpenEnv's own servers, in runs whose models are fakes.

clients/python/tests/environments/test_openenv.py has what no proper server does.
"""

from __future__ import annotations

import json

import fakes
import guess_game
import pytest
import yaml
from commands import lines, records, tandem
from openenv_servers import calculator_app, echo_app, guess_app, served
from talking import called, chat_codec, let_write
from tandem.environments.openenv import load_openenv
from tandem.settings.environment import OpenEnvSettings


@pytest.fixture
def world():
    """The fake servers' state."""
    return fakes.FakeWorld()


@pytest.fixture
def codec(tmp_path):
    """A tokenizer that writes conversations."""
    return chat_codec(tmp_path / "talker")


@pytest.fixture
def run_on(world, codec, tmp_path, monkeypatch):
    """Trains one step on the environment at a URL; returns the line of its metrics."""
    monkeypatch.setattr(fakes, "VOCABULARY", codec.vocabulary_size)
    world.max_model_len = world.junior_max_model_len = 2048
    with fakes.serve(world, str(tmp_path / "model")) as address:
        run_file = guess_game.write_run(tmp_path, address, codec.directory)

        def run_on(url, *overrides, command="train", **settings):
            config = yaml.safe_load(run_file.read_text())
            config["environment"] = {"openenv": {"url": url, **settings}}
            run_file.write_text(yaml.safe_dump(config))
            printed = tandem(command, run_file, "steps=1", *overrides)
            if command == "train":
                return lines(tmp_path / "run" / "metrics.jsonl")[0]
            return json.loads(printed.stdout.splitlines()[-1])

        yield run_on


def answering(texts):
    """The models say one text after the other."""
    return lambda seed, index, before: texts[min(before.count("<|im_start|>user"), len(texts) - 1)]


def test_a_typed_environment_is_a_tool(world, codec, run_on, tmp_path):
    guesses = [called("step", number=9), called("step", number="x"), called("step")]
    guesses += [called("step", number=number) for number in range(4)]
    let_write(world, codec, answering(guesses))
    with served(guess_app()) as url:
        line = run_on(url)
    assert line["environment/stop_environment"] == 6
    assert line["environment/tool_errors"] == 18
    assert (line["environment/failures"], line["reward/max"]) == (0, 1.0)
    for one in records(tmp_path / "run", 1):
        answer = one["row"]["answer"]
        assert one["text"].count("higher") == answer
        assert "Error: ActionError: there is no 9" in one["text"]
        assert "Error: ActionError: number: Input should be a valid integer" in one["text"]
        assert "Error: ActionError: number: Field required" in one["text"]
        assert one["reward"] == 1.0
        prompt = "".join(codec.token_texts(one["prompt_token_ids"]))
        assert "\nSeed " in prompt


def test_the_tools_of_mcp_are_tools(world, codec, run_on, tmp_path):
    calls = [called("add", a=2, b=3), called("fail"), called("add", a="x"), "Done."]
    let_write(world, codec, answering(calls))
    with served(calculator_app()) as url:
        line = run_on(url)
    assert line["environment/stop_finished"] == 6
    assert line["environment/tool_errors"] == 12
    for one in records(tmp_path / "run", 1):
        assert "<tool_response>5</tool_response>" in one["text"]
        assert "out of order" in one["text"]
        assert "add" in "".join(codec.token_texts(one["prompt_token_ids"]))


def test_text_is_the_action(world, codec, run_on, tmp_path):
    let_write(world, codec, answering(["hello", "bye"]))
    with served(echo_app()) as url:
        line = run_on(url, text_field="message", observation_field="echoed")
    assert line["environment/stop_environment"] == 6
    for one in records(tmp_path / "run", 1):
        assert one["text"] == "hello\nuser\nhello\nassistant\nbye"
        assert one["reward"] == len("hello") + len("bye")


def test_a_server_of_one_session_serves_one_episode_after_the_other(world, codec, run_on):
    let_write(world, codec, answering([called("step", number=number) for number in range(4)]))
    with served(guess_app(sessions=1)) as url:
        line = run_on(url, "environment.concurrent_episodes=1")
        assert (line["environment/failures"], line["environment/stop_environment"]) == (0, 6)


def test_evaluations_draw_episodes_with_a_server(world, codec, run_on):
    let_write(world, codec, answering([called("step", number=number) for number in range(4)]))
    with served(guess_app()) as url:
        said = run_on(url, "--json", "eval.modes=[solo, junior_solo]", command="eval")
    assert [one["accuracy"] for one in said["evaluations"].values()] == [1.0, 1.0]


def test_metadata_is_neither_an_argument_nor_told():
    with served(guess_app()) as url:
        found = load_openenv(OpenEnvSettings(url=url))
        [step] = found.tools.values()
        assert set(step["function"]["parameters"]["properties"]) == {"number"}
        one = found.make()
        assert one.reset(seed=3, answer=1) == "\nSeed 3."
        one.close()
