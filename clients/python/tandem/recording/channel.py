"""Channels that record their calls, for the clients of a process whose calls are recorded.

A stub makes its methods with four functions of a channel. Here these functions hand the channel the
bytes of the messages and record them on the way. Health checks are not recorded.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc

from tandem.recording.files import CallRecorder, Metadata, Recorder
from tandem.rpc.transport import RECORD_VARIABLE

Serialize = Callable[[Any], bytes]
Deserialize = Callable[[bytes], Any]


def recorded(channel: Any, target: str, *, asynchronous: bool = False) -> Any:
    """Returns `channel`, which records if the environment variable TANDEM_RECORD names a file.

    `channel` has the functions of a grpc.Channel or, if `asynchronous`, of a grpc.aio.Channel.
    Raises ConfigError if the file is no recording.
    """
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return channel
    kind = _AsyncRecordedChannel if asynchronous else _RecordedChannel
    # Two recorders of one file would give the same names to different calls.
    with _making_recorder:
        recorder = _recorder(path)
    return kind(channel, recorder, target)


_making_recorder = threading.Lock()


@functools.lru_cache(maxsize=1)
def _recorder(path: str) -> Recorder:
    """Returns the recorder that all clients of this process share."""
    return Recorder(Path(path))


def is_recorded(method: str) -> bool:
    """Returns whether a recording has calls of `method`: those of gRPC's own services it has not.

    Health checks are repeated until a server answers, and reflection describes the contract.
    """
    return not method.startswith("/grpc.")


class _Channel:
    """The part of a channel that stubs and transports use."""

    # Start a call whose reply is one message, or a stream.
    _reply: ClassVar[Callable[..., Any]]
    _responses: ClassVar[Callable[..., Any]]

    def __init__(self, channel: Any, recorder: Recorder, target: str) -> None:
        self._channel = channel
        self._recorder = recorder
        self._target = target
        self.unary_unary = functools.partial(self._method, "unary_unary")
        self.unary_stream = functools.partial(self._method, "unary_stream")
        self.stream_unary = functools.partial(self._method, "stream_unary")
        self.stream_stream = functools.partial(self._method, "stream_stream")

    def close(self) -> Any:
        """Closes the channel; to be awaited for an asyncio channel."""
        return self._channel.close()

    def _method(
        self,
        kind: str,
        path: str,
        request_serializer: Serialize,
        response_deserializer: Deserialize,
        **options: Any,
    ) -> Callable[..., Any]:
        make = getattr(self._channel, kind)
        if not is_recorded(path):
            return make(path, request_serializer, response_deserializer, **options)
        # Without serializers gRPC takes and gives bytes.
        method = make(path, None, None, **options)
        take, _, give = kind.partition("_")
        start = self._reply if give == "unary" else self._responses

        def begin(
            request: Any, timeout: float | None = None, metadata: Metadata | None = None
        ) -> Any:
            call = self._recorder.start(self._target, path, timeout, metadata)
            if take == "unary":
                sent = request_serializer(request)
                call.request(sent)
                call.half_close()
            else:
                sent = self._requests(call, request, request_serializer)
            started = functools.partial(method, timeout=timeout, metadata=metadata)
            return start(started, call, sent, response_deserializer)

        return begin

    @staticmethod
    def _requests(call: CallRecorder, messages: Any, serialize: Serialize) -> Any:
        """Yields the bytes of the messages as the call reads them."""
        raise NotImplementedError


class _RecordedChannel(_Channel):
    @staticmethod
    def _requests(
        call: CallRecorder, messages: Iterable[Any], serialize: Serialize
    ) -> Iterator[bytes]:
        for message in messages:
            data = serialize(message)
            call.request(data)
            yield data
        call.half_close()

    @staticmethod
    def _reply(method: Any, call: CallRecorder, sent: Any, deserialize: Deserialize) -> Any:
        with _recorded_failure(call):
            reply = method(sent)
        return _succeeded(call, reply, deserialize)

    @staticmethod
    def _responses(method: Any, call: CallRecorder, sent: Any, deserialize: Deserialize) -> Any:
        return _Responses(call, method(sent), deserialize)


class _AsyncRecordedChannel(_Channel):
    @staticmethod
    async def _requests(
        call: CallRecorder, messages: Any, serialize: Serialize
    ) -> AsyncIterator[bytes]:
        async for message in _asynchronous(messages):
            data = serialize(message)
            call.request(data)
            yield data
        call.half_close()

    @staticmethod
    async def _reply(method: Any, call: CallRecorder, sent: Any, deserialize: Deserialize) -> Any:
        with _recorded_failure(call):
            reply = await method(sent)
        return _succeeded(call, reply, deserialize)

    @staticmethod
    def _responses(method: Any, call: CallRecorder, sent: Any, deserialize: Deserialize) -> Any:
        return _AsyncResponses(call, method(sent), deserialize)


class _Responses:
    """The responses of a call, recorded when they are read."""

    def __init__(self, call: CallRecorder, responses: Any, deserialize: Deserialize) -> None:
        self._call = call
        self._responses = responses
        self._deserialize = deserialize

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            data = next(self._responses)
        except StopIteration:
            self._call.end(grpc.StatusCode.OK)
            raise
        except grpc.RpcError as error:
            _failed(self._call, error)
            raise
        self._call.response(data)
        return self._deserialize(data)

    def cancel(self) -> None:
        """Cancels the call unless it ended."""
        self._responses.cancel()
        self._call.cancel()


class _AsyncResponses:
    """The responses of an asyncio call, recorded when they are read."""

    def __init__(self, call: CallRecorder, responses: Any, deserialize: Deserialize) -> None:
        self._call = call
        self._responses = responses
        self._deserialize = deserialize
        self._iterator = aiter(responses)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            data = await anext(self._iterator)
        except StopAsyncIteration:
            self._call.end(grpc.StatusCode.OK)
            raise
        except grpc.RpcError as error:
            _failed(self._call, error)
            raise
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        self._call.response(data)
        return self._deserialize(data)

    def cancel(self) -> None:
        """Cancels the call unless it ended."""
        self._responses.cancel()
        self._call.cancel()


@contextmanager
def _recorded_failure(call: CallRecorder) -> Iterator[None]:
    """Records the end of a call of which no reply comes: it failed, or was given up."""
    try:
        yield
    except grpc.RpcError as error:
        _failed(call, error)
        raise
    except BaseException:
        call.cancel()
        raise


def _succeeded(call: CallRecorder, reply: bytes, deserialize: Deserialize) -> Any:
    """Records the only reply of a call and its end; returns the message."""
    call.response(reply)
    call.end(grpc.StatusCode.OK)
    return deserialize(reply)


def _failed(call: CallRecorder, error: Any) -> None:
    call.end(error.code(), error.details(), error.trailing_metadata())


async def _asynchronous(messages: Any) -> AsyncIterator[Any]:
    if hasattr(messages, "__aiter__"):
        async for message in messages:
            yield message
    else:
        for message in messages:
            yield message
