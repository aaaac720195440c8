"""What every client shares: channel options, deadlines, request ids and the retry policy.

The policy is written once, as a loop over attempts; the synchronous and the asyncio channel differ
only in how they wait.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import REQUEST_ID_KEY, RpcError, from_rpc

Response = TypeVar("Response")

MAX_MESSAGE_BYTES = 256 << 20

# A dead peer is noticed within 50 seconds, also in the middle of a long call.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Retries are ours: they keep the request id.
    ("grpc.enable_retries", 0),
]

# Methods that fail where an earlier attempt succeeded: an export wants a directory of its own.
NOT_REPEATABLE = frozenset({"ExportModel"})


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which wait, a call is tried again.

    Tried again is what may pass by itself: UNAVAILABLE, and RESOURCE_EXHAUSTED where the server
    says how long to wait (it does when waiting helps). That is safe: a train step, a publication
    and a generated sample are functions of what is sent (request_id, version, seed). ExportModel
    alone is never repeated.
    """

    attempts: int = 4
    initial_seconds: float = 0.2
    maximum_seconds: float = 5.0

    def wait_before(self, attempt: int, error: RpcError) -> float | None:
        """Seconds to wait before attempt number `attempt` (from 1), or None to give up."""
        if attempt >= self.attempts or error.method in NOT_REPEATABLE or not _may_pass(error):
            return None
        backoff = min(self.maximum_seconds, self.initial_seconds * 2 ** (attempt - 1))
        return max(error.retry_after_seconds or 0.0, backoff * random.uniform(0.8, 1.2))


def _may_pass(error: RpcError) -> bool:
    if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_seconds is not None
    return error.code == grpc.StatusCode.UNAVAILABLE


class Call:
    """One call of a method, over all its attempts: it keeps its request id."""

    def __init__(self, address: str, role: str, method: str, timeout_seconds: float) -> None:
        self.address = address
        self.role = role
        self.method = method
        self.request_id = uuid.uuid4().hex
        self.timeout_seconds = timeout_seconds

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the stub."""
        return {
            "timeout": self.timeout_seconds,
            "metadata": ((REQUEST_ID_KEY, self.request_id),),
        }

    def failure(self, error: Any) -> RpcError:
        """The typed exception for a failed attempt."""
        return from_rpc(
            error,
            request_id=self.request_id,
            method=self.method,
            address=self.address,
            role=self.role,
        )


class ResponseStream(Generic[Response]):
    """Responses of a call that runs already. close(), or letting go of it, cancels the call."""

    def __init__(self, call: Call, responses: Any) -> None:
        self._call = call
        self._responses = responses

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        try:
            return next(self._responses)
        except grpc.RpcError as error:
            raise self._call.failure(error) from None

    def close(self) -> None:
        """Cancels the call unless it ended."""
        self._responses.cancel()

    def __del__(self) -> None:
        self.close()


class AsyncResponseStream(Generic[Response]):
    """Responses of a call that runs already. aclose(), or letting go of it, cancels the call."""

    def __init__(self, call: Call, responses: Any) -> None:
        self._call = call
        self._responses = responses
        self._iterator = aiter(responses)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        try:
            return await anext(self._iterator)
        except grpc.RpcError as error:
            raise self._call.failure(error) from None

    async def aclose(self) -> None:
        """Cancels the call unless it ended."""
        self._responses.cancel()

    def __del__(self) -> None:
        self._responses.cancel()


class _Endpoint:
    # What kind of server answers the calls: "rollout", "trainer", "critic"; "" if any may.
    role: ClassVar[str] = ""

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self.retry = retry or RetryPolicy()

    def _new_call(self, method: str, timeout_seconds: float | None) -> Call:
        return Call(self.address, self.role, method, timeout_seconds or self.timeout_seconds)


class Connection(_Endpoint):
    """A synchronous channel to one server. Thread-safe; a context manager."""

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds, retry=retry)
        self.channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        self.channel.close()

    def call(
        self,
        method: str,
        attempt: Callable[[dict[str, Any]], Response],
        timeout_seconds: float | None = None,
    ) -> Response:
        """Runs `attempt(options)` until it succeeds or the policy gives up."""
        call = self._new_call(method, timeout_seconds)
        number = 1
        while True:
            try:
                return attempt(call.options)
            except grpc.RpcError as error:
                failure = call.failure(error)
                wait = self.retry.wait_before(number, failure)
                if wait is None:
                    raise failure from None
            time.sleep(wait)
            number += 1

    def stream(
        self,
        method: str,
        start: Callable[[dict[str, Any]], Any],
        timeout_seconds: float | None = None,
    ) -> ResponseStream[Any]:
        """Starts `start(options)` and returns its responses. No retries."""
        call = self._new_call(method, timeout_seconds)
        return ResponseStream(call, start(call.options))

    def health(self, service: str = "", timeout_seconds: float = 5.0) -> str:
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNREACHABLE."""
        try:
            reply = self._health.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            return health_of_failure(error)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


class AsyncConnection(_Endpoint):
    """An asyncio channel to one server; an async context manager."""

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds, retry=retry)
        self.channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        await self.channel.close()

    async def call(
        self,
        method: str,
        attempt: Callable[[dict[str, Any]], Awaitable[Response]],
        timeout_seconds: float | None = None,
    ) -> Response:
        """Runs `attempt(options)` until it succeeds or the policy gives up."""
        call = self._new_call(method, timeout_seconds)
        number = 1
        while True:
            try:
                return await attempt(call.options)
            except grpc.RpcError as error:
                failure = call.failure(error)
                wait = self.retry.wait_before(number, failure)
                if wait is None:
                    raise failure from None
            await asyncio.sleep(wait)
            number += 1

    def stream(
        self,
        method: str,
        start: Callable[[dict[str, Any]], Any],
        timeout_seconds: float | None = None,
    ) -> AsyncResponseStream[Any]:
        """Starts `start(options)` and returns its responses. No retries."""
        call = self._new_call(method, timeout_seconds)
        return AsyncResponseStream(call, start(call.options))

    async def health(self, service: str = "", timeout_seconds: float = 5.0) -> str:
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNREACHABLE."""
        try:
            reply = await self._health.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            return health_of_failure(error)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def health_of_failure(error: Any) -> str:
    """What a failed health check says of the server."""
    unknown = error.code() == grpc.StatusCode.NOT_FOUND
    return "SERVICE_UNKNOWN" if unknown else "UNREACHABLE"
