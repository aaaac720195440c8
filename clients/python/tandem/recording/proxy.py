"""A proxy that records the calls of any client: it forwards every method of one server as bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Self

import grpc

from tandem._proto.weights.v1 import weights_pb2
from tandem.errors import ConfigError
from tandem.recording.files import MAX_MESSAGE_BYTES, CallRecorder, Recorder
from tandem.rpc.calls import CriticCalls, RolloutCalls, TrainerCalls
from tandem.rpc.channel import open_channel
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.rpc.transport import CHANNEL_OPTIONS, OWN_CONNECTION

# Most calls at a time; further ones wait. Every call has a thread of its own.
_MAX_CALLS = 256

# gRPC gives a call without a deadline one in the far future.
_NO_DEADLINE_SECONDS = 1e9

# Keys that gRPC puts into metadata by itself, besides those that begin with "grpc-".
_OWN_KEYS = frozenset({"user-agent", "content-type", "te"})

_BEGIN_UPDATE = "/tandem.weights.v1.WeightService/BeginUpdate"

_STREAMING = RolloutCalls.streaming | TrainerCalls.streaming | CriticCalls.streaming

_LIMITS = {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
}


class RecordingProxy(grpc.GenericRpcHandler):
    """Forwards the calls at a port to `target` and records them; a context manager.

    Metadata, deadlines, cancellations, messages, status and error details pass unchanged, except
    that a sender's file of weights is not offered to the receiver. A call holds one message in each
    direction, because the next one is read when the last one is taken.

    The port itself has neither TLS nor tokens: where `credentials` (by default those of the
    environment) name some, every process of this machine can call the server with them.

    It is no asyncio server: a channel of grpc.aio may report INTERNAL instead of the status of a
    server that ended a call before it took all messages.

    Attributes:
        port: the port at 127.0.0.1, open inside the context.
    """

    def __init__(
        self,
        target: str,
        port: int,
        recorder: Recorder,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.port = port
        self._target = target
        self._recorder = recorder
        self._credentials = credentials.or_else(Credentials.from_environment())

    def __enter__(self) -> Self:
        # Without so_reuseport 0, two proxies could share a port.
        options = [*_LIMITS.items(), ("grpc.so_reuseport", 0)]
        threads = futures.ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="proxy")
        self._server = grpc.server(threads, handlers=[self], options=options)
        try:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        except RuntimeError:
            raise ConfigError(f"--port {self.port}: the port is not free") from None
        channel_options = list((dict(CHANNEL_OPTIONS) | _LIMITS).items())
        # As a client has them: a call with one reply never waits for streams that are open.
        self._channel, self._streams = (
            open_channel(self._target, self._credentials, [*channel_options, *own])
            for own in ((), (OWN_CONNECTION,))
        )
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(grace=None).wait()
        self._channel.close()
        self._streams.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Returns the handler of a method. On the wire every method is a pair of streams."""

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._forward(details.method, requests, context)

        return grpc.stream_stream_rpc_method_handler(forward)

    def _forward(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata()
            if key not in _OWN_KEYS and not key.startswith("grpc-")
        ]
        timeout = context.time_remaining()
        if timeout is not None and timeout > _NO_DEADLINE_SECONDS:
            timeout = None
        record = self._recorder.start(self._target, method, timeout, metadata)
        stopped = threading.Event()
        is_stream = method.rpartition("/")[2] in _STREAMING
        call = (self._streams if is_stream else self._channel).stream_stream(method)(
            _recorded_requests(_replayable(method, requests), record, stopped),
            timeout=timeout,
            metadata=metadata,
        )

        def stop() -> None:
            call.cancel()
            stopped.set()

        # Called at the end, and when the client goes away or its deadline passes.
        if not context.add_callback(stop):
            stop()
        try:
            try:
                context.send_initial_metadata(tuple(call.initial_metadata()))
                for message in call:
                    record.response(message)
                    yield message
            except grpc.RpcError:
                pass  # The status says it.
        finally:
            call.cancel()
            code, details, trailing = call.code(), call.details(), call.trailing_metadata()
            late = timeout is not None and context.time_remaining() <= 0
            if late and code == grpc.StatusCode.CANCELLED:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
            record.end(code, details, trailing)
        context.set_trailing_metadata(tuple(trailing or ()))
        context.set_code(code)
        context.set_details(details or "")


def _replayable(method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
    """Takes the file from an offer of weights: their bytes shall be in the recording."""
    for message in requests:
        if method == _BEGIN_UPDATE:
            begin = weights_pb2.BeginUpdateRequest.FromString(message)
            begin.ClearField("shared_file")
            begin.ClearField("gpu_memory")
            begin.ClearField("gpu_memories")
            message = begin.SerializeToString()
        yield message


def _recorded_requests(
    requests: Iterator[bytes], record: CallRecorder, stopped: threading.Event
) -> Iterator[bytes]:
    try:
        for message in requests:
            record.request(message)
            yield message
    except grpc.RpcError:
        # The client went away. The server must not take that for a half-close.
        stopped.wait()
        return
    record.half_close()
