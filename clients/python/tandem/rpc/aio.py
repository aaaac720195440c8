"""Asyncio twins of tandem.rpc.client: the same methods, retries and exceptions.

Methods that return a reply are awaited. stream() and watch_steps() start their call at once and
return an AsyncResponseStream for `async for`. Only open_stream() has no twin: stream() takes an
asynchronous iterator of messages.
"""

from __future__ import annotations

from tandem.rpc.calls import CriticCalls, RolloutCalls, TrainerCalls
from tandem.rpc.transport import AsyncConnection


class AsyncRolloutClient(AsyncConnection, RolloutCalls):
    """Samples from senior and junior."""


class AsyncTrainerClient(AsyncConnection, TrainerCalls):
    """Trains the senior."""


class AsyncCriticClient(AsyncConnection, CriticCalls):
    """Predicts returns with a value head."""
