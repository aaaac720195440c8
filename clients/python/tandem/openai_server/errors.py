"""Failures as OpenAI's API shows them: an HTTP status and a JSON object."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any

import grpc

from tandem.errors import ConfigError, RpcError, TandemError

# nginx's status, in its log, for a client that went away; no client reads it.
CLIENT_CLOSED_REQUEST = 499

# The HTTP status of a call to the rollout server that failed.
HTTP_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    grpc.StatusCode.UNKNOWN: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.DATA_LOSS: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}

# Fields of the contract that have another name in OpenAI's API.
_FIELDS = {"prompt_token_ids": "prompt", "num_samples": "n", "submit.prompts": "prompt"}


class RequestError(TandemError):
    """A request that is refused before the rollout server sees it.

    Attributes:
        param: the field at fault; None if there is none.
        status: the HTTP status.
        code: a name of the failure for programs.
        retry_after_seconds: when to try again; None if waiting need not help.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds


def http_status(error: TandemError) -> int:
    """Returns the HTTP status of a failure."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, RpcError):
        # Without a delay, waiting does not help: the request is too large.
        if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_seconds is None:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return HTTP_STATUS[error.code]
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_object(error: TandemError) -> dict[str, Any]:
    """Returns the body of OpenAI's API for a failure."""
    status = http_status(error)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, RpcError):
        param = _param(error.field)
        code = error.reason or error.code.name
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: TandemError) -> dict[str, str]:
    """Returns the headers of a failure: how to show a key, or when to try again."""
    if http_status(error) == HTTPStatus.UNAUTHORIZED and isinstance(error, RequestError):
        return {"www-authenticate": "Bearer"}
    delay = getattr(error, "retry_after_seconds", None)
    # The header has whole seconds, and 0 would ask for an attempt at once.
    return {} if delay is None else {"retry-after": str(max(1, math.ceil(delay)))}


def _param(field: str | None) -> str | None:
    """Returns OpenAI's name of a field of the contract."""
    if field is None:
        return None
    inner = re.sub(r"^(?:prompts\[\d+\]\.)?(?:sampling\.)?", "", field)
    return next((name for own, name in _FIELDS.items() if inner.startswith(own)), inner)
