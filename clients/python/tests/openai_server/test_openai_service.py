"""The OpenAI server in operation: many streams, restarts, signals, certificates."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import commands
import fakes
import httpx2
import openai
import pytest
from starlette.testclient import TestClient

from tandem.certs import authority
from tandem.models.tokenizer import TextCodec
from tandem.openai_server import limits
from tandem.openai_server.app import Settings, application
from tandem.rpc.retry import ONCE, RetryPolicy

BODY = {"model": "senior", "prompt": "w2 w3", "seed": 1}
CHAT = {"model": "senior", "messages": [{"role": "user", "content": "w2"}], "max_tokens": 4}


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


@asynccontextmanager
async def clients_of(app):
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client,
    ):
        yield client


async def happens(condition):
    await asyncio.to_thread(fakes.wait_until, condition)


async def test_streams_with_logprobs_fill_the_connection_and_wait_for_nothing(
    world, codec, monkeypatch
):
    """Every stream that a connection carries is open while their tokens are scored."""
    monkeypatch.setattr(limits, "MAX_STREAMS", 4)
    scoring, go_on = [], asyncio.Event()

    def hold():
        # The first batches are those of Generate calls.
        if len(world.batches) >= 4 and world.scores:
            scoring.append(True)
            fakes.wait_until(go_on.is_set)

    world.on_batch = hold
    with fakes.serve(world, max_calls=4) as address:
        async with clients_of(application(Settings(address, codec, "senior"))) as http:
            body = BODY | {"stream": True, "logprobs": 0}
            calls = [
                asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(12)
            ]
            await happens(lambda: len(scoring) == 4)
            assert world.open_streams == 4
            # A probe is not held up by the server's own calls.
            assert (await http.get("/health")).status_code == 200
            go_on.set()
            answers = await asyncio.gather(*calls)
    for answer in answers:
        assert answer.text.endswith("data: [DONE]\n\n")
    assert len(world.batches) == 12


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 4},
        {"stream": True},
        {"stop": "w"},
        {"stop": ["w1", "w2"], "n": 3},
        {"logprobs": 1},
    ],
)
async def test_a_call_that_has_finished_is_not_cancelled(world, codec, fields):
    with fakes.serve(world) as address:
        async with clients_of(application(Settings(address, codec, "senior"))) as http:
            for _ in range(10):
                assert (await http.post("/v1/completions", json=BODY | fields)).is_success
            await happens(lambda: not world.open_streams)
    assert world.cut_calls == 0


@pytest.mark.parametrize(
    "failures",
    [
        [fakes.error_status(14, "the connection broke")] * 3,
        # grpc.aio says this for a call that a busy server refuses, however often it does.
        [fakes.error_status(13, "Internal error from Core")] * 20,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_tokens_is_made_again(world, codec, stream, failures):
    world.failures = list(failures)
    patient = RetryPolicy(initial_seconds=0.01)
    with fakes.serve(world) as address:
        app = application(Settings(address, codec, "senior", retry=patient))
        async with clients_of(app) as http:
            answer = await http.post("/v1/completions", json=BODY | {"stream": stream})
    assert answer.is_success
    assert not world.failures
    assert "error" not in answer.text


async def test_the_idiom_of_every_client_round_trips(world, codec):
    """`messages.append(response.choices[0].message)`, with all the nulls of the answer."""
    with fakes.serve(world) as address:
        async with clients_of(application(Settings(address, codec, "senior"))) as http:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://server/v1", http_client=http, max_retries=0
            )
            messages = [{"role": "user", "content": "w2"}]
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model="senior", messages=messages, max_tokens=4
                )
                messages += [answer.choices[0].message, {"role": "user", "content": "w3"}]


NOTHING = {
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": None,
    "name": None,
    "x_unknown": None,
}


@pytest.mark.parametrize(
    "content", ["w3", "", None, [], [{"type": "text", "text": "w3", "x": None}]]
)
def test_null_and_empty_fields_of_a_message_ask_for_nothing(world, address, codec, content):
    seen = []
    world.on_prompt = lambda prompt: seen.append(list(prompt.prompt_token_ids))
    plain = {"role": "assistant", "content": "w3" if content else ""}
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        for message in (plain, {"role": "assistant", "content": content} | NOTHING):
            fields = {"messages": [{"role": "user", "content": "w2"}, message]}
            answer = http.post("/v1/chat/completions", json=CHAT | fields)
            assert answer.is_success, answer.text
    assert seen[0] == seen[1]


def test_other_fields_of_a_message_reach_the_template(world, address, codec, caplog):
    template = (
        "{% for m in messages %}{{ m.content }} {{ m.tool_call_id }} {{ m.reasoning_content }} "
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.word }} {% endfor %}{% endfor %}"
    )
    (codec.directory / "chat_template.jinja").write_text(template)
    seen = []
    world.on_prompt = lambda prompt: seen.append(list(prompt.prompt_token_ids))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"word": "w7"}'}}
    messages = [
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "w8"},
        {"role": "tool", "content": "w3", "tool_call_id": "w9", "odd_field": 1},
    ]
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        for _ in range(2):
            answer = http.post("/v1/chat/completions", json=CHAT | {"messages": messages})
            assert answer.is_success, answer.text
    assert seen[0] == [2, 8, 7, 3, 9]
    warned = [message for message in caplog.messages if "odd_field" in message]
    assert warned == ["messages[].odd_field: is handed to the chat template, which may ignore it"]


def test_variables_of_the_template_come_with_a_request(world, address, codec):
    (codec.directory / "chat_template.jinja").write_text(
        "{{ messages[0].content }} {{ 'w5' if enable_thinking else 'w6' }}"
    )
    seen = []
    world.on_prompt = lambda prompt: seen.append(list(prompt.prompt_token_ids))
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        for variables in ({"enable_thinking": True}, {"enable_thinking": False}, None):
            fields = {"chat_template_kwargs": variables}
            assert http.post("/v1/chat/completions", json=CHAT | fields).is_success
        fields = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
        answer = http.post("/v1/chat/completions", json=CHAT | fields)
        assert answer.status_code == 400
        assert "chat_template: is not a variable" in answer.json()["error"]["message"]
    assert seen == [[2, 5], [2, 6], [2, 6]]


def test_null_fields_of_a_request_ask_for_nothing(address, codec):
    nothing = dict.fromkeys(("n", "stop", "seed", "logprobs", "stream_options", "no_such_field"))
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        assert http.post("/v1/completions", json=BODY | nothing).is_success
        options = {"stream_options": {"include_usage": None, "x": None}, "tools": [], "suffix": ""}
        assert http.post("/v1/completions", json=BODY | options).is_success


def test_a_restart_of_the_rollout_server_changes_what_is_served(world, tmp_path):
    one, two = (fakes.write_tokenizer(tmp_path / name) for name in ("one", "two"))
    before, after = ExitStack(), ExitStack()
    address = before.enter_context(fakes.serve(world, str(one)))
    once = Settings(address, retry=ONCE)
    with before, after, TestClient(application(once)) as http:
        [model] = http.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("one", 128)
        before.close()
        assert http.get("/v1/models").status_code == 503
        world.max_model_len = world.junior_max_model_len = 64
        after.enter_context(fakes.serve(world, str(two), address=address))
        fakes.wait_until(lambda: http.get("/v1/models").is_success)
        [model] = http.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("two", 64)
        answer = http.post("/v1/completions", json=BODY | {"model": "two", "prompt": [1] * 65})
        assert "max_model_len is 64" in answer.json()["error"]["message"]


def test_pages_of_allowed_origins_may_call(address, codec):
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        answer = http.options("/v1/completions", headers=asked)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert "has no such method" in answer.json()["error"]["message"]
    allowed = Settings(address, codec, "senior", allowed_origins=["https://page.example"])
    with TestClient(application(allowed)) as http:
        answer = http.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        answer = http.post("/v1/completions", json=BODY, headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        asked["origin"] = "https://other.example"
        assert http.options("/v1/completions", headers=asked).status_code == 400


@contextmanager
def served(address, *options):
    """The command, and the URL that it prints."""
    command = [sys.executable, "-m", "tandem", "serve-openai", "--json", "--rollout", address]
    words = [*command, "--port", "0", "--model-name", "senior", *map(str, options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, json.loads(process.stdout.readline())["base_url"]
        finally:
            process.kill()


def test_a_signal_ends_streams_with_an_error(world, codec):
    held = []

    def hold(prompt):
        held.append(prompt)
        if len(held) == 2:
            fakes.wait_until(lambda: not world.open_streams)

    world.on_prompt = hold
    with (
        fakes.serve(world) as address,
        served(address, "--tokenizer", codec.directory) as (process, url),
        httpx2.Client(timeout=60) as http,
        http.stream("POST", f"{url}/completions", json=BODY | {"n": 2, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert "choices" in next(lines)
        fakes.wait_until(lambda: len(held) == 2)
        process.send_signal(signal.SIGTERM)
        *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stops"
        assert process.wait(60) == 0 or process.returncode == -signal.SIGTERM


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "shown", "reached"),
    [
        ("::1", "[::1]", ["[::1]"]),
        ("[::1]", "[::1]", ["[::1]"]),
        ("::", "[::]", ["[::1]", "127.0.0.1"]),
    ],
)
def test_it_listens_at_addresses_of_ipv6(world, codec, host, shown, reached):
    with (
        fakes.serve(world) as address,
        served(address, "--tokenizer", codec.directory, "--host", host, "--insecure") as (_, url),
    ):
        assert url.startswith(f"http://{shown}:")
        for place in reached:
            assert httpx2.get(f"{url.replace(shown, place)}/models").is_success


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no.such.host.invalid", "--host no.such.host.invalid: "),
        ("192.0.2.1", "--host 192.0.2.1: "),
    ],
)
def test_a_host_that_cannot_be_listened_at_is_named(world, codec, host, says):
    with fakes.serve(world) as address:
        options = ["--rollout", address, "--tokenizer", codec.directory, "--host", host]
        printed = commands.tandem("serve-openai", *options, "--insecure", check=2)
    assert printed.stderr.startswith(f"tandem: {says}")


def test_a_connection_lives_longer_than_clients_reuse_it(world, codec, monkeypatch):
    import uvicorn

    seen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append(self.config))
    with fakes.serve(world) as address:
        options = ["--rollout", address, "--port", 0, "--tokenizer", codec.directory]
        commands.tandem("serve-openai", *options)
    # The longest of Go, aiohttp, nginx and the load balancers of clouds is 90 s.
    assert seen[0].timeout_keep_alive > 90


def test_a_renewed_certificate_is_served_from_the_next_connection_on(world, codec, tmp_path):
    made = authority.make_certificates(tmp_path / "certs", authority.Request())
    files = ["--https-certificate-file", made.file("server.crt")]
    files += ["--https-private-key-file", made.file("server.key")]
    with (
        fakes.serve(world) as address,
        served(address, "--tokenizer", codec.directory, *files) as (_, url),
        ThreadPoolExecutor() as pool,
    ):
        port = int(url.rpartition(":")[2].partition("/")[0])

        def shown():
            return ssl.get_server_certificate(("127.0.0.1", port))

        for _ in range(10):
            # No client meets the new certificate without its key.
            renewed = pool.submit(authority.renew_certificates, made.path, authority.Request())
            while not renewed.done():
                shown()
            assert shown() == Path(made.file("server.crt")).read_text()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("named", [True, False])
def test_https_is_served_to_clients_of_each_version(world, codec, tmp_path, version, named):
    made = authority.make_certificates(tmp_path / "certs", authority.Request())
    files = ["--https-certificate-file", made.file("server.crt")]
    files += ["--https-private-key-file", made.file("server.key")]
    context = ssl.create_default_context(cafile=made.file("ca.crt"))
    context.minimum_version = context.maximum_version = version
    with (
        fakes.serve(world) as address,
        served(address, "--tokenizer", codec.directory, *files) as (_, url),
    ):
        port = url.rpartition(":")[2].partition("/")[0]
        host = "localhost" if named else "127.0.0.1"
        models = f"https://{host}:{port}/v1/models"
        assert httpx2.get(models, verify=context, trust_env=False).is_success
