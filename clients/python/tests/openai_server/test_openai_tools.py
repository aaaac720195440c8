"""Tools in chat completions: what is offered, what the model calls, and what is refused."""

from __future__ import annotations

import json

import pytest
import talking
from starlette.testclient import TestClient

from tandem.openai_server import limits
from tandem.openai_server.app import Settings, application

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASK = [{"role": "user", "content": "add"}]


@pytest.fixture
def codec(tmp_path):
    return talking.chat_codec(tmp_path / "model")


@pytest.fixture
def http(address, codec):
    with TestClient(application(Settings(address, codec, "senior"))) as client:
        yield client


def chat(http, **fields):
    body = {"model": "senior", "messages": ASK, "tools": [TOOL], "max_tokens": 200} | fields
    return http.post("/v1/chat/completions", json=body)


def events(response):
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def test_calls_are_told_apart_from_the_text(http, world, codec):
    text = "I add. " + talking.called("add", a=1) + talking.called("add", a="ü")
    talking.let_write(world, codec, lambda *_: text)
    [choice] = chat(http).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I add."
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["add", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {"a": "ü"}]
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2


def test_a_request_that_is_repeated_gives_the_same_ids(http, world, codec):
    talking.let_write(world, codec, lambda *_: talking.called("add", a=1))
    first, second = (chat(http).json()["choices"][0]["message"] for _ in range(2))
    assert first == second
    assert first["content"] is None


def test_a_stream_has_the_calls_in_one_chunk(http, world, codec):
    talking.let_write(world, codec, lambda *_: "so: " + talking.called("add", a=1))
    whole = chat(http).json()["choices"][0]["message"]
    first, last = events(chat(http, stream=True))
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["content"] == whole["content"] == "so:"
    [call] = last["delta"]["tool_calls"]
    assert call.pop("index") == 0
    assert [call] == whole["tool_calls"]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '<tool_call>{"name": 1}</tool_call>',
        "<tool_call>{",
        talking.called("add", a=1) + "<tool_call>{",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(http, world, codec, text, stream):
    talking.let_write(world, codec, lambda *_: text)
    response = chat(http, stream=stream)
    if stream:
        _, last = events(response)
        message = last["delta"]
    else:
        [last] = response.json()["choices"]
        message = last["message"]
    assert message["content"] == text
    assert "tool_calls" not in message
    assert last["finish_reason"] == "stop"


def test_an_answer_that_ends_within_a_call_has_the_length_for_a_reason(http, world, codec):
    talking.let_write(world, codec, lambda *_: talking.called("add", a=1))
    [choice] = chat(http, max_tokens=20).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == talking.called("add", a=1)[:20]


def test_the_template_shows_the_tools_unless_none_may_be_called(http, world, codec):
    prompts = []
    world.on_prompt = lambda prompt: prompts.append(list(prompt.prompt_token_ids))
    talking.let_write(world, codec, lambda *_: talking.called("add", a=1))
    for fields in ({}, {"tool_choice": "auto"}):
        assert chat(http, **fields).json()["choices"][0]["finish_reason"] == "tool_calls"
    [choice] = chat(http, tool_choice="none").json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == talking.called("add", a=1)
    with_tools = codec.chat(ASK, {"tools": [TOOL]})
    assert prompts == [with_tools, with_tools, codec.chat(ASK)]
    assert with_tools != codec.chat(ASK)


def test_answers_of_tools_go_through_the_template(http, world, codec):
    prompts = []
    world.on_prompt = lambda prompt: prompts.append(list(prompt.prompt_token_ids))
    talking.let_write(world, codec, lambda *_: talking.called("add", a=1))
    message = chat(http).json()["choices"][0]["message"]
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    assert chat(http, messages=[*ASK, message, answer]).is_success
    shown = "".join(codec.token_texts(prompts[-1]))
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in shown
    assert "<tool_response>2</tool_response>" in shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
            "tools[0].function.x",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL] * (limits.MAX_TOOLS + 1)}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(http, world, fields, param):
    response = chat(http, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)
    assert not world.batches


def test_tools_and_sessions_are_those_of_chats(http):
    body = {"model": "senior", "prompt": "a", "max_tokens": 1}
    nothing = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "session_id": None}
    assert http.post("/v1/completions", json=body | nothing).is_success
    for name, value in (("tools", [TOOL]), ("tool_choice", "required"), ("session_id", "s")):
        error = http.post("/v1/completions", json=body | {name: value}).json()["error"]
        assert error["param"] == name
        assert error["message"] == f"{name}: not supported by /v1/completions"


def test_every_field_of_openais_client_is_followed_ignored_or_refused():
    from openai.types.chat import completion_create_params

    from tandem.openai_server.fields import IGNORED, REFUSED, ChatRequest

    theirs = completion_create_params.CompletionCreateParamsStreaming.__annotations__
    theirs |= completion_create_params.CompletionCreateParamsBase.__annotations__
    assert len(theirs) > 30
    assert set(theirs) <= IGNORED | set(REFUSED) | set(ChatRequest.model_fields)


def test_a_template_of_an_unknown_format_needs_the_formats_name(address, world, tmp_path):
    plain = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    codec = talking.chat_codec(tmp_path / "plain", plain)
    talking.let_write(world, codec, lambda *_: talking.called("add", a=1))
    with TestClient(application(Settings(address, codec, "senior"))) as client:
        error = chat(client).json()["error"]
        assert error["param"] == "tools"
        assert "--tool-calls" in error["message"]
    named = Settings(address, codec, "senior", tool_calls="hermes")
    with TestClient(application(named)) as client:
        assert chat(client).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_behind_a_special_token_is_found(address, world, tmp_path):
    template = "[TOOL_CALLS]" + talking.TEMPLATE.replace("<tool_call>", "").replace(
        "</tool_call>", ""
    )
    codec = talking.chat_codec(tmp_path / "mistral", template)
    call = {"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}
    talking.let_write(world, codec, lambda *_: f"[TOOL_CALLS]{json.dumps([call])}")
    with TestClient(application(Settings(address, codec, "senior"))) as client:
        [found] = chat(client).json()["choices"][0]["message"]["tool_calls"]
    assert found["id"] == "abcdefghi"
    assert json.loads(found["function"]["arguments"]) == {"a": 1}


def test_arguments_in_xml_have_the_types_of_the_tool(address, world, codec):
    text = (
        "so\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    talking.let_write(world, codec, lambda *_: text)
    properties = {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}
    function = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    with TestClient(
        application(Settings(address, codec, "senior", tool_calls="qwen_xml"))
    ) as client:
        message = chat(client, tools=tools).json()["choices"][0]["message"]
    assert message["content"] == "so"
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "2"}
