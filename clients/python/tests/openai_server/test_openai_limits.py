"""The limits of a request to the OpenAI server, and the checks before anything is built."""

from __future__ import annotations

import asyncio
import json
import socket

import fakes
import pytest
import uvicorn
from starlette.testclient import TestClient

from tandem.models.tokenizer import TextCodec
from tandem.openai_server import limits
from tandem.openai_server.app import Settings, application
from tandem.openai_server.protocol import BoundedProtocol

MESSAGES = [{"role": "user", "content": "w2 w3"}]


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


@pytest.fixture
def app(address, codec):
    return application(Settings(address, codec, "senior"))


@pytest.fixture
def http(app):
    with TestClient(app) as client:
        yield client


def complete(http, **fields):
    body = {"model": "senior", "prompt": "w2"} | fields
    return http.post("/v1/completions", content=json.dumps(body))


def chat(http, **fields):
    body = {"model": "senior", "messages": MESSAGES, "max_tokens": 4} | fields
    return http.post("/v1/chat/completions", content=json.dumps(body))


def nothing_may_be_built(monkeypatch):
    """Lets every step fail that costs memory or time in the size of a request."""

    def fail(*_, **__):
        raise AssertionError("it was built")

    for name in ("encode", "chat", "chat_with_images", "growing"):
        monkeypatch.setattr(TextCodec, name, fail)


def test_what_is_too_large_is_refused_before_it_is_built(http, world, monkeypatch, subtests):
    for send, fields, param, says in [
        (complete, {"prompt": ["w1"] * 40, "n": 128}, "n", "40 prompts times 128 are 5,120"),
        (complete, {"prompt": [[1]] * 4097}, "prompt", "has 4097 prompts, at most 4096"),
        (complete, {"prompt": "w" * 4097}, "prompt", "4,097 bytes of text; a prompt of 128 tokens"),
        (complete, {"prompt": ["w1", "é" * 2049]}, "prompt", "4,098 bytes of text"),
        (complete, {"prompt": [1] * 129}, "prompt", "has 129 tokens; max_model_len is 128"),
        (complete, {"prompt": [[1], [-1] * 10**6]}, "prompt[1][0]", "-1 is not a token id"),
        (complete, {"prompt": [1, "w"]}, "prompt[1]", "'w' is not a token id"),
        (complete, {"prompt": [True]}, "prompt[0]", "True is not a token id"),
        (complete, {"prompt": [1.0]}, "prompt[0]", "must be a list of token ids"),
        (complete, {"prompt": [2**31]}, "prompt[0]", "is not a token id"),
        (complete, {"prompt": {"text": "w"}}, "prompt", "must be text, a list of texts"),
        (complete, {"stop": ["w"] * 65}, "stop", "has 65 texts, at most 64"),
        (complete, {"stop": ["w" * 1025]}, "stop", "1025 characters, at most 1024"),
        (complete, {"stop": [1] * 60}, "stop", "1 is not text"),
        (complete, {"stop": {"a": 1}}, "stop", "must be text or a list of texts"),
        (complete, {"tandem": {"boundary_token_ids": [1] * 4097}}, "tandem", "4097 elements"),
        (chat, {"messages": MESSAGES * 4097}, "messages", "has 4097 messages, at most 4096"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
            "messages",
            "4097 parts of contents",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": "w" * 4098}]},
            "messages",
            "bytes of text",
        ),
        (
            chat,
            {"messages": [*MESSAGES, {"role": "tool", "content": "", "note": {"a": ["w" * 5000]}}]},
            "messages",
            "bytes of text",
        ),
    ]:
        with subtests.test(send=send, fields=fields, param=param, says=says):
            if param != "prompt" or "max_model_len is" not in says:
                nothing_may_be_built(monkeypatch)
            response = send(http, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert says in error["message"]
            assert len(error["message"]) < 300
            assert not world.batches


def test_what_just_fits_is_answered(http, codec):
    assert complete(http, prompt="w" * 4096, max_tokens=1).is_success
    assert complete(http, prompt=[1] * 127, max_tokens=1).is_success
    assert complete(http, stop=["x" * 1024] * 64).is_success
    assert complete(http, prompt=[[1]] * 32, n=128, max_tokens=1).is_success


def test_choices_are_bounded_by_the_queue_of_the_rollout_server(http, world):
    world.max_queue = 7
    assert complete(http, prompt=["w1"] * 7).is_success
    answer = complete(http, prompt=["w1"] * 4, n=2)
    assert answer.status_code == 400
    assert "8 choices; at most 7" in answer.json()["error"]["message"]


def test_tokens_of_all_prompts_times_n_are_bounded(http, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 50)
    assert complete(http, prompt=[[1] * 10] * 5).is_success
    assert complete(http, prompt=[[1] * 10], n=5).is_success
    for fields in ({"prompt": [[1] * 10] * 6}, {"prompt": [[1] * 26], "n": 2}):
        answer = complete(http, **fields)
        assert answer.status_code == 400
        assert "more than 50 tokens" in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_is_named(http, subtests):
    for send, fields, param in [
        (complete, {"stop": "\udfff"}, "stop"),
        (complete, {"stop": ["w", "\ud800x"]}, "stop[1]"),
        (complete, {"prompt": "a \udfff"}, "prompt"),
        (complete, {"model": "\udfff"}, "model"),
        (complete, {"user": "\udfff"}, "user"),
        (chat, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
        (chat, {"messages": [{"role": "\udfff", "content": ""}]}, "messages[0].role"),
        (chat, {"messages": [*MESSAGES, {"role": "user", "content": "", "x": ["\udfff"]}]}, None),
    ]:
        with subtests.test(send=send, fields=fields, param=param):
            answer = send(http, **fields)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == (param or "messages[1].x[0]")
            assert "is not Unicode text" in error["message"]


def test_a_whole_surrogate_pair_is_a_character(http):
    body = b'{"model": "senior", "prompt": "w2", "stop": "\\ud83d\\ude00"}'
    assert http.post("/v1/completions", content=body).is_success


def test_a_body_of_many_brackets_is_refused(http):
    answer = http.post("/v1/completions", content=b"[" * 200_000)
    assert answer.status_code == 400


def scope(path="/v1/completions", headers=()):
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }


class Call:
    """A request whose body comes in parts."""

    def __init__(self, app, **options):
        self._parts = asyncio.Queue()
        self._sent = []
        self._running = asyncio.create_task(
            app(scope(**options), self._parts.get, lambda message: self._send(message))
        )

    async def _send(self, message):
        self._sent.append(message)

    def body(self, part, more=True):
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def answer(self):
        """The status and the error of the answer."""
        await self._running
        status = self._sent[0]["status"]
        body = json.loads(b"".join(one.get("body", b"") for one in self._sent))
        return status, body.get("error")


COMPLETE = json.dumps({"model": "senior", "prompt": "w2", "seed": 1}).encode()


async def test_a_body_that_says_that_it_is_too_large_is_not_read(app):
    async with app.router.lifespan_context(app):
        call = Call(app, headers=[("content-length", str(limits.MAX_BODY_BYTES + 1))])
        status, error = await call.answer()
    assert status == 413
    assert "more than 33554432 bytes" in error["message"]


async def test_unfinished_bodies_are_bounded_together_and_in_time(app, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 1000)
    async with app.router.lifespan_context(app):
        first = Call(app)
        first.body(COMPLETE[:10])
        second = Call(app)
        second.body(b" " * 990)
        await asyncio.sleep(0)
        third = Call(app)
        third.body(COMPLETE, more=False)
        status, error = await third.answer()
        assert (status, error["code"], error["type"]) == (429, "server_busy", "rate_limit_error")
        second.body(b"", more=False)
        assert (await second.answer())[0] == 400  # Its bytes are given back.
        first.body(COMPLETE[10:], more=False)
        assert (await first.answer())[0] == 200

        monkeypatch.setattr(limits, "BODY_SECONDS", 0.01)
        slow = Call(app)
        slow.body(COMPLETE[:5])
        status, error = await slow.answer()
        assert status == 408
        assert "did not arrive within 0.01 s" in error["message"]


async def test_a_connection_without_a_request_is_closed(app, monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=BoundedProtocol, log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    place = listener.getsockname()
    good, to_good = await asyncio.open_connection(*place)
    to_good.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200 OK" in await good.readline()
    for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: "):
        reader, writer = await asyncio.open_connection(*place)
        writer.write(begun)
        assert await reader.read() == b""
        writer.close()
    # A connection that had a request is kept.
    to_good.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    while b"200 OK" not in (line := await good.readline()):
        assert line
    to_good.close()
    server.should_exit = True
    await serving


async def test_a_client_that_does_not_read_its_stream_is_cut_off(app, world, monkeypatch):
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.01)
    body = json.dumps({"model": "senior", "prompt": "w2", "max_tokens": 40, "stream": True})
    async with app.router.lifespan_context(app):
        call = Call(app)
        reading, send = asyncio.Event(), call._send

        async def send_slowly(message):
            if message["type"] == "http.response.body":
                await reading.wait()
            await send(message)

        call._send = send_slowly
        call.body(body.encode(), more=False)
        await call._running
        await asyncio.to_thread(fakes.wait_until, lambda: not world.open_streams)


async def test_requests_are_bounded(app, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REQUESTS", 2)
    async with app.router.lifespan_context(app):
        calls = [Call(app) for _ in range(3)]
        await asyncio.sleep(0)
        status, error = await calls[2].answer()
        assert (status, error["code"]) == (429, "server_busy")
        for call in calls[:2]:
            call.body(COMPLETE, more=False)
            assert (await call.answer())[0] == 200
        last = Call(app)
        last.body(COMPLETE, more=False)
        assert (await last.answer())[0] == 200


def test_the_bounds_are_those_of_the_page():
    """docs/reference/limits.md has every bound; its lint test compares the numbers."""
    page = (fakes.REPOSITORY / "docs/reference/limits.md").read_text()
    names = [name for name in vars(limits) if name.isupper() and name != "RETRY_SECONDS"]
    assert [name for name in names if f"`{name}`" not in page] == []
