"""Requests that are answered later: each has an id, under which its answer is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from tandem.errors import TandemError
from tandem.openai_server.errors import RequestError
from tandem.tinker_server import limits

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """The answer of a request, in the forms in which the SDK reads it."""

    def proto(self) -> bytes | None:
        """Returns the message; None if the answer has none."""

    def json(self) -> dict[str, object]:
        """Returns the JSON object."""

    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""


@dataclass
class _Request:
    digest: str
    task: asyncio.Task[Answer]
    size: int = 0


class Futures:
    """The requests of a server, each with its answer once there is one.

    A request whose id is known is not run again, whether it runs or has its answer. The answers
    that came first are forgotten when there are too many.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, None] = {}  # in their order
        self._bytes = 0

    def begin(self, name: str, digest: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Starts a request, unless it was begun before.

        `digest` is that of all that it asks for. Raises RequestError if another request has the id,
        or if too many are at work.
        """
        if (known := self._requests.get(name)) is not None:
            if known.digest != digest:
                raise RequestError("seq_id: belongs to another request", "seq_id")
            return
        if len(self._requests) - len(self._ended) >= limits.MAX_ANSWERS:
            raise RequestError(
                "the server is working on too many requests",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_seconds=1,
            )
        task = asyncio.get_running_loop().create_task(_run(work), name=name)
        self._requests[name] = _Request(digest, task)
        task.add_done_callback(lambda _: self._end(name))

    def knows(self, name: str) -> bool:
        """Returns whether the request runs, or has an answer that is kept."""
        return name in self._requests

    async def answer(self, name: str, seconds: float) -> Answer | None:
        """Returns the answer of a request, which may take some time; None if it takes longer.

        Raises the error of a request that failed, RequestError for one that is not known.
        """
        request = self._find(name)
        done, _ = await asyncio.wait({request.task}, timeout=seconds)
        if not done:
            return None
        if request.task.cancelled():
            raise RequestError(f"request_id: {name} was cancelled", "request_id")
        return request.task.result()

    def cancel(self, name: str) -> None:
        """Ends a request that still runs; one that is not known has ended."""
        if name in self._requests:
            self._requests[name].task.cancel()

    async def stop(self) -> None:
        """Ends all requests."""
        tasks = [request.task for request in self._requests.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, name: str) -> _Request:
        if name not in self._requests:
            raise RequestError(
                f"request_id: {name} is not known: the server has started since, or its answer was "
                "not asked for in time",
                "request_id",
                status=HTTPStatus.NOT_FOUND,
            )
        return self._requests[name]

    def _end(self, name: str) -> None:
        request = self._requests[name]
        failed = request.task.cancelled() or request.task.exception() is not None
        request.size = 0 if failed else request.task.result().num_bytes()
        self._bytes += request.size
        self._ended[name] = None
        while len(self._ended) > 1 and (
            len(self._ended) > limits.MAX_ANSWERS or self._bytes > limits.MAX_ANSWERS_BYTES
        ):
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._bytes -= self._requests.pop(oldest).size


async def _run(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except TandemError:
        raise
    except Exception as error:
        logger.exception("a request failed")
        raise TandemError("the server failed; see its log") from error
