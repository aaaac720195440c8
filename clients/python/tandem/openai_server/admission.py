"""Admission: bounds on the requests at work, the bytes of their bodies and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from starlette.requests import Request

from tandem.openai_server import limits
from tandem.openai_server.errors import RequestError


class Admission:
    """The bounds of one server, which all its requests share.

    Attributes:
        streams: held by a request while its Generate call is open; others wait in order.
        scores: held during a Score call. A request that holds a stream may wait for it, as those
            that hold it wait for nothing.
        heavy: held while a long text or an image is turned into tokens: one at a time.
    """

    def __init__(self) -> None:
        self.streams = asyncio.Semaphore(limits.MAX_STREAMS)
        self.scores = asyncio.Semaphore(limits.MAX_SCORES)
        self.heavy = asyncio.Semaphore(1)
        self._requests = 0
        self._bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it is worked on; raises RequestError if there are too many."""
        if self._requests >= limits.MAX_REQUESTS:
            raise _busy(f"the server is working on {self._requests} requests")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Gives the body of a request, whose bytes count until the request is answered.

        Raises RequestError for a body that is too large, too many, or too slow.
        """
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self._bytes -= len(body)
            body.clear()  # The traceback of a refusal keeps it.

    async def _receive(self, request: Request, body: bytearray) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limits.MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(limits.BODY_SECONDS):
                async for part in request.stream():
                    if len(body) + len(part) > limits.MAX_BODY_BYTES:
                        raise _too_large()
                    if self._bytes + len(part) > limits.MAX_BODIES_BYTES:
                        raise _busy(f"the server holds {self._bytes} bytes of request bodies")
                    self._bytes += len(part)
                    body += part
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {limits.BODY_SECONDS} s",
                status=HTTPStatus.REQUEST_TIMEOUT,
            ) from None


def _busy(why: str) -> RequestError:
    return RequestError(
        why,
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code="server_busy",
        retry_after_seconds=limits.RETRY_SECONDS,
    )


def _too_large() -> RequestError:
    return RequestError(
        f"the body has more than {limits.MAX_BODY_BYTES} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    )
