"""Environments that are OpenEnv servers, against a server of the tests that speaks as they do.

tests/peers/test_openenv_servers.py has the servers of OpenEnv itself.
"""

import asyncio
import collections
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fakes
import pytest
import uvicorn
import yaml
from commands import contents, lines, records
from guess_game import crash_in_the_second_step, resume, train
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from talking import called, let_write

from tandem.environments import openenv_session
from tandem.environments.openenv import load_openenv
from tandem.errors import ConfigError, EnvironmentFailedError
from tandem.settings.environment import OpenEnvSettings

GUESS = {
    "description": "A guess.",
    "properties": {
        "number": {"type": "integer"},
        "metadata": {"type": "object"},
    },
    "required": ["number"],
    "type": "object",
}
CALL = {
    "properties": {
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
        "metadata": {"type": "object"},
    }
}
TOOLS = [
    {"name": "reset", "description": "", "input_schema": {"type": "object", "properties": {}}},
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
]


def observation(done=False, reward=None, **fields):
    data = {"observation": fields | {"metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Server:
    """An OpenEnv server.

    Attributes:
        answers: gets a session's number and a message; returns the answer, or raises to end the
            connection.
        most: most sessions at once.
        sessions: those that are open.
        number: those in which something began; `ended` those of them that were closed.
        heard: every message but questions for the state, with the number of its session.
    """

    def __init__(self, action=GUESS):
        self.action = action
        self.answers = guessed
        self.most = 100
        self.sessions = self.ended = self.number = 0
        self.heard = []
        routes = [Route("/schema", self._schema), WebSocketRoute("/ws", self._session)]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    async def _schema(self, request):
        return JSONResponse({"action": self.action, "observation": {}, "state": {}})

    async def _session(self, socket):
        await socket.accept()
        if self.sessions >= self.most:
            most = {"active_sessions": self.sessions, "max_sessions": self.most}
            await socket.send_json(error("CAPACITY_REACHED", "the server is full", **most))
            await socket.close()
            return
        self.sessions += 1
        number = 0
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "state":
                    await socket.send_json({"type": "state", "data": {}})
                    continue
                if not number:
                    self.number = number = self.number + 1
                self.heard.append((number, message))
                answer = await asyncio.to_thread(self.answers, number, message)
                if answer is None:
                    await socket.close()
                    return
                text = answer if isinstance(answer, str) else json.dumps(answer)
                await socket.send_text(text)
        except WebSocketDisconnect:
            pass
        finally:
            self.sessions -= 1
            self.ended += number > 0


def guessed(number, message):
    if message["type"] == "reset":
        return observation(said="Begin.")
    guess = message["data"].get("number")
    if not isinstance(guess, int):
        wrong = [{"loc": ["number"], "msg": "must be a number"}]
        return error("VALIDATION_ERROR", "Invalid message", errors=wrong)
    if guess == 9:
        return error("EXECUTION_ERROR", "there is no 9")
    return observation(done=guess == 3, reward=0.25 * guess, said="right" if guess == 3 else "no")


@pytest.fixture
def server():
    with Server() as server:
        yield server


def load(server, **settings):
    return load_openenv(OpenEnvSettings(url=server.url, retry_seconds=0.0, **settings))


def test_the_fields_of_an_action_are_the_arguments_of_the_tool_step(server):
    found = load(server)
    assert found.tools == {
        "step": {
            "type": "function",
            "function": {
                "name": "step",
                "description": "A guess.",
                "parameters": {
                    "type": "object",
                    "properties": {"number": {"type": "integer"}},
                    "required": ["number"],
                },
            },
        }
    }
    one = found.make()
    assert one.reset(seed=(1 << 40) + 5, answer=3) == "\nBegin."
    step = found.find(one, "step")
    assert (step(number=1), one.done) == ("no", False)
    assert (step(number=3), one.done) == ("right", True)
    assert one.get_reward() == 1.0
    one.close()
    assert [message for _, message in server.heard] == [
        {"type": "reset", "data": {"answer": 3, "seed": 5}},
        {"type": "step", "data": {"number": 1}},
        {"type": "step", "data": {"number": 3}},
    ]


def test_the_tools_of_an_mcp_environment_are_the_models_tools():
    def answers(number, message):
        if message["type"] == "reset":
            return observation()
        if message["data"]["type"] == "list_tools":
            return observation(tools=TOOLS)
        name, given = message["data"]["tool_name"], message["data"]["arguments"]
        if "a" not in given:
            wrong = {"error_type": "invalid_arguments", "message": "a is missing"}
            return observation(tool_name=name, result=None, error=wrong)
        return observation(tool_name=name, result={"content": [], "data": given["a"]}, error=None)

    with Server(CALL) as server:
        server.answers = answers
        found = load(server)
        # A tool may have the name of a method.
        assert set(found.tools) == {"reset", "add"}
        one = found.make()
        assert one.reset(seed=1) is None
        assert found.find(one, "add")(a=5) == "5"
        with pytest.raises(RuntimeError, match="a is missing"):
            found.find(one, "reset")()
        one.close()


@pytest.mark.parametrize(
    ("fields", "settings", "text"),
    [
        ({"said": "no"}, {}, "no"),
        ({}, {}, ""),
        ({"said": "no", "tries": 2}, {}, '{"said": "no", "tries": 2}'),
        ({"tries": 2}, {}, '{"tries": 2}'),
        ({"said": "no", "tries": 2}, {"observation_field": "said"}, "no"),
        ({"said": "no", "tries": 2}, {"observation_field": "tries"}, "2"),
    ],
)
def test_what_the_models_are_told_of_an_observation(server, fields, settings, text):
    server.answers = lambda number, message: observation(**fields)
    found = load(server, **settings)
    one = found.make()
    one.reset(seed=1)
    assert found.find(one, "step")(number=1) == text


@pytest.mark.parametrize(("kind", "reward"), [("sum", 1.5), ("last", 0.5)])
def test_the_reward_is_the_sum_of_the_steps_or_the_last(server, kind, reward):
    rewards = iter([None, 1.0, None, 0.5])
    server.answers = lambda number, message: observation(reward=next(rewards), said="")
    found = load(server, reward=kind)
    one = found.make()
    one.reset(seed=1)
    for _ in range(3):
        found.find(one, "step")(number=1)
    assert one.get_reward() == reward


def test_errors_of_an_action_are_told_and_others_cost_the_episode(server):
    found = load(server)
    one = found.make()
    one.reset(seed=1)
    step = found.find(one, "step")
    for given, message in (
        ({"number": "x"}, "number: must be a number"),
        ({"number": 9}, "there is no 9"),
    ):
        with pytest.raises(openenv_session.ActionError, match=message):
            step(**given)
    assert step(number=1) == "no"
    for answer, message in (
        (error("SESSION_ERROR", "lost"), r"lost \(SESSION_ERROR\)"),
        ("no JSON", "cannot be read: no JSON"),
        ({"type": "state", "data": {}}, "cannot be read"),
        ({"type": "observation", "data": {"observation": {}, "reward": "1"}}, "cannot be read"),
        (None, "the connection has ended"),
    ):
        server.answers = lambda number, message, answer=answer: answer
        with pytest.raises(EnvironmentFailedError, match=message):
            step(number=1)


def test_a_message_that_is_too_large_costs_the_episode(server, monkeypatch):
    monkeypatch.setattr(openenv_session, "MOST_BYTES", 1000)
    found = load(server)
    one = found.make()
    one.reset(seed=1)
    server.answers = lambda number, message: observation(said="x" * 2000)
    with pytest.raises(EnvironmentFailedError, match="the connection has ended"):
        found.find(one, "step")(number=1)


def test_a_session_is_asked_for_again_until_the_server_has_room(server):
    server.most = 1
    found = load_openenv(OpenEnvSettings(url=server.url, retry_seconds=20))
    first, second = found.make(), found.make()
    first.reset(seed=1)
    threading.Timer(0.5, first.close).start()
    assert second.reset(seed=1) == "\nBegin."
    second.close()
    full = load(server)
    first = full.make()
    first.reset(seed=1)
    with pytest.raises(EnvironmentFailedError, match=r"no session at http.*: the server is full"):
        full.make().reset(seed=1)


def test_an_episode_that_ends_at_once_or_whose_reset_fails_has_no_turn(server):
    found = load(server)
    for answer, message in (
        (observation(done=True), "the episode has ended before its first turn"),
        (error("EXECUTION_ERROR", "no such task"), "reset failed: no such task"),
    ):
        server.answers = lambda number, message, answer=answer: answer
        with pytest.raises(EnvironmentFailedError, match=message):
            found.make().reset(seed=1)


def test_what_does_not_fit_is_named(server):
    with pytest.raises(
        ConfigError, match=r"environment\.openenv\.url: .* is not the address of an OpenEnv server"
    ):
        load_openenv(OpenEnvSettings(url="http://127.0.0.1:1"))
    with pytest.raises(
        ConfigError, match=r"environment\.openenv\.text_field: 'move' is not a field"
    ):
        load(server, text_field="move")
    server.action = {"properties": {}}
    server.answers = lambda number, message: observation(tools=[])
    with pytest.raises(ConfigError, match="has no tools, and its actions no fields"):
        load(server)


@pytest.mark.parametrize("silent", ["reset", "step"])
def test_a_server_that_does_not_list_its_tools_is_given_up(monkeypatch, silent):
    monkeypatch.setattr(openenv_session, "ANSWER_SECONDS", 0.5)
    answer = threading.Event()

    def answers(number, message):
        if message["type"] == silent:
            answer.wait(30)
        return observation()

    with Server(CALL) as server:
        server.answers = answers
        try:
            with pytest.raises(ConfigError, match=r"cannot be listed: .*no answer in 0\.5 s"):
                load(server)
        finally:
            answer.set()


@pytest.fixture
def run(run_file, server):
    """A run whose environment is the server."""
    settings = yaml.safe_load(run_file.read_text())
    settings["environment"] = {"openenv": {"url": server.url, "retry_seconds": 0}}
    run_file.write_text(yaml.safe_dump(settings))
    return run_file


def test_a_run_trains_on_episodes_with_a_server(world, codec, run, server, tmp_path):
    texts = [called("step", number=1), called("step"), called("step", number=3)]
    let_write(world, codec, lambda seed, index, before: texts[before.count("<tool_response>")])
    train(run, "steps=1")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/stop_environment"] == 6
    assert line["environment/tool_errors"] == 6
    for one in records(tmp_path / "run", 1):
        assert one["reward"] == 1.0
        assert "Guess" in "".join(codec.token_texts(one["prompt_token_ids"]))
        assert "\nBegin.<|im_end|>" in "".join(codec.token_texts(one["prompt_token_ids"]))
        assert "<tool_response>Error: ActionError: number: must be a number" in one["text"]
    # Every session was ended.
    assert (server.number, server.ended) == (6, 6)
    # All samples of a prompt begin with one seed.
    seeds = [message["data"]["seed"] for _, message in server.heard if message["type"] == "reset"]
    assert sorted(seeds.count(one) for one in set(seeds)) == [2, 2, 2]


@pytest.mark.parametrize("most", [1, 5])
def test_a_server_with_too_few_sessions_is_said_before_the_first_second(
    world, run, server, tmp_path, most
):
    server.most = most
    printed = train(run, check=2).stderr
    assert f"environment.concurrent_episodes: {server.url} has {most} sessions at once" in printed
    assert not (tmp_path / "run").exists()
    assert not world.batches
    assert server.heard == []


def test_a_server_that_is_full_for_a_moment_is_waited_for(world, codec, run, server, tmp_path):
    """Others have all sessions but one; there are enough."""
    server.most = 7
    let_write(world, codec, lambda *asked: called("step", number=3))
    others = [load(server).make() for _ in range(6)]
    for one in others:
        one.reset(seed=1)
    timers = [threading.Timer(1.0, one.close) for one in others]
    for timer in timers:
        timer.start()
    train(run, "steps=1", "environment.openenv.retry_seconds=60")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert (line["environment/failures"], line["environment/stop_environment"]) == (0, 6)


def test_the_text_of_a_turn_may_be_the_action(world, codec, run, server, tmp_path):
    server.action = {"properties": {"message": {"type": "string"}}, "required": ["message"]}

    def answers(number, message):
        if message["type"] == "reset":
            return observation(said="Begin.")
        text = message["data"]["message"]
        return observation(said=f"heard {text}", done=text == "last", reward=1.0)

    server.answers = answers
    texts = ["first ", "last"]
    let_write(world, codec, lambda seed, index, before: texts[before.count("heard")])
    train(run, "steps=1", "environment.openenv.text_field=message")
    for one in records(tmp_path / "run", 1):
        assert one["reward"] == 2.0
        # No tools are shown, and the user says what the environment does.
        assert "<tool_call>" not in "".join(codec.token_texts(one["prompt_token_ids"]))
        assert one["text"] == "first \nuser\nheard first\nassistant\nlast"


def test_sessions_that_break_hang_or_flood_cost_their_own_episodes(
    world, codec, run, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(openenv_session, "MOST_BYTES", 10_000)
    let_write(world, codec, lambda *asked: called("step", number=3))

    def answers(number, message):
        if message["type"] == "reset":
            return observation(said="Begin.")
        if number == 1:
            return None
        if number == 2:
            return observation(said="x" * 20_000)
        return guessed(number, message)

    server.answers = answers
    train(run, "steps=1")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert (line["environment/failures"], line["reward/failed"]) == (2, 2)
    assert line["environment/stop_environment"] == 6
    assert (server.number, server.ended) == (6, 6)


def test_a_call_that_takes_too_long_ends_its_session(world, codec, run, server, tmp_path):
    def answers(number, message):
        if message["type"] == "step" and number == 1:
            time.sleep(1.5)
        return guessed(number, message)

    server.answers = answers
    let_write(world, codec, lambda *asked: called("step", number=3))
    train(run, "steps=1", "environment.timeout_seconds=0.7")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/timeouts"] == line["environment/failures"] == 1
    fakes.wait_until(lambda: server.ended == server.number == 6)


@pytest.fixture
def crashed(world, codec, run, server):
    """A run of two steps on a random server, of which only the first one is saved."""

    def answers(number, message):
        said = os.urandom(8).hex()
        if message["type"] == "reset":
            return observation(said=said)
        return observation(said=said, reward=os.urandom(1)[0] / 256, done=os.urandom(1)[0] < 64)

    server.answers = answers
    let_write(world, codec, lambda *asked: called("step", number=1))
    return crash_in_the_second_step(run)


def said_in(record):
    """Returns the texts that the server said in each episode of a record, one for each call."""
    said = collections.defaultdict(list)
    for one in lines(record):
        if "text" in one:
            said[one["prompt"], one["sample"]].append(one["text"])
    return said


def test_a_resumed_run_gets_the_answers_of_a_random_server_from_the_record(crashed, run, server):
    before, heard = contents(crashed), list(server.heard)
    said = said_in(crashed / "episodes" / "step_2.jsonl")
    resume(run)
    name = "trajectories/step_2.parquet"
    assert contents(crashed)[name] == before[name]
    # No session began.
    assert server.heard == heard
    for index, one in enumerate(records(crashed, 2)):
        answers = said[index // 2, index % 2][1:]
        used = re.findall("<tool_response>(.*?)</tool_response>", one["text"])
        # The text that ended the episode is not part of the response.
        assert used == answers[: len(used)]
        assert len(used) >= len(answers) - 1
        assert one["reward"] is not None
    assert len({text for texts in said.values() for text in texts}) == sum(map(len, said.values()))


def test_an_episode_that_a_crash_cut_off_begins_a_new_session(crashed, run, server):
    record = crashed / "episodes" / "step_2.jsonl"
    # The end of one episode is lost, and the last text of the server.
    cut = [one for one in lines(record) if (one["prompt"], one["sample"]) == (1, 0)][:-2]
    others = [one for one in lines(record) if (one["prompt"], one["sample"]) != (1, 0)]
    record.write_text("".join(json.dumps(one) + "\n" for one in [*others, *cut]))
    before, heard = records(crashed, 2), len(server.heard)
    resume(run)
    again = records(crashed, 2)
    same = [one == two for one, two in zip(before, again, strict=True)]
    assert same == [index != 2 for index in range(6)]
    begun = [message["type"] for _, message in server.heard[heard:]]
    assert begun[0] == "reset"
    assert begun.count("reset") == 1


def test_sessions_that_begin_at_once_share_one_thread(server, monkeypatch):
    monkeypatch.setattr(openenv_session, "_shared_loop", openenv_session._SharedLoop())
    found = load(server)
    monkeypatch.setattr(openenv_session, "_shared_loop", openenv_session._SharedLoop())
    begin = threading.Barrier(16)

    def play(_):
        one = found.make()
        begin.wait()
        said = one.reset(seed=1)
        told = found.find(one, "step")(number=3)
        one.close()
        return said, told

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(play, range(16))) == {("\nBegin.", "right")}


def test_what_goes_wrong_in_a_connection_is_not_told_to_the_model(server, monkeypatch):
    found = load(server)
    one = found.make()
    one.reset(seed=1)
    monkeypatch.setattr(openenv_session, "_observed", lambda text: 1 // 0)
    with pytest.raises(EnvironmentFailedError, match="ZeroDivisionError"):
        found.find(one, "step")(number=3)
