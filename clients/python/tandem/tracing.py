"""Spans of a client's work, exported with OpenTelemetry's SDK to a collector; off by default.

Tracing is on where the standard variable OTEL_EXPORTER_OTLP_ENDPOINT, or its sibling for traces
alone, names a collector, or where a program hands its own tracer provider to use(). Only then are
the packages of OpenTelemetry imported, and do calls carry `traceparent`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, Self, TypeVar

import grpc

from tandem.errors import ConfigError, RpcError
from tandem.utils.optional import optional_module

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Variables for traces alone come before those for all signals.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
# The resource attribute service.name, unless OTEL_SERVICE_NAME sets it.
SERVICE_NAME = "tandem-client"

_lock = threading.Lock()
# Empty until the first span; then the tracer alone, or None while tracing is off.
_chosen: list[Any] = []


def use(provider: Any) -> None:
    """Makes the spans of this process with `provider`, an opentelemetry.trace.TracerProvider.

    None turns tracing off, whatever the environment says.
    """
    _chosen[:] = [None if provider is None else provider.get_tracer("tandem")]


def span(name: str, attributes: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Returns a context manager: a span that lasts as long as its block.

    The spans and calls of the block are its children. An exception that leaves the block is
    recorded and makes the span an error.

    Raises ConfigError if the environment asks for tracing that this process cannot do.
    """
    tracer = _tracer()
    if tracer is None:
        return nullcontext()
    return tracer.start_as_current_span(name, attributes=attributes)


def spanned(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Returns a decorator: every call of the function is a span."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with span(name):
                return function(*args, **kwargs)

        return run

    return decorate


class RpcSpan:
    """The span of one attempt of a call, by OpenTelemetry's conventions for RPC clients.

    A context manager, which ends the span; end() may have ended it before.

    Attributes:
        metadata: what the call sends so that the server knows the span (W3C Trace Context); empty
            while tracing is off.
    """

    metadata: tuple[tuple[str, str], ...] = ()

    def __init__(self, address: str, service: str, method: str, request_id: str) -> None:
        tracer = _tracer()
        self._span = None
        if tracer is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        host, _, port = address.rpartition(":")
        place = {"server.address": host, "server.port": int(port)} if port.isdigit() else {}
        self._span = tracer.start_span(
            f"{service}/{method}",
            kind=trace.SpanKind.CLIENT,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "tandem.request_id": request_id,
                **place,
            },
        )
        carrier: dict[str, str] = {}
        context = trace.set_span_in_context(self._span)
        TraceContextTextMapPropagator().inject(carrier, context)
        self.metadata = tuple(carrier.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span, if it has not ended: with a failure, or with success.

        An `error` other than RpcError left the call open, which cancels it.
        """
        ending, self._span = self._span, None
        if ending is None:
            return
        code = grpc.StatusCode.OK
        if error is not None:
            from opentelemetry.trace import StatusCode

            code = error.code if isinstance(error, RpcError) else grpc.StatusCode.CANCELLED
            ending.set_attribute("error.type", code.name)
            if isinstance(error, RpcError) and error.reason:
                ending.set_attribute("tandem.reason", error.reason)
            ending.record_exception(error)
            ending.set_status(StatusCode.ERROR, getattr(error, "message", None) or repr(error))
        ending.set_attribute("rpc.grpc.status_code", code.value[0])
        ending.end()

    def cancel(self) -> None:
        """Ends the span, if it has not ended, of a call that its caller gave up."""
        if self._span is not None:
            self._span.set_attribute("rpc.grpc.status_code", grpc.StatusCode.CANCELLED.value[0])
            self._span.end()
            self._span = None


def _tracer() -> Any:
    """Returns the tracer of this process, None while tracing is off."""
    if not _chosen:
        with _lock:
            if not _chosen:
                use(_provider_of_environment())
    return _chosen[0]


def _first_set(variables: Sequence[str]) -> str | None:
    """Returns the first of these variables of the environment that is set."""
    return next((name for name in variables if os.environ.get(name)), None)


def _provider_of_environment() -> Any:
    """Returns a tracer provider that exports to the collector in the environment, if one is."""
    endpoint, protocol = map(_first_set, (ENDPOINT_VARIABLES, PROTOCOL_VARIABLES))
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if protocol is not None and os.environ[protocol] != PROTOCOL:
        raise ConfigError(
            f"{protocol}: {os.environ[protocol]} is not supported",
            hint=f"set {protocol}={PROTOCOL}; a collector listens for it on port 4318",
        )
    sdk = optional_module("opentelemetry.sdk.trace", endpoint, "opentelemetry-sdk")
    exporter = optional_module(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        endpoint,
        "opentelemetry-exporter-otlp-proto-http",
    )
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from tandem import __version__

    own = Resource.create({"service.name": SERVICE_NAME, "service.version": __version__})
    # Resource.create() prefers its argument to the environment's names.
    provider = sdk.TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter()))
    return provider
