"""Exceptions of the client: one class per gRPC code, with the server's details."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"


class TandemError(Exception):
    """The base of all exceptions that this package raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def describe(self) -> dict[str, Any]:
        """Returns what is known about the error, for `--json`."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "notes": list(getattr(self, "__notes__", ())),
        }


class ConfigError(TandemError):
    """A configuration or data file that cannot be used."""


class ProblemsError(ConfigError):
    """Several errors at once.

    Attributes:
        problems: the errors.
    """

    def __init__(self, problems: Sequence[TandemError]) -> None:
        lines = [f"{len(problems)} problems:"]
        for problem in problems:
            lines.append(f"  - {problem}")
            if problem.hint and problem.hint not in str(problem):
                lines.append(f"    hint: {problem.hint}")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def describe(self) -> dict[str, Any]:
        """Returns the record of each error, for `--json`."""
        return super().describe() | {"problems": [one.describe() for one in self.problems]}


class CredentialsError(ConfigError):
    """A file of certificates or tokens that cannot be used; names the field and the path."""


class EnvironmentFailedError(TandemError):
    """An environment that cannot continue; an environment's class may raise it in a tool.

    What else a tool raises is told to the model.
    """


class RunDirectoryError(ConfigError):
    """A run directory that is in use, or lacks what `--resume` needs."""


class RunDirectoryBusyError(TandemError):
    """A run directory that another process uses, as a predecessor that still saves."""


class TurnsDifferError(TandemError):
    """Turns that are not of one response, and so cannot be joined.

    Attributes:
        field: the field of Trajectory in which they differ.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SessionsError(TandemError):
    """A call of the sessions' pages of `tandem serve-openai` that failed.

    Attributes:
        status: the HTTP status; None if the server did not answer.
        code: the server's name of the failure; None if it gave none.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class StorageError(TandemError):
    """Storage that failed, as a full disk does: nothing that the user wrote is wrong."""


class RewardError(TandemError):
    """A judge that failed: it raised, gave no number, took too long or lost its process."""


class UnsavedUpdatesError(TandemError):
    """A server holds updates that no checkpoint has, and other weights would replace them."""


class ClosedClientError(TandemError):
    """A call of a client that was closed."""


class ServerStartError(TandemError):
    """A local server that did not come up, or died."""


# Errors of the file system that come from the path that was named, or from rights on it. All
# others, as a full disk, a lost mount or too many open files, come from outside.
_PATH_ERRORS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.EXDEV,
    }
)


def file_error(
    place: object, error: OSError, kind: type[ConfigError] = ConfigError
) -> ConfigError | StorageError:
    """Returns the error, beginning with `place`, for a file or folder that cannot be used.

    It is one of `kind` if the path or the rights on it are wrong, else a StorageError.
    """
    made = kind if error.errno in _PATH_ERRORS else StorageError
    return made(f"{place}: {error.strerror or error}")


# Remedies by reason; `make format` writes them from the servers' list of reasons.
_REMEDIES: dict[str, str] = json.loads(
    resources.files("tandem").joinpath("remedies.json").read_text(encoding="utf-8")
)


def remedy(reason: str) -> str | None:
    """Returns the remedy for a reason that a server gives, if one is known."""
    return _REMEDIES.get(reason)


class RpcError(TandemError):
    """A call that failed, at the server or on the way to it.

    Attributes:
        code: the gRPC status code.
        field: dotted path of the offending field, for example
            "samples[3].trajectory.authorship_mask".
        reason: stable UPPER_SNAKE_CASE name of the failure.
        hint: the remedy, if one is known.
        request_id: the id of the call in the server's log.
        retry_after_seconds: the delay that the server asks for; None if waiting need not help.
        method: the call that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        field: str | None = None,
        reason: str | None = None,
        hint: str | None = None,
        request_id: str | None = None,
        retry_after_seconds: float | None = None,
        method: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint or remedy(reason or ""))
        self.code = code
        self.field = field
        self.reason = reason
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds
        self.method = method

    def __str__(self) -> str:
        notes = {"reason": self.reason, "hint": self.hint, "request": self.request_id}
        known = ", ".join(f"{key}: {value}" for key, value in notes.items() if value)
        where = f"{self.method}: " if self.method else ""
        return f"{where}{self.message} [{self.code.name}{', ' if known else ''}{known}]"

    def describe(self) -> dict[str, Any]:
        """Returns what is known about the error, for `--json`."""
        return super().describe() | {
            "code": self.code.name,
            "field": self.field,
            "reason": self.reason,
            "request_id": self.request_id,
            "method": self.method,
        }


class InvalidArgumentError(RpcError):
    """A field has a wrong value; see `field`."""


class NotFoundError(RpcError):
    """Something named does not exist."""


class AlreadyExistsError(RpcError):
    """The name, or the request_id with another payload, is already in use."""


class FailedPreconditionError(RpcError):
    """The server is in another state than the call expects, for example another version."""


class LostWeightsError(FailedPreconditionError):
    """Nobody holds the weights any more that draw the next step of an asynchronous run."""


class OutOfRangeError(RpcError):
    """Too long for the server."""


class ResourceExhaustedError(RpcError):
    """The server's queue is full (`retry_after_seconds` is set), or the request too large."""


class UnavailableError(RpcError):
    """The server cannot be reached or is draining."""


class DeadlineError(RpcError):
    """The deadline passed."""


class CancelledError(RpcError):
    """The call was cancelled."""


class DataLossError(RpcError):
    """Bytes arrived damaged."""


class NotImplementedByServerError(RpcError):
    """The server does not offer this: it is another kind of server, or does not support it yet."""


class PermissionDeniedError(RpcError):
    """The caller is not allowed to make the call."""


class UnauthenticatedError(PermissionDeniedError):
    """The server does not know the caller: the token is missing, or not one of the server's."""


class ServerError(RpcError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[RpcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedByServerError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


def from_status(
    status: status_pb2.Status, *, request_id: str | None = None, method: str | None = None
) -> RpcError:
    """Returns the exception for a google.rpc.Status."""
    code = _code(status.code)
    field = reason = retry_after = None
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            if bad.field_violations:
                field = bad.field_violations[0].field
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason or None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return _CLASSES.get(code, ServerError)(
        status.message,
        code=code,
        field=field,
        reason=reason,
        request_id=request_id,
        retry_after_seconds=retry_after,
        method=method,
    )


def from_rpc(error: Any, *, request_id: str, method: str, address: str, role: str = "") -> RpcError:
    """Returns the exception for a failed call: a grpc.RpcError, synchronous or asyncio.

    `role` is the kind of server that the client takes `address` for, "" if any.
    """
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    for key, value in trailing:
        if key == STATUS_DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
        elif key == REQUEST_ID_KEY:
            request_id = value.decode() if isinstance(value, bytes) else value
    result = from_status(status, request_id=request_id, method=method)
    if result.hint is None:
        result.hint = _hint_about_server(result, address, role)
    return result


def _hint_about_server(error: RpcError, address: str, role: str) -> str | None:
    if isinstance(error, UnauthenticatedError):
        return "token_file (TANDEM_TOKEN_FILE) must begin with a token that the server accepts"
    if isinstance(error, UnavailableError):
        return f"is a server running at {address}? `tandem up CLUSTER.yaml` starts one"
    # Tandem's servers name a method that they lack; gRPC itself sends no message.
    unknown = not error.message or error.message.startswith("no such method: ")
    if isinstance(error, NotImplementedByServerError) and role and unknown:
        return f"is this a {role} server? `tandem status` shows what is at {address}"
    return None


def _code(number: int) -> grpc.StatusCode:
    name = code_pb2.Code.Name(number) if number in code_pb2.Code.values() else "UNKNOWN"
    return grpc.StatusCode[name]
