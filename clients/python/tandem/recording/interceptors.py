"""gRPC interceptors that record the calls of a process's clients.

An interceptor sees messages, not their bytes: a message is recorded as protobuf serializes it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from tandem.recording.files import CallRecorder, Recorder


def interceptors(path: str, target: str, *, asynchronous: bool) -> Sequence[Any]:
    """Returns the interceptors of a channel to `target`, which record into the file at `path`.

    Raises ConfigError if the file is no recording.
    """
    # Two recorders of one file would give the same names to different calls.
    with _making_recorder:
        recorder = _recorder(path)
    if asynchronous:
        # gRPC takes an asyncio interceptor for one kind of method.
        return [kind(recorder, target) for kind in _ASYNCHRONOUS]
    return [_Interceptor(recorder, target)]


_making_recorder = threading.Lock()


@functools.lru_cache(maxsize=1)
def _recorder(path: str) -> Recorder:
    """Returns the recorder that all clients of this process share."""
    return Recorder(Path(path))


class _Recording:
    """The beginning of a call, for both kinds of interceptor."""

    def __init__(self, recorder: Recorder, target: str) -> None:
        self._recorder = recorder
        self._target = target

    def _start(self, details: Any) -> CallRecorder:
        method = details.method
        if isinstance(method, bytes):  # of an asyncio channel
            method = method.decode()
        return self._recorder.start(self._target, method, details.timeout, details.metadata)


class _Interceptor(
    _Recording,
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def _reply(self, continuation: Any, details: Any, request: Any) -> Any:
        call = self._start(details)
        with _recorded_failure(call):
            outcome = continuation(details, _sent(call, request))
            reply = outcome.result()
        _succeeded(call, reply)
        return outcome

    def _responses(self, continuation: Any, details: Any, request: Any) -> Any:
        call = self._start(details)
        return _Responses(call, continuation(details, _sent(call, request)))

    intercept_unary_unary = intercept_stream_unary = _reply
    intercept_unary_stream = intercept_stream_stream = _responses


class _Responses:
    """The responses of a synchronous call, recorded when they are read."""

    def __init__(self, call: CallRecorder, responses: Any) -> None:
        self._call = call
        self._responses = responses

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _recorded_failure(self._call):
            message = next(self._responses, None)
        if message is None:
            self._call.end(grpc.StatusCode.OK)
            raise StopIteration
        self._call.response(message.SerializeToString())
        return message

    def cancel(self) -> None:
        self._responses.cancel()
        self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._responses, name)


class _AsyncRecording(_Recording):
    async def _reply(self, continuation: Any, details: Any, request: Any) -> Any:
        call = self._start(details)
        with _recorded_failure(call):
            started = await continuation(details, _sent(call, request, asynchronous=True))
            reply = await started
        _succeeded(call, reply)
        return started

    async def _responses(self, continuation: Any, details: Any, request: Any) -> Any:
        call = self._start(details)
        started = await continuation(details, _sent(call, request, asynchronous=True))
        # Called within cancel().
        started.add_done_callback(lambda ended: ended.cancelled() and call.cancel())
        return _read(call, started)


class _UnaryUnary(_AsyncRecording, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _AsyncRecording._reply


class _UnaryStream(_AsyncRecording, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _AsyncRecording._responses


class _StreamUnary(_AsyncRecording, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _AsyncRecording._reply


class _StreamStream(_AsyncRecording, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _AsyncRecording._responses


_ASYNCHRONOUS = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)


async def _read(call: CallRecorder, responses: Any) -> AsyncIterator[Any]:
    with _recorded_failure(call):
        async for message in responses:
            call.response(message.SerializeToString())
            yield message
    call.end(grpc.StatusCode.OK)


def _sent(call: CallRecorder, request: Any, *, asynchronous: bool = False) -> Any:
    """Returns the request or the iterator of requests, which are recorded when they are sent."""
    if not isinstance(request, Message):
        return (_async_requests if asynchronous else _requests)(call, request)
    call.request(request.SerializeToString())
    call.half_close()
    return request


def _requests(call: CallRecorder, messages: Any) -> Iterator[Any]:
    for message in messages:
        call.request(message.SerializeToString())
        yield message
    call.half_close()


async def _async_requests(call: CallRecorder, messages: Any) -> AsyncIterator[Any]:
    if hasattr(messages, "__aiter__"):
        async for message in messages:
            call.request(message.SerializeToString())
            yield message
        call.half_close()
    else:
        for message in _requests(call, messages):
            yield message


@contextmanager
def _recorded_failure(call: CallRecorder) -> Iterator[None]:
    """Records the end of a call that failed, or was given up."""
    try:
        yield
    except grpc.RpcError as error:
        call.end(error.code(), error.details(), error.trailing_metadata())
        raise
    except BaseException:
        call.cancel()
        raise


def _succeeded(call: CallRecorder, reply: Message) -> None:
    """Records the only reply of a call, and its end."""
    call.response(reply.SerializeToString())
    call.end(grpc.StatusCode.OK)
