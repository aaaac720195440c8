"""Common parts of the clients: channel options, deadlines and request ids.

Everything is written once, as coroutines over a Transport. AsyncConnection runs them under asyncio.
A Connection blocks instead of suspending, so blocking() turns its coroutines into plain functions.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pkgutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem._proto.blobs.v1 import blobs_pb2
from tandem._proto.types.v1 import vision_pb2
from tandem.errors import (
    REQUEST_ID_KEY,
    ClosedClientError,
    FailedPreconditionError,
    RpcError,
    UnavailableError,
    from_rpc,
)
from tandem.rpc.channel import open_channel, why_refused
from tandem.rpc.credentials import Credentials
from tandem.rpc.images import BLOB_MISSING, pixels_of
from tandem.rpc.retry import Retries, RetryPolicy
from tandem.tracing import RpcSpan

Response = TypeVar("Response")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

_log = logging.getLogger(__name__)

# Names the file into which the clients of a process record their calls (tandem.recording).
RECORD_VARIABLE = "TANDEM_RECORD"

# Most bytes of a message to a server; larger requests travel in several messages.
MAX_SEND_BYTES = 4 << 20
# Most bytes of a message from a server: a Score of MAX_SEND_BYTES one-byte ids under both models
# is answered with 8 bytes for each id.
MAX_RECEIVE_BYTES = 64 << 20

# Bytes of the pixels in a message of an upload.
BLOB_CHUNK_BYTES = 1 << 20

# A dead peer is noticed within 50 seconds, also in the middle of a long call.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    # The client itself retries, and keeps the request id.
    ("grpc.enable_retries", 0),
    # A server that is back, perhaps at another address of its name, is found within seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]

# Channels with this option share no connection with another one. A connection has at most 128 calls
# at a time, and a call beyond waits for one of them to end.
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)

# The request id of the calls that a context makes; without one each call has an id of its own.
CALLER_REQUEST_ID: ContextVar[str] = ContextVar("CALLER_REQUEST_ID")


@dataclass(frozen=True)
class Health:
    """The health of a server: SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNREACHABLE.

    Attributes:
        reason: why it is unreachable, "" otherwise.
        refused: whether TLS is the reason, so that waiting does not help.
    """

    status: str
    reason: str = ""
    refused: bool = False


class Call:
    """One call of a method, over all its attempts: it keeps its request id."""

    def __init__(
        self,
        address: str,
        role: str,
        method: str,
        timeout_seconds: float,
        credentials: Credentials,
    ) -> None:
        self.address = address
        self.role = role
        self.credentials = credentials
        self.method = method
        self.request_id = CALLER_REQUEST_ID.get(None) or uuid.uuid4().hex
        self.timeout_seconds = timeout_seconds

    def span(self, service: str) -> RpcSpan:
        """Starts the span of an attempt at a method of `service`."""
        return RpcSpan(self.address, service, self.method, self.request_id)

    def options(self, span: RpcSpan) -> dict[str, Any]:
        """Arguments of the stub for the attempt of this span."""
        _log.debug("%s: %s (request %s)", self.address, self.method, self.request_id)
        return {
            "timeout": self.timeout_seconds,
            "metadata": ((REQUEST_ID_KEY, self.request_id), *span.metadata),
        }

    def failure(self, error: Any) -> RpcError:
        """Returns the typed exception for a failed attempt."""
        failure = from_rpc(
            error,
            request_id=self.request_id,
            method=self.method,
            address=self.address,
            role=self.role,
        )
        if isinstance(failure, UnavailableError) and "failed to connect" in failure.message:
            refused = why_refused(failure.message, self.credentials, self.address)
            failure.hint = refused or failure.hint
            reason = _last_error(failure.message)
            failure.message = f"cannot connect to the server at {self.address}: {reason}"
        elif "errors resolving" in failure.message:
            reason = failure.message.rpartition(": ")[2].rstrip("]")
            failure.message = f"cannot find the host of {self.address}: {reason}"
        return failure


class ResponseStream(Generic[Response]):
    """The responses of a running call. close(), or dropping the last reference, cancels it."""

    def __init__(self, call: Call, span: RpcSpan, responses: Any) -> None:
        self._call = call
        self._span = span
        self._responses = responses

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        try:
            return next(self._responses)
        except StopIteration:
            self._span.end()
            raise
        except grpc.RpcError as error:
            failure = self._call.failure(error)
            self._span.end(failure)
            raise failure from None

    def close(self) -> None:
        """Cancels the call unless it ended."""
        self._responses.cancel()
        self._span.cancel()

    def __del__(self) -> None:
        self.close()


class AsyncResponseStream(Generic[Response]):
    """The responses of a running call. aclose(), or dropping the last reference, cancels it."""

    def __init__(self, call: Call, span: RpcSpan, responses: Any) -> None:
        self._call = call
        self._span = span
        self._responses = responses
        self._iterator = aiter(responses)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        try:
            return await anext(self._iterator)
        except StopAsyncIteration:
            self._span.end()
            raise
        except grpc.RpcError as error:
            failure = self._call.failure(error)
            self._span.end(failure)
            raise failure from None

    async def aclose(self) -> None:
        """Cancels the call unless it ended."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._responses.cancel()
        self._span.cancel()


class Transport:
    """A channel to one server, and the calls over it.

    Attributes:
        role: the kind of the server: "rollout", "trainer", "critic"; "" for any.
        default_address: the address at which a server of this kind listens by default.
        default_timeout_seconds: the default timeout of an attempt at a call.
        stubs: the stubs of the server's services, whose methods have different names.
        streaming: the methods with a stream of responses. They have a connection of their own: a
            call with one reply never waits for streams that are open, nor does a health check.
    """

    role: ClassVar[str] = ""
    default_address: ClassVar[str] = ""
    default_timeout_seconds: ClassVar[float] = 600.0
    stubs: ClassVar[tuple[type, ...]] = ()
    streaming: ClassVar[frozenset[str]] = frozenset()
    _asynchronous: ClassVar[bool]
    _response_stream: ClassVar[type]

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_seconds: float | None = None,
        retry: RetryPolicy | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Opens the channel. `credentials` are by default those of the environment.

        Raises CredentialsError for credentials that cannot be used.
        """
        self.address = self.default_address if address is None else address
        self.credentials = Credentials.from_environment() if credentials is None else credentials
        self.timeout_seconds = timeout_seconds or self.default_timeout_seconds
        self.retry = retry or RetryPolicy()
        # A channel connects with its first call.
        interceptors = _interceptors(self.address, asynchronous=self._asynchronous)
        self.channel, self._streams, self._checks = (
            open_channel(
                self.address,
                self.credentials,
                [*CHANNEL_OPTIONS, *own],
                interceptors,
                asynchronous=self._asynchronous,
            )
            for own in ((), (OWN_CONNECTION,), (OWN_CONNECTION,))
        )
        self._closed = False
        self._health = health_pb2_grpc.HealthStub(self._checks)
        self._methods: dict[str, Any] = {}
        self._services: dict[str, str] = {}
        for stub in self.stubs:
            methods = vars(stub(self.channel))
            streams = vars(stub(self._streams))
            self._methods |= methods
            self._methods |= {name: streams[name] for name in self.streaming & methods.keys()}
            self._services |= dict.fromkeys(methods, _service_of(stub))

    async def check_health(self, service: str = "", timeout_seconds: float = 5.0) -> Health:
        """Returns the server's health, or the reason why it is unreachable."""
        return await self._check_health(service, timeout_seconds)

    async def health(self, service: str = "", timeout_seconds: float = 5.0) -> str:
        """Returns SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNREACHABLE."""
        return (await self._check_health(service, timeout_seconds)).status

    async def _check_health(self, service: str, timeout_seconds: float) -> Health:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            with self._open():
                started = self._health.Check(request, timeout=timeout_seconds)
                reply = await self._reply(started)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return Health("SERVICE_UNKNOWN")
            refused = why_refused(error.details() or "", self.credentials, self.address)
            reason = refused or _why_unreachable(error, timeout_seconds)
            return Health("UNREACHABLE", reason, refused is not None)
        return Health(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    async def _call(self, method: str, request: Any, timeout_seconds: float | None = None) -> Any:
        """Returns the reply to one request, after as many attempts as the policy allows."""
        return await self._attempt(method, lambda: request, timeout_seconds)

    async def _send(
        self, method: str, messages: Iterable[Any], timeout_seconds: float | None = None
    ) -> Any:
        """Returns the reply to a stream of messages, which every attempt sends from the first."""
        messages = list(messages)
        return await self._attempt(method, lambda: iter(messages), timeout_seconds)

    async def _attempt(
        self, method: str, request: Callable[[], Any], timeout_seconds: float | None
    ) -> Any:
        call = self._new_call(method, timeout_seconds)

        async def once() -> Any:
            with call.span(self._services[method]) as span, self._open():
                try:
                    started = self._methods[method](request(), **call.options(span))
                    return await self._reply(started)
                except grpc.RpcError as error:
                    failure = call.failure(error)
                    span.end(failure)
                    raise failure from None

        return await self._retried(once)

    async def _retried(
        self,
        once: Callable[[], Coroutine[Any, Any, Result]],
        progress: Callable[[], int] = lambda: 0,
    ) -> Result:
        """Returns the result of the first attempt that succeeds; the policy says when to give up.

        `progress` counts what the attempts have brought so far.
        """
        retries, before = Retries(self.retry), progress()
        while True:
            try:
                result = await once()
                break
            except RpcError as error:
                failure = error
            if (now := progress()) > before:
                before = now
                retries.progress()
            told = retries.waiting
            if (wait := retries.wait_after(failure)) is None:
                raise failure
            if retries.waiting and not told:
                _log.warning(
                    "%s: %s: trying again, for up to %g s",
                    failure.method or self.address,
                    failure.message,
                    self.retry.seconds,
                )
            await self._sleep(wait)
        if retries.waiting:
            _log.warning("%s answers again", self.address)
        return result

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Raises ClosedClientError for a call of a closed client."""
        try:
            if self._closed:
                raise ClosedClientError(f"the client of {self.address} is closed")
            yield
        # gRPC's own errors, if another thread closes the channel meanwhile.
        except (ValueError, grpc.aio.UsageError):
            if not self._closed:
                raise
            raise ClosedClientError(f"the client of {self.address} is closed") from None

    async def _with_images(
        self,
        inputs: Iterable[vision_pb2.VisionInput],
        call: Callable[[], Coroutine[Any, Any, Result]],
    ) -> Result:
        """Makes a call that names images; uploads those that the server lacks before it.

        A server that restarts, or drops images meanwhile, gets them again.
        """
        digests = sorted({one.digest for one in inputs})
        if not digests:
            return await call()
        for _ in range(2):
            await self._upload(digests)
            try:
                return await call()
            except FailedPreconditionError as error:
                if error.reason != BLOB_MISSING:
                    raise
        await self._upload(digests)
        return await call()

    async def _upload(self, digests: Sequence[str]) -> None:
        """Uploads the pixels that the server lacks and the process has."""
        request = blobs_pb2.FindMissingBlobsRequest(digests=digests)
        for digest in (await self._call("FindMissingBlobs", request)).missing:
            pixels = pixels_of(digest)
            if pixels is not None:
                await self._send("UploadBlob", _upload_messages(digest, pixels))

    async def _collect(self, method: str, messages: Iterable[Any]) -> list[Any]:
        """Returns all responses of a stream, which every attempt asks for from the first."""
        messages = list(messages)

        async def once() -> list[Any]:
            responses: list[Any] = []
            await self._each(self._stream(method, iter(messages)), responses.append)
            return responses

        return await self._retried(once)

    def _stream(self, method: str, messages: Any, timeout_seconds: float | None = None) -> Any:
        """Starts a call and returns its responses. No retries."""
        call = self._new_call(method, timeout_seconds)
        span = call.span(self._services[method])
        with self._open():
            started = self._methods[method](messages, **call.options(span))
        return self._response_stream(call, span, started)

    def _new_call(self, method: str, timeout_seconds: float | None) -> Call:
        timeout = timeout_seconds or self.timeout_seconds
        return Call(self.address, self.role, method, timeout, self.credentials)

    # The differences between the two kinds of channel.

    async def _reply(self, started: Any) -> Any:
        """Returns the reply of a unary call that the stub started."""
        raise NotImplementedError

    async def _each(self, responses: Any, take: Callable[[Any], None]) -> None:
        """Gives `take` every response; cancels the call when it raises."""
        raise NotImplementedError

    async def _sleep(self, seconds: float) -> None:
        raise NotImplementedError


def _upload_messages(digest: str, pixels: memoryview) -> Iterator[blobs_pb2.UploadBlobRequest]:
    """Yields the messages of UploadBlob."""
    header = blobs_pb2.BlobHeader(digest=digest, total_bytes=len(pixels))
    yield blobs_pb2.UploadBlobRequest(header=header)
    for first in range(0, len(pixels), BLOB_CHUNK_BYTES):
        chunk = bytes(pixels[first : first + BLOB_CHUNK_BYTES])
        yield blobs_pb2.UploadBlobRequest(chunk=chunk)


def _service_of(stub: type) -> str:
    """Returns the full name of a stub's service, such as tandem.rollout.v1.RolloutService."""
    package = stub.__module__.removeprefix("tandem._proto.").rpartition(".")[0]
    return f"tandem.{package}.{stub.__name__.removesuffix('Stub')}"


def _why_unreachable(error: Any, timeout_seconds: float) -> str:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in {timeout_seconds:g} s"
    return _last_error(error.details() or error.code().name)


def _last_error(details: str) -> str:
    """Returns what happened last, which gRPC puts at the end.

    Its texts look like "...; last error: UNKNOWN: ipv4:127.0.0.1:1: ...".
    """
    last = details.rpartition("last error: ")[2]
    return last.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ")


def _interceptors(address: str, *, asynchronous: bool) -> Sequence[Any]:
    """Returns the interceptors of a channel: `tandem record` has some, else none."""
    file = os.environ.get(RECORD_VARIABLE)
    if not file:
        return ()
    recording = pkgutil.resolve_name("tandem.recording.interceptors:interceptors")
    return recording(file, address, asynchronous=asynchronous)


def blocking(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Returns `method` as a plain function, for a class over Connection."""

    @functools.wraps(method)
    def run(self: Connection, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        coroutine = method(self, *args, **kwargs)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError(f"{method.__qualname__} was suspended on a synchronous channel")

    return run


class Connection(Transport):
    """A synchronous channel to one server. Thread-safe; a context manager."""

    _asynchronous = False
    _response_stream = ResponseStream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channels; running calls are cancelled, and later ones refused."""
        self._closed = True
        for channel in (self.channel, self._streams, self._checks):
            channel.close()

    check_health = blocking(Transport.check_health)
    health = blocking(Transport.health)

    async def _reply(self, started: Any) -> Any:
        return started

    async def _each(self, responses: Any, take: Callable[[Any], None]) -> None:
        try:
            for response in responses:
                take(response)
        finally:
            responses.close()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class AsyncConnection(Transport):
    """An asyncio channel to one server; an async context manager."""

    _asynchronous = True
    _response_stream = AsyncResponseStream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channels; running calls are cancelled, and later ones refused."""
        self._closed = True
        for channel in (self.channel, self._streams, self._checks):
            await channel.close()

    async def _reply(self, started: Any) -> Any:
        return await started

    async def _each(self, responses: Any, take: Callable[[Any], None]) -> None:
        try:
            async for response in responses:
                take(response)
        finally:
            await responses.aclose()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
