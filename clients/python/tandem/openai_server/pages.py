"""JSON, ids of requests, keys, and answers to failures, for all web applications."""

from __future__ import annotations

import hmac
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tandem.errors import REQUEST_ID_KEY, TandemError
from tandem.openai_server.errors import RequestError, error_headers, error_object, http_status
from tandem.rpc.credentials import WatchedFiles
from tandem.rpc.transport import CALLER_REQUEST_ID

# An id of a request that the servers accept.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Endpoint = Callable[[Request], Awaitable[Response]]


class Json(JSONResponse):
    """JSON in ASCII: what a client sent, and an error shows, may be no Unicode text."""

    def render(self, content: Any) -> bytes:
        """Returns the bytes."""
        return json.dumps(content).encode()


def guarded(endpoint: Endpoint, status: Callable[[TandemError], int] = http_status) -> Endpoint:
    """Gives a request its id and failures their JSON; `status` is that of a failure."""

    async def run(request: Request) -> Response:
        given = request.headers.get(REQUEST_ID_KEY, "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        CALLER_REQUEST_ID.set(name)
        try:
            response = await endpoint(request)
        except TandemError as error:
            response = Json(error_object(error), status(error), error_headers(error))
        response.headers[REQUEST_ID_KEY] = name
        return response

    return run


def check_key(shown: str, keys: WatchedFiles[tuple[str, ...]]) -> None:
    """Raises RequestError unless `shown` is one of the keys."""
    known = [hmac.compare_digest(shown.strip().encode(), key.encode()) for key in keys.contents()]
    if not any(known):
        raise RequestError(
            "the API key is not one of this server's",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", HTTPStatus.NOT_FOUND)
    says = "no such page" if status == HTTPStatus.NOT_FOUND else "the page has no such method"
    problem = RequestError(f"{request.method} {request.url.path}: {says}", status=status)
    # With 405, `Allow` names the methods.
    return Json(error_object(problem), status, getattr(error, "headers", None))


async def _failure(request: Request, error: Exception) -> Response:
    # The error itself is in the server's log.
    problem = TandemError("the server failed; see its log")
    return Json(error_object(problem), HTTPStatus.INTERNAL_SERVER_ERROR)


# Starlette's `exception_handlers`.
HANDLERS: dict[Any, Any] = {404: _no_such_page, 405: _no_such_page, 500: _failure}
