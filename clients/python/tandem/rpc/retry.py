"""When a client tries a call again, and for how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tandem.errors import RpcError

# grpc.aio hides the status of a call that the server ends while the client writes to it behind an
# INTERNAL of its own (grpc/grpc issue 36066). The call is made again to learn the status: so often
# at once, then after a wait, for the status may be that of a server that is busy.
_HIDDEN_STATUS = "Internal error from Core"
_HIDDEN_ATTEMPTS = 8

# Methods that fail where an earlier attempt succeeded: an export wants a directory of its own.
NOT_REPEATABLE = frozenset({"ExportModel"})


@dataclass(frozen=True)
class RetryPolicy:
    """How long a client waits for a server that fails, and how long it pauses between attempts.

    Only errors that may pass by themselves are retried: UNAVAILABLE, CANCELLED by the server, a
    status that grpc.aio hides, and RESOURCE_EXHAUSTED if it says how long to wait (it does when
    waiting helps). A retry is safe because a second success leaves the same state as the first: a
    train step is known by its request_id, a sample is a function of its seed, and publishing,
    saving or loading weights a second time changes nothing. ExportModel and open streams are never
    retried.

    Attributes:
        seconds: longest time without progress, from the first failure on. 0: no second attempt.
        initial_seconds: the first wait at most; each one may be twice as long as the one before. A
            wait is a random part of that, at least a half.
        maximum_seconds: the longest wait that the server does not ask for.
        check: called before every wait; raises if waiting is pointless.
    """

    seconds: float = 120.0
    initial_seconds: float = 0.2
    maximum_seconds: float = 5.0
    check: Callable[[], None] | None = None


# One attempt.
ONCE = RetryPolicy(seconds=0.0)


class Retries:
    """The attempts at one server, of a call or of all calls of a request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._failures = 0
        self._hidden = 0
        self._since: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether an attempt failed since the last progress."""
        return self._since is not None

    def progress(self) -> None:
        """Takes an answer: the next failure is the first one."""
        self._failures = 0
        self._since = None

    def worked(self, seconds: float) -> None:
        """Takes seconds in which the server was at work, which do not count as waiting."""
        if self._since is not None:
            self._since += seconds

    def wait_after(self, error: RpcError) -> float | None:
        """Returns the seconds to wait before the next attempt, or None to give up.

        Raises what the policy's check raises.
        """
        if error.method in NOT_REPEATABLE or not may_pass(error):
            return None
        if _hides_status(error) and self._hidden < _HIDDEN_ATTEMPTS:
            self._hidden += 1
            return 0.0
        if self.policy.check is not None:
            self.policy.check()
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self.policy.seconds - (now - self._since)
        if left <= 0:
            return None
        policy = self.policy
        longest = min(policy.initial_seconds * 2 ** min(self._failures, 30), policy.maximum_seconds)
        self._failures += 1
        # Clients that lost a server together must not come back together.
        wait = longest * random.uniform(0.5, 1.0)
        return max(error.retry_after_seconds or 0.0, min(wait, left))


def may_pass(error: RpcError) -> bool:
    """Returns whether a failure may pass by itself, so that the same call can succeed later."""
    if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_seconds is not None
    # A server that shuts down cancels the calls that it does not end in time.
    passing = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code in passing or _hides_status(error)


def _hides_status(error: RpcError) -> bool:
    """Returns whether grpc.aio failed to say why the server ended a call."""
    return error.code == grpc.StatusCode.INTERNAL and error.message == _HIDDEN_STATUS
