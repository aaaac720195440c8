"""Spans of steps and calls, on fake servers."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import fakes
import grpc
import pytest
from commands import lines, tandem
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tandem import tracing
from tandem.errors import ConfigError, FailedPreconditionError, UnavailableError
from tandem.rpc.aio import AsyncRolloutClient, AsyncTrainerClient
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt
from tandem.rpc.retry import ONCE, RetryPolicy

ROLLOUT = "tandem.rollout.v1.RolloutService"
TRAINER = "tandem.trainer.v1.TrainerService"
WEIGHTS = "tandem.weights.v1.WeightService"
PROMPT = Prompt(token_ids=[1, 2], sampling={"max_tokens": 4})


@pytest.fixture
def exporter(monkeypatch):
    """Receives the spans of this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_chosen", [])
    tracing.use(provider)
    return exporter


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of the environment, which the next span reads."""
    monkeypatch.setattr(tracing, "_chosen", [])

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def tree(spans, parent=None):
    """The names of the spans as nested lists: [name, children…] in the order of their start."""
    children = [span for span in spans if parent_id(span) == parent]
    children.sort(key=lambda span: span.start_time)
    return [[span.name, *tree(spans, span.context.span_id)] for span in children]


def parent_id(span):
    return span.parent and span.parent.span_id


def traceparent(span):
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_the_spans_of_a_step_are_its_phases_and_their_calls(exporter, run_file, tmp_path):
    tandem("train", run_file, "steps=2", "checkpoint.every=2")
    spans = exporter.get_finished_spans()
    steps = [one for one in tree(spans) if one[0] == "step"]
    catch_up = [[f"{TRAINER}/GetServerInfo"], [f"{WEIGHTS}/GetVersion"]]
    parts = [
        ["generate", *catch_up, [f"{ROLLOUT}/Generate"]],
        ["reward"],
        ["train", [f"{TRAINER}/TrainStep"]],
        ["trajectories"],
        ["publish", [f"{ROLLOUT}/GetServerInfo"], [f"{TRAINER}/PublishWeights"]],
    ]
    saved = ["checkpoint", [f"{TRAINER}/GetServerInfo"], [f"{TRAINER}/SaveCheckpoint"]]
    assert steps == [["step", *parts], ["step", *parts, saved]]
    [start] = [one for one in tree(spans) if one[0] == "start"]
    assert [f"{TRAINER}/LoadCheckpoint"] in start
    by_name = [span for span in spans if span.name == "step"]
    run_id = by_name[0].attributes["tandem.run_id"]
    assert run_id.startswith("run-")
    assert [dict(span.attributes) for span in by_name] == [
        {"tandem.run_id": run_id, "tandem.step": step} for step in (1, 2)
    ]
    # Every step is a trace of its own.
    assert len({span.context.trace_id for span in by_name}) == 2
    # The clock of the run and its spans show the same phases.
    times = lines(tmp_path / "run" / "metrics.jsonl")[0]
    [train] = [span for span in spans if span.name == "train"][:1]
    assert (train.end_time - train.start_time) / 1e9 <= times["time/train_seconds"]


def test_a_supervised_step_and_an_evaluation_are_spans_too(exporter, run_file):
    tandem("sft", run_file, "steps=1", "checkpoint.at_end=true")
    [step] = [one for one in tree(exporter.get_finished_spans()) if one[0] == "step"]
    assert [part[0] for part in step[1:]] == ["train", "publish", "checkpoint"]
    exporter.clear()
    tandem("eval", run_file, "eval.max_tokens=2")
    [evaluation] = [one for one in tree(exporter.get_finished_spans()) if one[0] == "evaluate"]
    assert [f"{ROLLOUT}/Generate"] in evaluation


def test_a_call_is_a_client_span_whose_context_reaches_the_server(exporter, address, world):
    with RolloutClient(address) as client, tracing.span("work", {"kind": "test"}):
        client.info()
    span, work = exporter.get_finished_spans()
    assert (work.name, dict(work.attributes)) == ("work", {"kind": "test"})
    assert parent_id(span) == work.context.span_id
    host, port = address.split(":")
    [(_, request_id)] = world.calls
    assert span.kind == SpanKind.CLIENT
    assert span.name == f"{ROLLOUT}/GetServerInfo"
    assert dict(span.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": ROLLOUT,
        "rpc.method": "GetServerInfo",
        "rpc.grpc.status_code": 0,
        "server.address": host,
        "server.port": int(port),
        "tandem.request_id": request_id,
    }
    assert world.traceparents == [traceparent(span)]


def test_the_page_names_every_span_and_every_attribute():
    package = Path(tracing.__file__).parent
    code = {file.name: file.read_text() for file in package.rglob("*.py")}
    span = r'(?:tracing\.spanned|tracing\.span|clock\.phase)\("(\w+)"'
    spans = set(re.findall(span, "".join(code.values())))
    attribute = r'"((?:rpc|server|error|tandem)\.\w+(?:\.\w+)*)"'
    files = ("tracing.py", "loop.py", "driver.py")
    attributes = set(re.findall(attribute, "".join(code[name] for name in files)))
    assert {"step", "generate", "checkpoint"} < spans
    assert {"rpc.grpc.status_code", "tandem.step", "error.type"} < attributes
    page = (Path(__file__).parents[3] / "docs/operations/tracing.md").read_text()
    table = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\|.*", page, re.MULTILINE))))
    assert spans | attributes <= table


def test_the_program_of_the_page_traces_its_call_in_its_span(exporter, address):
    page = (Path(__file__).parents[3] / "docs/operations/tracing.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:7701" in program
    exec(program.replace("127.0.0.1:7701", address), {})
    assert tree(exporter.get_finished_spans()) == [["draw", [f"{ROLLOUT}/Generate"]]]


def test_every_attempt_of_a_call_is_a_span_with_its_error(exporter, address, world):
    world.failures = [fakes.error_status(14, "going away"), fakes.error_status(14, "going away")]
    with TrainerClient(address, retry=RetryPolicy(initial_seconds=0.01)) as client:
        client.info()
    first, second, third = exporter.get_finished_spans()
    assert len({span.attributes["tandem.request_id"] for span in (first, second, third)}) == 1
    assert world.traceparents == [traceparent(span) for span in (first, second, third)]
    for span in (first, second):
        assert span.attributes["rpc.grpc.status_code"] == 14
        assert span.attributes["error.type"] == "UNAVAILABLE"
        assert span.status.status_code == StatusCode.ERROR
        assert span.status.description == "going away"
    assert third.status.status_code == StatusCode.UNSET
    assert third.attributes["rpc.grpc.status_code"] == 0


def test_the_reason_of_a_failure_is_an_attribute(exporter, address, world):
    world.failures = [fakes.error_status(9, "stale", reason="STALE_POLICY_VERSION")]
    with TrainerClient(address) as client, pytest.raises(FailedPreconditionError):
        client.info()
    [span] = exporter.get_finished_spans()
    assert span.attributes["tandem.reason"] == "STALE_POLICY_VERSION"
    [event] = span.events
    assert event.attributes["exception.type"] == "tandem.errors.FailedPreconditionError"


def test_a_stream_is_a_span_until_its_last_response(exporter, address):
    with RolloutClient(address) as client:
        client.generate([PROMPT])
        [done] = exporter.get_finished_spans()
        assert done.attributes["rpc.grpc.status_code"] == 0
        exporter.clear()
        with client.open_stream() as stream:
            # One of its two samples is not finished when the stream is left.
            stream.submit([dataclasses.replace(PROMPT, num_samples=2).named(0)])
            next(iter(stream))
            assert not exporter.get_finished_spans()
        [closed] = exporter.get_finished_spans()
        assert closed.attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
        # The caller gave the call up: that is no error.
        assert closed.status.status_code == StatusCode.UNSET


def test_a_stream_that_breaks_is_an_error(exporter, address, world):
    world.cut_streams = 1
    client = RolloutClient(address, retry=ONCE)
    with client, pytest.raises(UnavailableError):
        client.generate([PROMPT])
    [span] = exporter.get_finished_spans()
    assert span.attributes["rpc.grpc.status_code"] == 14
    assert span.status.status_code == StatusCode.ERROR


async def test_asyncio_clients_make_the_same_spans(exporter, address, world):
    async with AsyncTrainerClient(address) as trainer, AsyncRolloutClient(address) as rollout:
        with tracing.span("work"):
            await asyncio.gather(trainer.info(), rollout.info(), rollout.generate([PROMPT]))
        world.failures = [fakes.error_status(9, "no")]
        # A stream's status is lost now and then: https://github.com/grpc/grpc/issues/36066
        with pytest.raises(FailedPreconditionError):
            await rollout.info()
    *calls, work, failed = exporter.get_finished_spans()
    assert {span.name for span in calls} == {
        f"{TRAINER}/GetServerInfo",
        f"{ROLLOUT}/GetServerInfo",
        f"{ROLLOUT}/Generate",
    }
    assert {parent_id(span) for span in calls} == {work.context.span_id}
    assert failed.attributes["rpc.grpc.status_code"] == 9


def test_calls_of_several_rollout_servers_belong_to_the_span_of_the_caller(
    exporter, address, world
):
    # Neither takes over what the other has not begun.
    world.on_batch = lambda: fakes.wait_until(lambda: len(world.batches) == 2)
    pool = fakes.pool(address, address)
    with tracing.span("generate"):
        pool.generate([PROMPT, PROMPT])
    pool.close()
    *calls, generate = exporter.get_finished_spans()
    assert sorted(span.name for span in calls) == [
        *[f"{ROLLOUT}/Generate"] * 2,
        *[f"{WEIGHTS}/GetVersion"] * 2,
    ]
    assert {parent_id(span) for span in calls} == {generate.context.span_id}


def test_a_step_that_fails_is_an_error_with_what_was_saved_in_it(exporter, run_file, world):
    def fail(samples):
        if world.version == 1:
            world.failures = [fakes.error_status(13, "broken")]

    world.on_samples = fail
    tandem("train", run_file, "checkpoint.every=0", check=1)
    spans = exporter.get_finished_spans()
    steps = [span for span in spans if span.name == "step"]
    assert [span.status.status_code for span in steps] == [StatusCode.UNSET, StatusCode.ERROR]
    [trace] = [one for one in tree(spans) if one[0] == "step"][1:]
    assert trace[-1][0] == "checkpoint"


def test_without_a_collector_nothing_of_opentelemetry_is_imported(run_file, address):
    program = f"""
import sys
from tandem.cli import app as cli
from tandem.rpc.client import RolloutClient
with RolloutClient("{address}") as client:
    client.info()
sys.argv = ["tandem", "train", "{run_file}", "steps=1"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_tracing_calls_carry_no_context(environment, address, world):
    environment(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_SDK_DISABLED="true")
    with RolloutClient(address) as client:
        client.info()
    assert world.traceparents == [None]


def test_a_protocol_that_is_not_there_is_refused_by_name(environment, address):
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    environment(**collector, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    with RolloutClient(address) as client, pytest.raises(ConfigError) as raised:
        client.info()
    assert raised.value.message.startswith("OTEL_EXPORTER_OTLP_PROTOCOL: grpc")


def test_a_missing_package_is_named_with_its_command(environment, address, monkeypatch):
    environment(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with RolloutClient(address) as client, pytest.raises(ConfigError) as raised:
        client.info()
    assert raised.value.message.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: the package")
    assert raised.value.hint == "pip install opentelemetry-sdk"


@pytest.fixture
def collector():
    """The URL of an OTLP collector and the requests that it received."""
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def train_with(run_file, **variables):
    command = [sys.executable, "-m", "tandem", "train", str(run_file), "steps=1"]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def test_a_run_exports_its_spans_to_the_collector_of_the_environment(run_file, collector, world):
    url, received = collector
    done = train_with(run_file, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    assert {path for path, _ in received} == {"/v1/traces"}
    resources = [one for _, request in received for one in request.resource_spans]
    attributes = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert attributes["service.name"] == "tandem-client"
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    names = Counter(span.name for span in spans)
    assert names["step"] == names["train"] == names[f"{TRAINER}/TrainStep"] == 1
    exported = {(span.trace_id.hex(), span.span_id.hex()) for span in spans}
    assert {tuple(one.split("-")[1:3]) for one in world.traceparents} <= exported


def test_the_name_of_the_service_can_be_another(run_file, collector):
    url, received = collector
    variables = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/own", "OTEL_SERVICE_NAME": "mine"}
    assert train_with(run_file, **variables).returncode == 0
    [path] = {path for path, _ in received}
    assert path == "/own"
    resource = received[0][1].resource_spans[0].resource
    assert {one.key: one.value.string_value for one in resource.attributes}[
        "service.name"
    ] == "mine"


def test_a_collector_that_is_not_there_costs_the_run_nothing_but_a_warning(run_file, tmp_path):
    nobody = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    done = train_with(run_file, **nobody)
    assert done.returncode == 0, done.stderr
    assert "Failed to export span" in done.stderr
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1
