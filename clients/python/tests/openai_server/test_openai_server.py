"""OpenAI's API over a fake rollout server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import commands
import fakes
import grpc
import pytest
from starlette.testclient import TestClient

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.certs.authority import Request, make_certificates
from tandem.errors import RpcError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server import limits
from tandem.openai_server.app import Settings, application
from tandem.openai_server.choices import Choice
from tandem.openai_server.errors import HTTP_STATUS, error_headers, error_object, http_status
from tandem.openai_server.fields import REFUSED
from tandem.rpc.credentials import watched_tokens
from tandem.rpc.renamed import NEW_NAMES
from tandem.rpc.requests import Prompt
from tandem.rpc.retry import RetryPolicy
from tandem.rpc.seeds import prompt_seed

MESSAGES = [{"role": "user", "content": "w2 w3"}]
RETRY = RetryPolicy(seconds=0.2, initial_seconds=0.01)
TOO_BUSY = {"field": "submit.prompts", "retry_seconds": 1.5}


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


@pytest.fixture
def application_(address, codec):
    return application(Settings(address, codec, "senior", retry=RETRY))


@pytest.fixture
def http(application_):
    with TestClient(application_) as client:
        yield client


def complete(http, *, headers=None, **fields):
    body = {"model": "senior", "prompt": "w2 w3", "seed": 1} | fields
    return http.post("/v1/completions", json=body, headers=headers)


def chat(http, **fields):
    body = {"model": "senior", "messages": MESSAGES, "seed": 1, "max_tokens": 8} | fields
    return http.post("/v1/chat/completions", json=body)


def expected_ids(codec, index=0, max_tokens=16, seed=1):
    """The response of the fake server to the choice `index` of a request."""
    prompt = Prompt(
        codec.encode("w2 w3"),
        seed=prompt_seed(seed, 0, index, "generate"),
        sampling={"max_tokens": max_tokens},
    )
    return list(fakes.sample(prompt.message(), 0, 0).response_token_ids)


def test_a_completion_has_openais_shape(http, world, codec):
    world.rollout_weights = fakes.weights(4)
    answer = complete(http, n=2).json()
    ids = [expected_ids(codec, index) for index in range(2)]
    assert answer["object"] == "text_completion"
    assert answer["system_fingerprint"] == "4-d"
    assert [choice["text"] for choice in answer["choices"]] == [codec.decode(one) for one in ids]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, one in zip(answer["choices"], ids, strict=True):
        assert choice["finish_reason"] == ("stop" if one[-1] == fakes.EOS else "length")
    written = sum(map(len, ids))
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": written,
        "total_tokens": 2 + written,
    }


def test_requests_become_prompts_of_the_senior_alone(http, world):
    seen = []
    world.on_prompt = seen.append
    assert complete(http, prompt=[[2, 3], [4]], top_p=0.5, top_k=3, min_p=0.1).is_success
    assert [list(prompt.prompt_token_ids) for prompt in seen] == [[2, 3], [4]]
    [first, second] = seen
    assert first.seed != second.seed
    assert (first.sampling.top_p, first.sampling.top_k, first.sampling.min_p) == (0.5, 3, 0.1)
    assert first.tandem.HasField("enabled")
    assert not first.tandem.enabled
    assert len(world.batches) == 1


def test_a_lower_number_is_a_higher_priority(http, world):
    seen = []
    world.on_prompt = seen.append
    for fields in ({}, {"priority": 3}, {"priority": -(2**31) + 1}):
        assert complete(http, **fields).is_success
    assert [prompt.priority for prompt in seen] == [0, -3, 2**31 - 1]


def test_without_a_seed_responses_differ(http, world):
    seen = []
    world.on_prompt = seen.append
    for _ in range(2):
        complete(http, seed=None)
    assert seen[0].seed != seen[1].seed


def test_chat_fills_the_model_by_default(http, world, codec):
    seen = []
    world.on_prompt = seen.append
    parts = [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w3"}]
    messages = [{"role": "user", "content": parts}]
    assert chat(http, max_tokens=None, messages=messages).is_success
    [prompt] = seen
    assert list(prompt.prompt_token_ids) == codec.chat(MESSAGES)
    assert prompt.sampling.max_tokens == 128 - len(prompt.prompt_token_ids)


def test_special_tokens_stop_at_the_server_and_texts_here(http, world, codec):
    ids = expected_ids(codec, max_tokens=40)
    whole = codec.decode(ids)
    # The text of this tokenizer has no spaces: a stop text across two tokens.
    stop = f"{codec.decode(ids[3:4])}{codec.decode(ids[4:5])[:2]}"
    seen = []
    world.on_prompt = seen.append
    answer = complete(http, max_tokens=40, stop=["<eos>", stop], logprobs=0).json()
    [choice] = answer["choices"]
    assert list(seen[0].sampling.stop_token_ids) == [fakes.EOS]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def events(response):
    *parts, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(part) for part in parts]


PNG = "data:image/png;base64,"


def test_a_part_that_is_no_text_and_no_image_is_refused_by_name(http, subtests):
    for part, param, says in [
        (
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
            ".image_url.url",
            "not fetched",
        ),
        ({"type": "image_url", "image_url": {"url": PNG + "%"}}, ".image_url.url", "not base64"),
        (
            {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
            ".image_url.detail",
            "'auto'",
        ),
        ({"type": "image_url", "text": "w1"}, "", "has the field image_url"),
        ({"type": "text"}, "", "has the field text"),
        ({"type": "video_url"}, ".type", "'image_url'"),
    ]:
        with subtests.test(part=part, param=param, says=says):
            messages = [{"role": "user", "content": [{"type": "text", "text": "w1"}, part]}]
            answer = chat(http, messages=messages)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == f"messages[0].content[1]{param}"
            assert says in error["message"]


def test_a_text_model_is_shown_no_image(http, codec):
    (codec.directory / "config.json").write_text("{}")
    content = [{"type": "image_url", "image_url": {"url": PNG + "aGVsbG8="}}]
    answer = chat(http, messages=[{"role": "user", "content": content}])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert "does not accept images" in error["message"]


@pytest.mark.parametrize("send", [complete, chat])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": "w1"}])
def test_a_stream_is_the_whole_answer_in_parts(http, send, fields):
    whole = send(http, **fields).json()
    response = send(http, stream=True, stream_options={"include_usage": True}, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    texts = dict.fromkeys(range(fields.get("n", 1)), "")
    ends = {}
    for chunk in chunks:
        assert chunk["usage"] is None
        [choice] = chunk["choices"]
        index = choice["index"]
        assert index not in ends
        texts[index] += choice["text"] if send is complete else choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        text = choice["text"] if send is complete else choice["message"]["content"]
        assert texts[choice["index"]] == text
        assert ends[choice["index"]] == choice["finish_reason"]


def test_a_stream_shows_tokens_as_they_come(http, codec):
    # The fake server sends two tokens in an event.
    ids = expected_ids(codec)
    texts = [chunk["choices"][0]["text"] for chunk in events(complete(http, stream=True))]
    pairs = [codec.decode(ids[start : start + 2]) for start in range(0, len(ids), 2)]
    assert [text for text in texts if text] == pairs


def test_echo_scores_the_prompt_without_a_sample(http, world):
    world.logprob["senior"] = lambda token: -token / 8
    seen = []
    world.on_prompt = seen.append
    answer = complete(http, prompt=[[2, 3, 4]], max_tokens=0, echo=True, logprobs=0).json()
    [choice] = answer["choices"]
    assert choice["text"] == "w2w3w4"
    assert choice["logprobs"] == {
        "tokens": ["w2", "w3", "w4"],
        "token_logprobs": [None, -0.375, -0.5],
        "top_logprobs": None,
        "text_offset": [0, 2, 4],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert seen == []
    assert world.score_temperatures == [1.0]


def test_alternatives_are_the_likeliest_tokens_and_the_token_itself(http, world):
    world.top = [3, 4, 5]
    world.logprob["senior"] = {3: -1.5, 4: -3.5, 5: -0.25}.get
    answer = complete(http, prompt=[[2, 3, 4]], max_tokens=0, echo=True, logprobs=2).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert top == [None, {"w5": -0.25, "w3": -1.5}, {"w5": -0.25, "w3": -1.5, "w4": -3.5}]
    assert world.score_temperatures == [1.0]


def test_a_chat_has_alternatives_in_their_order(http, world):
    world.top = [3, 4, 5]
    world.logprob["senior"] = lambda token: {3: -1.5, 4: -3.5, 5: -0.25}.get(token, -9.0)
    content = chat(http, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    assert content
    for token in content:
        assert [(one["token"], one["logprob"]) for one in token["top_logprobs"]] == [
            ("w5", -0.25),
            ("w3", -1.5),
            ("w4", -3.5),
        ]
    assert chat(http, logprobs=True, top_logprobs=21).status_code == 400


def test_what_cannot_be_done_is_refused_unless_it_asks_for_nothing(http, subtests):
    for name in sorted(REFUSED):
        with subtests.test(name=name):
            for value in (*REFUSED[name], None):
                assert chat(http, **{name: value}).is_success
            response = chat(http, **{name: "something"})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error.pop("message").startswith(f"{name}: not supported by rollout servers")
            assert error == {
                "type": "invalid_request_error",
                "param": name,
                "code": "unsupported_parameter",
            }


def test_a_wrong_field_is_named(http, subtests):
    for fields, param in [
        ({"colour": 1}, "colour"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[2], []]}, "prompt"),
        ({"prompt": [[2], [-1]]}, "prompt[1][0]"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"tandem": {"luck": 1}}, "tandem"),
        ({"top_k": 2**40}, "top_k"),
        ({"priority": -(2**31)}, "priority"),
        ({"priority": "high"}, "priority"),
    ]:
        with subtests.test(fields=fields, param=param):
            response = complete(http, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ],
)
def test_a_wrong_field_of_a_conversation_is_named(http, fields, param):
    response = chat(http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("old", ["frozen_model", "prob_primary", "tandem_model_mask"])
def test_an_old_name_is_refused_with_the_new_one(http, old):
    for fields in ({old: 1}, {"tandem": {old: 1}}):
        response = complete(http, **fields)
        assert response.status_code == 400
        assert f"; {old} is now {NEW_NAMES[old]}" in response.json()["error"]["message"]


def test_fields_that_do_not_bear_on_the_response_are_ignored(http):
    assert complete(http, user="me", metadata={"a": "b"}).is_success


def test_a_body_that_is_no_object_is_refused(http, monkeypatch):
    for body in (b"{", b"[]", b"\xff", b'{"\\ud800": 1}'):
        assert http.post("/v1/completions", content=body).status_code == 400
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 10)
    assert complete(http).status_code == 413


def test_another_model_or_page_is_not_found(http):
    for response in (
        complete(http, model="other"),
        http.get("/v1/models/other"),
        http.get("/v2"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/completions").status_code == 405


def test_every_grpc_code_has_a_status():
    assert set(HTTP_STATUS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind", "retry_after"),
    [
        (fakes.error_status(8, "full", **TOO_BUSY), 429, "rate_limit_error", "2"),
        (fakes.error_status(8, "too large"), 413, "invalid_request_error", None),
        (fakes.error_status(14, "loading", retry_seconds=0.2), 503, "server_error", "1"),
        (fakes.error_status(14, "gone"), 503, "server_error", None),
    ],
)
def test_a_call_that_failed_keeps_its_meaning(http, world, status, code, kind, retry_after, stream):
    # A refusal that grpc.aio hides is asked for again.
    world.failures.extend([status] * 8)
    response = complete(http, stream=stream)
    assert response.status_code == code
    assert response.json()["error"]["type"] == kind
    assert response.headers.get("retry-after") == retry_after


def test_the_hint_of_an_error_is_in_its_message():
    error = RpcError("no junior", code=grpc.StatusCode.FAILED_PRECONDITION, reason="NO_JUNIOR")
    shown = error_object(error)["error"]
    assert shown["message"].startswith("no junior (Start the rollout server with junior.model")
    assert (http_status(error), error_headers(error)) == (400, {})


def test_a_failure_within_a_stream_is_its_last_event(http, world):
    world.cut_streams = 1
    response = complete(http, n=2, stream=True)
    assert response.status_code == 200
    last = response.text.strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "UNAVAILABLE"


def test_the_request_id_goes_to_the_rollout_server_and_back(http, world):
    response = complete(http, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert ("Generate", "mine") in world.calls
    given = complete(http, headers={"x-request-id": "not an id"}).headers["x-request-id"]
    assert given != "not an id"
    assert ("Generate", given) in world.calls


def test_health_is_that_of_the_rollout_server(http, address, codec):
    assert http.get("/health").json()["status"] == "SERVING"
    with TestClient(application(Settings("127.0.0.1:1", codec, "senior"))) as nowhere:
        response = nowhere.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == "UNREACHABLE"


def test_a_port_that_is_taken_is_named(address, codec):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        printed = commands.tandem("serve-openai", "--rollout", address, "--port", port, check=3)
    assert f"--port {port}: Address already in use" in printed.stderr


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("first-key\nsecond-key\n")
    return file


def test_a_request_needs_one_of_the_keys(address, codec, keys):
    watched = watched_tokens(keys, "--api-key-file")
    settings = Settings(address, codec, "senior", retry=RETRY, api_keys=watched)
    with TestClient(application(settings)) as http:
        for key in ("first-key", "second-key"):
            assert complete(http, headers={"authorization": f"Bearer {key}"}).is_success
            models = http.get("/v1/models", headers={"authorization": f"bearer {key} "})
            assert models.is_success
        wrong = (None, "", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "first-key")
        for header in (*wrong, "Basic first-key", "Bearer é"):
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            for path in ("/v1/completions", "/v1/chat/completions"):
                refused = http.post(path, json={"model": "senior"}, headers=headers)
                assert refused.status_code == 401
            for path in ("/v1/models", "/v1/models/senior"):
                assert http.get(path, headers=headers).status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            problem = refused.json()["error"]
            assert problem["code"] == "invalid_api_key"
            assert problem["type"] == "invalid_request_error"
            assert problem["param"] is None
            assert "-ke" not in refused.text
        # Probes show no key.
        assert http.get("/health").is_success
        keys.write_text("third-key")
        assert complete(http, headers={"authorization": "Bearer third-key"}).is_success
        refused = complete(http, headers={"authorization": "Bearer first-key"})
        assert refused.status_code == 401


def test_options_that_would_not_be_safe(address, keys, monkeypatch, subtests):
    for arguments, message in [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: is not a loopback address"),
        (["--host", "0.0.0.0", "--api-key-file", "keys"], "--https-certificate-file, or --insec"),
        (["--host", "", "--insecure", "--api-key-file", "none"], "--api-key-file: .*No such file"),
        (["--https-certificate-file", "keys"], "must be given together"),
        (["--https-private-key-file", "keys"], "must be given together"),
        (
            ["--https-certificate-file", "keys", "--https-private-key-file", "keys"],
            "--https-certificate-file: keys and keys are not a certificate",
        ),
    ]:
        with subtests.test(arguments=arguments, message=message):
            monkeypatch.chdir(keys.parent)
            printed = commands.tandem("serve-openai", "--rollout", address, *arguments, check=2)
            assert re.search(message, printed.stderr)


def test_https_with_a_key_towards_a_rollout_server_with_tls(world, tmp_path, keys):
    made = make_certificates(tmp_path / "certs", Request())
    fakes.write_tokenizer(tmp_path / "model")
    files = [Path(made.file(name)).read_bytes() for name in ("server.key", "server.crt", "ca.crt")]
    tls = grpc.ssl_server_credentials([tuple(files[:2])], files[2], True)
    options = {
        "--port": 0,
        "--tokenizer": tmp_path / "model",
        "--model-name": "senior",
        "--api-key-file": keys,
        "--https-certificate-file": made.file("server.crt"),
        "--https-private-key-file": made.file("server.key"),
        "--ca-file": made.file("ca.crt"),
        "--certificate-file": made.file("client.crt"),
        "--private-key-file": made.file("client.key"),
    }
    words = [str(word) for pair in options.items() for word in pair]
    with fakes.serve(world, credentials=tls) as address:
        command = [sys.executable, "-m", "tandem", "serve-openai", "--json", "--rollout", address]
        server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(server.stdout.readline())["base_url"]
            assert url.startswith("https://127.0.0.1:")
            trusted = ssl.create_default_context(cafile=made.file("ca.crt"))
            body = json.dumps({"model": "senior", "prompt": "w2 w3", "seed": 1}).encode()
            request = urllib.request.Request(f"{url}/completions", body)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, context=trusted)
            request.add_header("authorization", "Bearer first-key")
            with urllib.request.urlopen(request, context=trusted) as answer:
                assert json.load(answer)["object"] == "text_completion"
            with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
                urllib.request.urlopen(request)
        finally:
            server.terminate()
            server.wait()


@asynccontextmanager
async def running(application_):
    async with application_.router.lifespan_context(application_):
        yield application_


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_call(application_, world, stream):
    # The second batch of events never comes: the fake server waits in its first prompt.
    leave, held = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    prompts = []

    def hold(prompt):
        prompts.append(prompt)
        if len(prompts) == 2:
            loop.call_soon_threadsafe(held.set)
            fakes.wait_until(lambda: not world.open_streams)

    world.on_prompt = hold
    body = {"model": "senior", "prompt": "w2", "n": 2, "stream": stream}
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    async with running(application_) as app:
        answering = asyncio.create_task(app(scope, receive, send))
        await held.wait()
        assert world.open_streams == 1
        while stream and not any(b"data: {" in message.get("body", b"") for message in sent):
            await asyncio.sleep(0.01)
        leave.set()
        await answering
        await asyncio.to_thread(fakes.wait_until, lambda: not world.open_streams)
    # A stream had begun; a whole answer had not.
    assert any(b"data: {" in message.get("body", b"") for message in sent) == stream


def test_a_text_waits_while_it_may_begin_a_stop_text(codec):
    choice = Choice(0, [2], codec, ["w3w4"])
    choice.add([2, 3])
    assert choice.new_text() == "w2"
    choice.add([5])
    assert choice.new_text() == "w3w5"
    choice.add([3, 4, 6])
    assert choice.new_text() == ""
    assert (choice.text, choice.finish_reason) == ("w2w3w5", "stop")
    assert choice.shown() == ([2, 3, 5], [0, 2, 4])
    assert choice.ids == [2, 3, 5, 3, 4]


def test_tokens_that_no_event_told_come_with_the_end(codec):
    choice = Choice(0, [2], codec)
    choice.add([2])
    choice.finish(trajectory_pb2.Trajectory(response_token_ids=[2, 3, 0], finish_reason=1))
    assert (choice.text, choice.finish_reason, choice.ids) == ("w2w3", "stop", [2, 3, 0])


def test_all_responses_have_the_drafts_of_the_server(address, codec, world):
    asked = []
    world.on_prompt = lambda prompt: asked.append(prompt.speculative)
    drafts = {"method": "ngram", "acceptance_rule": "rejection_sampling"}
    settings = Settings(address, codec, "senior", retry=RETRY, speculative=drafts)
    with TestClient(application(settings)) as http:
        assert complete(http).status_code == 200
    assert asked == [
        rollout_pb2.SpeculativeConfig(
            method=rollout_pb2.SPECULATIVE_METHOD_NGRAM,
            acceptance_rule=rollout_pb2.ACCEPTANCE_RULE_REJECTION_SAMPLING,
        )
    ]
