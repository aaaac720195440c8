"""Failures as the SDK understands them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from tandem.errors import TandemError
from tandem.openai_server.errors import http_status

# Statuses that the SDK would try again for minutes, although waiting does not help.
_FINAL = {HTTPStatus.CONFLICT, HTTPStatus.NOT_IMPLEMENTED}


def status_of(error: TandemError) -> int:
    """Returns the HTTP status of a failure; the SDK only repeats a call where waiting helps."""
    status = http_status(error)
    return HTTPStatus.BAD_REQUEST if status in _FINAL else status


def failure_object(error: TandemError) -> dict[str, Any]:
    """Returns the answer of a request that failed after it had been accepted."""
    user = status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR
    says = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": says, "category": "user" if user else "server"}
