"""Sessions of the OpenAI server: joined calls, branches, bounds, rewards, and fetching."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import fakes
import httpx2
import pytest
import talking
import uvicorn
from starlette.testclient import TestClient

from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import RewardError, SessionsError
from tandem.openai_server import limits
from tandem.openai_server.app import Settings, application
from tandem.openai_server.conversation import Conversation
from tandem.openai_server.errors import RequestError
from tandem.openai_server.fields import ChatMessage
from tandem.openai_server.sessions import Sessions
from tandem.rpc.author_schedule import authorship_mask
from tandem.rpc.credentials import watched_tokens
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import tandem_record
from tandem.sessions import SessionsClient, policy_samples

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = [{"role": "system", "content": "sums"}, {"role": "user", "content": "add"}]


def write(seed, index, before):
    """A call of a tool, then the answer to it."""
    return talking.called("add", a=1) if "tool_response" not in before else "it is 2"


@pytest.fixture
def codec(tmp_path):
    return talking.chat_codec(tmp_path / "model")


@pytest.fixture
def prompts(world, codec):
    """The prompts that the rollout server got."""
    seen = []
    world.max_model_len = 1000
    world.on_prompt = seen.append
    talking.let_write(world, codec, write)
    return seen


@pytest.fixture
def http(address, codec, prompts):
    with TestClient(application(Settings(address, codec, "senior"))) as client:
        yield client


def chat(http, messages=ASK, session="s", **fields):
    body = {"model": "senior", "messages": messages, "tools": [TOOL], "max_tokens": 200}
    headers = {"x-session-id": session}
    return http.post("/v1/chat/completions", json=body | fields, headers=headers)


def message_of(response):
    return response.json()["choices"][0]["message"]


def tool_answer(message, text="2"):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def episode(http, session="s", **fields):
    """An agent's episode of two calls; returns its messages."""
    first = message_of(chat(http, session=session, **fields))
    messages = [*ASK, first, tool_answer(first)]
    return [*messages, message_of(chat(http, messages, session, **fields))]


def state(http, session="s"):
    return http.get(f"/v1/sessions/{session}").json()


def reward(http, value, session="s", **fields):
    return http.post(f"/v1/sessions/{session}/reward", json={"reward": value, **fields})


def fetched(http, **query):
    return http.get("/v1/trajectories", params=query).json()["sessions"]


def trajectories_of(session):
    return [
        trajectory_pb2.Trajectory.FromString(base64.b64decode(one["trajectory"]))
        for one in session["trajectories"]
    ]


def with_another_id(message):
    return message | {"tool_calls": [message["tool_calls"][0] | {"id": "other"}]}


def records(messages):
    """Messages as the chat template reads them."""
    return [ChatMessage.model_validate(one).record() for one in messages]


def joined(http, session="s"):
    """Ends a session, and returns its trajectories."""
    assert reward(http, 1.0, session).is_success
    [found] = [one for one in fetched(http) if one["id"] == session]
    return trajectories_of(found)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_continue_each_other_are_one_trajectory(http, prompts, codec, stream):
    tandem = {"selection_strategy": "word", "prob_senior": 0.5}
    if stream:
        first = message_of(chat(http, session="other", seed=3, tandem=tandem))
        prompts.clear()
        chat(http, seed=3, tandem=tandem, stream=True)
        messages = [*ASK, first, tool_answer(first)]
        chat(http, messages, seed=3, tandem=tandem, stream=True)
    else:
        episode(http, seed=3, tandem=tandem)
    one, two = prompts
    wrote = codec.encode(talking.called("add", a=1) + "<|im_end|>", special=False)
    said = codec.encode(
        "\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n",
        special=False,
    )
    assert list(one.prompt_token_ids) == codec.chat(ASK, {"tools": [TOOL]})
    assert not one.response.token_ids
    assert list(two.prompt_token_ids) == list(one.prompt_token_ids)
    assert list(two.response.token_ids) == [*wrote, *said]
    assert [*two.response.authorship_mask[-len(said) :]] == [2] * len(said)
    assert one.seed == two.seed == prompt_seed(3, 0, 0, "generate")
    assert one.first_sample_index == two.first_sample_index == 0
    assert one.return_other_logprobs
    begun = state(http)
    assert begun["begun"] == {"first": 1}
    assert begun["trajectories"][0]["turns"] == 2
    [whole] = joined(http)
    tokens = [*wrote, *said, *codec.encode("it is 2<|im_end|>", special=False)]
    assert list(whole.response_token_ids) == tokens
    assert begun["trajectories"][0]["response_tokens"] == len(tokens)
    assert begun["trajectories"][0]["written_tokens"] == len(tokens) - len(said)
    environment = range(len(wrote), len(wrote) + len(said))
    assert list(whole.authorship_mask) == authorship_mask(
        tokens, tandem_record(whole.tandem), whole.seed, 0, environment=environment
    )
    assert whole.response_offset == 0


def test_what_a_client_makes_of_an_answer_is_recognised(http, codec):
    first = message_of(chat(http))
    [call] = first["tool_calls"]
    function = {"name": "add", "arguments": '{ "a" :1}'}
    sent_back = {"role": "assistant", "tool_calls": [{"id": call["id"], "function": function}]}
    response = chat(http, [*ASK, sent_back, tool_answer(first)])
    assert response.headers["x-session-trajectory"] == "0"
    assert response.headers["x-session-turn"] == "2"


def test_the_text_of_the_model_is_not_encoded_again(http, world, codec, prompts):
    """The ids of a byte tokenizer say nothing of it: the model writes one that no text gives."""
    wrote = [*codec.encode("a", special=False), codec.special_token_id("<|end|>")]
    wrote += codec.encode("b<|im_end|>", special=False)
    world.sample = lambda prompt, index, version: fakes.written(prompt, index, version, wrote)
    first = message_of(chat(http))
    assert first["content"] == "ab"
    chat(http, [*ASK, first, {"role": "user", "content": "and"}])
    assert list(prompts[1].response.token_ids)[: len(wrote)] == wrote


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda messages: messages[1:], "messages"),
        (lambda messages: [*messages[:2], *messages[3:]], "messages"),
        (
            lambda messages: [ASK[0], {"role": "user", "content": "other"}, *messages[2:]],
            "messages",
        ),
        (lambda messages: [*messages, {"role": "assistant", "content": "mine"}], "messages"),
        (lambda messages: ASK, "messages"),
        (lambda messages: [*messages[:2], with_another_id(messages[2]), messages[3]], "messages"),
    ],
)
def test_calls_that_do_not_continue_begin_another_trajectory(
    http, prompts, codec, caplog, change, reason
):
    first = message_of(chat(http))
    messages = change([*ASK, first, tool_answer(first)])
    response = chat(http, messages)
    assert response.headers["x-session-trajectory"] == "1"
    assert response.headers["x-session-turn"] == "1"
    assert list(prompts[1].prompt_token_ids) == codec.chat(records(messages), {"tools": [TOOL]})
    assert not prompts[1].response.token_ids
    assert prompts[1].first_sample_index == 1
    assert state(http)["begun"] == {"first": 1, reason: 1}
    says = "session s: trajectory 1 begins: messages"
    assert [one for one in caplog.messages if "trajectory" in one] == [says]
    # The first one still runs.
    assert chat(http, [*ASK, first, tool_answer(first)]).headers["x-session-trajectory"] == "0"


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.5}, {"seed": 4}, {"tools": []}, {"tandem": {"prob_senior": 0.1}}],
)
def test_other_settings_begin_another_trajectory(http, fields):
    first = message_of(chat(http, seed=3))
    response = chat(http, [*ASK, first, tool_answer(first)], **{"seed": 3} | fields)
    assert response.headers["x-session-trajectory"] == "1"
    assert state(http)["begun"] == {"first": 1, "settings": 1}


def test_a_template_that_rewrites_turns_begins_another_trajectory(address, world, tmp_path, caplog):
    """As Qwen3's does, which drops the thoughts of turns before the last user's message."""
    template = talking.TEMPLATE.replace(
        "{{ m.content }}{% for c",
        "{% if not loop.last and messages[-1].role == 'user' and m.role == 'assistant' %}"
        "old{% endif %}{{ m.content }}{% for c",
    )
    assert template != talking.TEMPLATE
    codec = talking.chat_codec(tmp_path / "rewrites", template)
    world.max_model_len = 1000
    talking.let_write(world, codec, write)
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        messages = episode(http)
        assert state(http)["begun"] == {"first": 1}
        answer = chat(http, [*messages, {"role": "user", "content": "and?"}])
        assert answer.headers["x-session-trajectory"] == "1"
        assert state(http)["begun"] == {"first": 1, "template": 1}
        # A conversation without tools cannot go on at all.
        first = message_of(chat(http, session="t", tools=None))
        chat(http, [*ASK, first, {"role": "user", "content": "and?"}], "t", tools=None)
        assert state(http, "t")["begun"] == {"first": 1, "template": 1}
    assert "rendered otherwise" in caplog.text


def test_an_end_without_the_templates_token_is_followed_by_it(http, prompts, codec):
    first = message_of(chat(http, max_tokens=5))
    chat(http, [*ASK, first, {"role": "user", "content": "go on"}], max_tokens=50)
    end = codec.special_token_id("<|im_end|>")
    assert [*prompts[1].response.token_ids][5] == end
    assert [*prompts[1].response.authorship_mask][4:7] == [1, 2, 2]
    assert end in prompts[0].sampling.stop_token_ids


def test_stop_texts_are_the_rollout_servers(http, prompts):
    assert chat(http, stop=["is", "<|end|>"]).is_success
    assert list(prompts[0].sampling.stop) == ["is"]
    error = chat(http, stop=[f"s{i}" for i in range(17)]).json()["error"]
    assert "at most 16" in error["message"]


def test_a_stop_text_does_not_cut_the_trajectory(http, world, codec):
    """The choice shows no more than its text; the trajectory has what the model wrote."""
    talking.let_write(world, codec, lambda *_: "so it is 2")
    response = chat(http, stop="is", tools=None)
    assert message_of(response)["content"] == "so it "
    [whole] = joined(http)
    assert codec.decode(whole.response_token_ids) == "so it is 2"


@pytest.mark.parametrize(("back", "turn"), [("so it ", "2"), ("so it is", "2"), ("so it i", "1")])
def test_an_agent_may_put_the_stop_text_back(http, world, codec, back, turn):
    """As CodeAgent of smolagents does."""
    talking.let_write(world, codec, lambda *_: "so it is")
    assert message_of(chat(http, stop="is", tools=None))["content"] == "so it "
    message = {"role": "assistant", "content": back}
    messages = [*ASK, message, {"role": "user", "content": "and?"}]
    assert chat(http, messages, stop="is", tools=None).headers["x-session-turn"] == turn


def test_a_call_that_fails_leaves_no_trace(http, world, prompts):
    first = message_of(chat(http))
    messages = [*ASK, first, tool_answer(first)]
    before = state(http)
    world.failures = [fakes.error_status(13, "broken")]
    world.failures *= 2
    assert chat(http, messages).status_code == 500
    world.failures = []
    assert state(http) == before
    assert chat(http, messages).headers["x-session-turn"] == "2"
    assert chat(http, session="new", temperature=-1, top_k=None, n=2).status_code == 400
    assert http.get("/v1/sessions/new").status_code == 404


def test_a_turn_whose_scores_fail_is_not_the_sessions(http, world, codec):
    first = message_of(chat(http))
    messages = [*ASK, first, tool_answer(first)]
    before = state(http)
    calls = len(world.calls)

    def fail():
        # The first batch is the call's own, then come its scores.
        if world.batches:
            world.failures = [fakes.error_status(9, "no scores")] * 3

    world.batches.clear()
    world.on_batch = fail
    assert chat(http, messages, logprobs=True).status_code == 400
    assert len(world.calls) > calls
    world.on_batch = lambda: None
    world.failures = []
    assert state(http) == before
    assert chat(http, messages, logprobs=True).headers["x-session-turn"] == "2"


def test_the_server_counts_its_sessions(http):
    for name in "ab":
        episode(http, name)
    chat(http, session="b")
    reward(http, 1.0, "a")
    totals = http.get("/v1/sessions").json()
    assert totals.pop("bytes") > 0
    assert totals == {
        "open": 1,
        "finished": 1,
        "dropped_for_idleness": 0,
        "begun": {"first": 2, "messages": 1, "settings": 0, "concurrent": 0, "template": 0},
    }


def test_no_room_is_said(http, world):
    first = message_of(chat(http))
    long = tool_answer(first, "x" * 900)
    error = chat(http, [*ASK, first, long]).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert chat(http, [*ASK, first, tool_answer(first)]).headers["x-session-turn"] == "2"


def test_a_session_is_named_by_header_or_field(http):
    body = {"model": "senior", "messages": ASK, "max_tokens": 5}
    path = "/v1/chat/completions"
    assert http.post(path, json=body | {"session_id": "f"}).is_success
    assert state(http, "f")["trajectories"][0]["turns"] == 1
    assert "x-session-turn" not in http.post(path, json=body).headers
    both = http.post(path, json=body | {"session_id": "f"}, headers={"x-session-id": "g"})
    assert both.json()["error"]["param"] == "session_id"
    for bad in ("a b", "a/b", "..", "x" * 129):
        header = http.post(path, json=body, headers={"x-session-id": bad})
        assert header.json()["error"]["param"] == "x-session-id"
        field = http.post(path, json=body | {"session_id": bad})
        assert field.json()["error"]["param"] == "session_id"
    plain = {"model": "senior", "prompt": "a"}
    refused = http.post("/v1/completions", json=plain, headers={"x-session-id": "h"})
    assert refused.json()["error"]["param"] == "x-session-id"
    assert http.post("/v1/completions", json=plain | {"session_id": "h"}).status_code == 400


def test_what_a_session_cannot_have_is_refused(http, prompts):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for fields, param in [
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages"),
    ]:
        error = chat(http, **fields).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert not prompts


# Rewards, and sessions for training.


def test_a_reward_ends_a_session_and_a_repeat_changes_nothing(http, world):
    episode(http)
    chat(http, [{"role": "user", "content": "a branch"}])
    wrong = reward(http, 1.0, trajectory_rewards=[1.0])
    assert wrong.json()["error"]["param"] == "trajectory_rewards"
    for _ in range(2):
        ended = reward(http, 0.5, group_id="task", trajectory_rewards=[1, 0.25]).json()
        assert (ended["state"], ended["reward"], ended["group_id"]) == ("finished", 0.5, "task")
    assert reward(http, 0.6).status_code == 409
    late = chat(http)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "session_ended")
    assert http.delete("/v1/sessions/s").status_code == 409
    [session] = fetched(http)
    assert [one["reward"] for one in session["trajectories"]] == [1, 0.25]
    assert session["group_id"] == "task"


def test_a_session_may_end_without_a_reward(http):
    episode(http, "a")
    wrong = http.post("/v1/sessions/a/finish", json={"reward": 1.0})
    assert wrong.json()["error"]["param"] == "reward"
    for _ in range(2):
        ended = http.post("/v1/sessions/a/finish", json={"group_id": "task"}).json()
        assert (ended["state"], ended["reward"], ended["group_id"]) == ("finished", None, "task")
    assert reward(http, 1.0, "a").json()["error"]["code"] == "session_ended"
    assert chat(http, session="a").json()["error"]["code"] == "session_ended"
    episode(http, "b")
    reward(http, 0.5, "b")
    assert http.post("/v1/sessions/b/finish", json={}).status_code == 409
    values = [[one["reward"] for one in session["trajectories"]] for session in fetched(http)]
    assert values == [[None], [0.5]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": 1, "trajectory_rewards": ["x"]}, "trajectory_rewards.0"),
        ({"reward": 1, "group_id": ""}, "group_id"),
        ({"reward": 1, "colour": 1}, "colour"),
    ],
)
def test_a_wrong_reward_is_refused_by_name(http, body, param):
    chat(http)
    response = http.post("/v1/sessions/s/reward", content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert state(http)["state"] == "open"


def test_a_discarded_session_is_not_learnt_from(http):
    chat(http)
    assert http.delete("/v1/sessions/s").status_code == 204
    assert chat(http).json()["error"]["code"] == "session_ended"
    assert http.get("/v1/sessions/s").status_code == 409
    assert fetched(http) == []
    assert http.get("/v1/sessions/none").status_code == 404


def test_finished_sessions_are_fetched_in_order_until_they_are_dropped(http):
    for name in "abc":
        chat(http, session=name)
    for name in "bca":
        reward(http, 1.0, name)
    assert [one["id"] for one in fetched(http)] == ["b", "c", "a"]
    first = fetched(http, limit=1)
    assert first == fetched(http, limit=1)
    cursor = first[0]["cursor"]
    assert [one["id"] for one in fetched(http, after=cursor)] == ["c", "a"]
    for _ in range(2):
        assert http.delete("/v1/trajectories", params={"through": cursor}).status_code == 204
    assert [one["id"] for one in fetched(http)] == ["c", "a"]
    second = fetched(http, after=cursor)[0]["cursor"]
    http.delete("/v1/trajectories", params={"through": second})
    lost = http.get("/v1/trajectories", params={"after": cursor})
    assert (lost.status_code, lost.json()["error"]["code"]) == (409, "sessions_dropped")
    # A late call, or a late reward, of an episode that was learnt from begins nothing.
    assert chat(http, session="b").json()["error"]["code"] == "session_ended"
    assert reward(http, 1.0, "b").json()["error"]["code"] == "session_ended"


def test_cursors_of_another_server_are_refused(http, address, codec):
    chat(http)
    reward(http, 1.0)
    [one] = fetched(http)
    with TestClient(application(Settings(address, codec, "senior"))) as other:
        for call in (
            other.get("/v1/trajectories", params={"after": one["cursor"]}),
            other.delete("/v1/trajectories", params={"through": one["cursor"]}),
        ):
            assert (call.status_code, call.json()["error"]["code"]) == (409, "cursor_unknown")
    instance = one["cursor"].rpartition("-")[0]
    for cursor in ("", "x", f"{instance}-2", f"{instance}-x"):
        assert http.get("/v1/trajectories", params={"after": cursor}).status_code == 409
    for query in ({"limit": 0}, {"limit": 257}, {"limit": "x"}, {"before": 1}):
        assert http.get("/v1/trajectories", params=query).status_code == 400
    assert http.delete("/v1/trajectories").json()["error"]["param"] == "through"


def test_pages_have_a_bound_of_bytes(http, monkeypatch):
    for name in "abc":
        chat(http, session=name)
        reward(http, 1.0, name)
    monkeypatch.setattr(limits, "MAX_PAGE_BYTES", 1)
    assert [one["id"] for one in fetched(http)] == ["a"]


# Bounds.


def test_sessions_have_a_bound_of_number(http, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SESSIONS", 2)
    assert chat(http, session="a").is_success
    assert chat(http, session="b").is_success
    refused = chat(http, session="c")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
    assert refused.headers["retry-after"] == "1"
    reward(http, 1.0, "a")
    assert chat(http, session="c").status_code == 429
    [one] = fetched(http)
    http.delete("/v1/trajectories", params={"through": one["cursor"]})
    assert chat(http, session="c").is_success


def test_sessions_have_a_bound_of_bytes(http, monkeypatch):
    assert chat(http, session="a").is_success
    monkeypatch.setattr(limits, "MAX_SESSIONS_BYTES", 1)
    assert chat(http, session="b").status_code == 429
    assert chat(http, session="a").status_code == 429
    http.delete("/v1/sessions/a")
    # Nothing is held any more, so that the bound is not reached.
    assert chat(http, session="b").is_success


def test_a_session_has_a_bound_of_trajectories(http, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SESSION_TRAJECTORIES", 2)
    assert [chat(http).status_code for _ in range(3)] == [200, 200, 400]
    assert len(state(http)["trajectories"]) == 2


def test_an_idle_session_is_discarded(http, monkeypatch, caplog):
    chat(http)
    monkeypatch.setattr(limits, "SESSION_IDLE_SECONDS", 0)
    assert chat(http, session="t").is_success
    monkeypatch.setattr(limits, "SESSION_IDLE_SECONDS", 3600)
    error = chat(http).json()["error"]
    assert (error["code"], "idle" in error["message"]) == ("session_ended", True)
    assert "session s: discarded" in caplog.text


# Sessions at a time.


async def test_concurrent_calls_are_trajectories_and_sessions_do_not_mix(
    world, address, codec, prompts
):
    go_on = threading.Event()
    world.on_batch = lambda: go_on.wait(30)
    app = application(Settings(address, codec, "senior"))
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http,
    ):

        def call(session, messages):
            body = {"model": "senior", "messages": messages, "tools": [TOOL], "max_tokens": 200}
            headers = {"x-session-id": session}
            return http.post("/v1/chat/completions", json=body, headers=headers)

        names = [f"s{i}" for i in range(8)]
        calls = [asyncio.create_task(call(name, ASK)) for name in names for _ in range(2)]
        await asyncio.to_thread(fakes.wait_until, lambda: len(world.batches) == 16)
        busy = await http.post("/v1/sessions/s0/reward", json={"reward": 1})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        go_on.set()
        answers = await asyncio.gather(*calls)
        indices = sorted(one.headers["x-session-trajectory"] for one in answers)
        assert indices == ["0"] * 8 + ["1"] * 8
        # Both wrote the same, so two calls continue them, and the third begins another one.
        first = message_of(answers[0])
        go_on.clear()
        messages = [*ASK, first, tool_answer(first)]
        calls = [asyncio.create_task(call("s0", messages)) for _ in range(3)]
        await asyncio.to_thread(fakes.wait_until, lambda: len(world.batches) == 19)
        go_on.set()
        turns = sorted(one.headers["x-session-turn"] for one in await asyncio.gather(*calls))
        assert turns == ["1", "2", "2"]
        found = (await http.get("/v1/sessions/s0")).json()
        assert found["begun"]["concurrent"] == 1
        for name in names[1:]:
            found = (await http.get(f"/v1/sessions/{name}")).json()
            assert [one["turns"] for one in found["trajectories"]] == [1, 1]


def test_the_next_call_may_come_before_the_last_ones_stream_is_closed():
    prompt = Prompt([2, 3], sampling={"max_tokens": 3}, tandem={"enabled": False})
    turn = fakes.written(prompt.message(), 0, 0, [5, 6, 7])
    message, more = {"role": "assistant", "content": "it"}, {"role": "user", "content": "more"}
    following = Conversation(records([*ASK, message, more]))
    sessions, stream = Sessions(), ExitStack()
    first = stream.enter_context(sessions.call("s", "x", 0, Conversation(records(ASK))))
    sessions.wrote(first, turn, {following.digests[2]})
    assert not first.session.busy
    with sessions.call("s", "x", 0, following) as second:
        assert second.begun is None
        assert second.trajectory is first.trajectory
        stream.close()
        assert second.trajectory.busy
        with pytest.raises(RequestError, match="worked on"):
            sessions.finish("s", 1.0, None, None)
    assert sessions.finish("s", 1.0, None, None).number == 1


# The client.


def test_sessions_need_a_key_as_all_pages_do(world, address, codec, tmp_path, prompts):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    settings = Settings(address, codec, "senior", api_keys=watched_tokens(keys, "--api-key-file"))
    with served(application(settings)) as url:
        chat_url = f"{url}/chat/completions"
        body = {"model": "senior", "messages": ASK, "max_tokens": 5, "session_id": "s"}
        header = {"authorization": "Bearer secret"}
        assert httpx2.post(chat_url, json=body, headers=header).is_success
        assert SessionsClient(url, api_key="secret").state("s")["state"] == "open"
        stranger = SessionsClient(url, api_key="other")
        for call in (
            lambda: stranger.state("s"),
            lambda: stranger.reward("s", 1.0),
            lambda: stranger.discard("s"),
            lambda: stranger.finished(),
            lambda: stranger.drop("x"),
        ):
            with pytest.raises(SessionsError) as caught:
                call()
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@contextmanager
def served(app):
    """The application on a port of its own, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        fakes.wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def test_the_client_gives_each_finished_session_once(address, codec, prompts, monkeypatch):
    # Proxies of the environment are not used.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served(application(Settings(address, codec, "senior"))) as url:
        sessions = SessionsClient(url)
        with httpx2.Client(base_url=url.removesuffix("/v1"), timeout=60, trust_env=False) as http:
            for name in "abcd":
                episode(http, name)
            for name in "abc":
                assert sessions.reward(name, 0.5, group_id="g")["state"] == "finished"
            first = sessions.finished(count=2)
            assert [one.id for one in first] == ["a", "b"]
            samples = policy_samples(first)
            assert [(one.group_id, one.reward) for one in samples] == [("g", 0.5)] * 2
            assert 2 in samples[0].trajectory.authorship_mask
            # A loop that was killed before it dropped them takes the same ones again.
            again = sessions.finished(count=2)
            assert [one.trajectories for one in again] == [one.trajectories for one in first]
            after = first[-1].cursor
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(sessions.finished, after, count=2, wait_seconds=30)
                assert sessions.state("d")["state"] == "open"
                sessions.reward("d", 1.0)
                assert [one.id for one in waiting.result()] == ["c", "d"]
            sessions.drop(after)
            assert [one.id for one in sessions.finished(count=5, wait_seconds=0.3)] == ["c", "d"]
            assert sessions.finished(sessions.finished(count=9)[-1].cursor) == []
            with pytest.raises(SessionsError) as caught:
                sessions.discard("a")
            assert (caught.value.status, caught.value.code) == (409, "session_ended")
    with pytest.raises(SessionsError) as caught:
        sessions.state("d")
    assert caught.value.status is None


def test_a_function_gives_sessions_their_rewards(address, codec, prompts):
    with served(application(Settings(address, codec, "senior"))) as url:
        with httpx2.Client(base_url=url.removesuffix("/v1"), timeout=60, trust_env=False) as http:
            for name in "ab":
                episode(http, name)
            chat(http, [{"role": "user", "content": "a branch"}], "a")
        sessions = SessionsClient(url)
        assert sessions.finish("a", group_id="task")["state"] == "finished"
        sessions.reward("b", 0.5)
        a, b = sessions.finished(count=2)
    assert (a.rewards, b.rewards) == (None, [0.5])
    with pytest.raises(RewardError, match="session a: ended without a reward"):
        policy_samples([b, a])
    judged = []

    def lengths(session):
        judged.append(session.id)
        return [len(one.response_token_ids) for one in session.trajectories]

    samples = policy_samples([b, a], reward=lengths)
    assert judged == ["b", "a"]
    written = [len(one.response_token_ids) for one in (*b.trajectories, *a.trajectories)]
    assert [one.reward for one in samples] == written
    assert [one.group_id for one in samples] == ["b", "task", "task"]
    samples = policy_samples([a, b], reward=lambda session: 0.25)
    assert [one.reward for one in samples] == [0.25] * 3
    with pytest.raises(RewardError, match="session b: reward gave 2 numbers for 1 trajectories"):
        policy_samples([b], reward=lambda session: [1.0, 2.0])
