"""Environments that are OpenEnv's own servers, in runs whose models are fakes.

clients/python/tests/environments/test_openenv.py has what no proper server does.
"""

from __future__ import annotations

from commands import records
from openenv_servers import answering, calculator_app, echo_app, guess_app, served
from talking import called, let_write
from tandem.environments.openenv import load_openenv
from tandem.settings.environment import OpenEnvSettings


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
