"""A traced run finds the lines of its calls in the servers' logs, and the other way round."""

from __future__ import annotations

import harness
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tandem import tracing
from tandem.cluster.local import LocalCluster


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Receives the spans of this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_chosen", [])
    tracing.use(provider)
    return exporter


def ids(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def logged(running: LocalCluster, event: str) -> list[dict]:
    """The lines of all servers' logs about an event."""
    lines = [line for server in running.servers for line in harness.json_lines(server.log)]
    return [line for line in lines if line["event"] == event]


def test_log_lines_of_a_call_have_the_ids_of_its_span(fresh_pair, models, tmp_path, exporter):
    harness.run_on(fresh_pair, models, tmp_path, steps=2)
    spans = exporter.get_finished_spans()
    steps = {span.attributes["tandem.step"]: span for span in spans if span.name == "step"}
    calls = {span.attributes.get("tandem.request_id"): span for span in spans}
    trained = logged(fresh_pair, "train_step")
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        call = calls[line["request_id"]]
        assert call.name == "tandem.trainer.v1.TrainerService/TrainStep"
        assert (line["trace_id"], line["span_id"]) == ids(call)
        assert line["trace_id"] == ids(steps[line["step"]])[0]
    # The trainer passes the context on to the rollout server that it publishes to.
    committed = logged(fresh_pair, "weights_committed")
    assert [line["trace_id"] for line in committed] == [line["trace_id"] for line in trained]


def test_log_lines_of_a_call_without_a_span_have_no_ids(fresh_pair, models, tmp_path):
    harness.run_on(fresh_pair, models, tmp_path, steps=1)
    [line] = logged(fresh_pair, "train_step")
    assert "request_id" in line
    assert "trace_id" not in line
