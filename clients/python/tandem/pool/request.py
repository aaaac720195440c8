"""A request to one or several replicas: a thread for each replica, and the state that they share.

The replicas share the items of the request as Shares says.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tandem.errors import RpcError
from tandem.pool.replicas import PoolCounts, Replica
from tandem.pool.shares import Shares
from tandem.rpc.client import RolloutClient
from tandem.rpc.retry import Retries, RetryPolicy, may_pass
from tandem.utils.interrupt import StopRequested
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Checks a server before it is asked. An RpcError that may pass makes it a failed one for now; any
# other error ends the request.
Admit = Callable[[RolloutClient], None]

# Seconds in which a call of a replica may end by itself once every item is answered.
END_SECONDS = 5.0


@dataclass
class PoolState:
    """The state of a pool, which its requests share.

    Attributes:
        replicas: the pool's replicas.
        retry: how long a request keeps trying without an answer from any replica.
        changed: guards this state, the replicas and every request; notified after each change.
        counts: what was counted since the counts were last taken.
        running: the requests that are not over.
        progress: is told how much is answered.
    """

    replicas: list[Replica]
    retry: RetryPolicy
    changed: threading.Condition = field(default_factory=threading.Condition)
    counts: PoolCounts = field(default_factory=PoolCounts)
    running: list[PoolRequest[Any, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)


class PoolRequest(ABC, Generic[Item, Answer]):
    """A request for the answers to items. A subclass knows how to ask a replica.

    When a call of a replica fails in a way that may pass, the replica is lost: the others get its
    items, and it is asked again, after the waits of the pool's RetryPolicy, until it answers or the
    request is over. Every other failure ends the request. So does the loss of all replicas for as
    long as the policy says: an answer to an item is progress, and the time in which a replica works
    is no time of waiting.
    """

    def __init__(
        self,
        state: PoolState,
        items: Sequence[Item],
        units: Sequence[int],
        order: Sequence[int],
        limits: Sequence[tuple[int, int]],
        admit: Admit,
    ) -> None:
        """Prepares a request.

        Args:
            state: that of the pool.
            items: what is asked for.
            units: number of units of every item; see Shares.
            order: the items by index, in the order in which they are dealt out.
            limits: capacity and window of every replica; see Shares.
            admit: called before every call of a replica.
        """
        capacities, windows = zip(*limits, strict=True)
        self.items = items
        self.replicas = state.replicas
        self.changed = state.changed
        self.shares = Shares(units, order, capacities, windows, self.recall)
        self._state = state
        self._admit = admit
        self._answers: dict[int, Answer] = {}
        self._retries = [Retries(state.retry) for _ in self.replicas]
        # Replicas whose last call failed, those that the policy gives up, and those that serve()
        # runs for.
        self._failed = {i for i, replica in enumerate(self.replicas) if replica.lost}
        self._given_up: set[int] = set()
        self._serving: set[int] = set()
        self._stopped = False
        self._error: BaseException | None = None

    def run(self) -> list[Answer]:
        """Returns the answers in the order of the items; raises the first failure at once."""
        state = self._state
        with self.changed:
            state.running.append(self)
            for index in range(len(self.replicas)):
                self.settle(index)
        try:
            for index in range(len(self.replicas)):
                # The calls of another thread belong to the caller's span, too. A call that hangs
                # must not keep the process alive.
                work = threading.Thread(
                    target=copy_context().run, args=(self._work, index), daemon=True
                )
                work.start()
            with self.changed:
                self.changed.wait_for(self._is_over)
                if self._error is None:
                    self.changed.wait_for(lambda: not self._serving, END_SECONDS)
        finally:
            with self.changed:
                self._stopped = True
                state.running.remove(self)
                state.counts.moved += self.shares.moved
                self.stop()
                self.changed.notify_all()
        if self._error is not None:
            raise self._error
        return [self._answers[item] for item in range(len(self.items))]

    def give_up(self) -> None:
        """Ends the request, unless it is over: run() raises StopRequested. Needs the lock."""
        if not self._is_over():
            self._error = StopRequested("the request was given up")
            self.changed.notify_all()

    def settle(self, index: int) -> None:
        """Gives the replica a share, or none while it is failed or updated. Needs the lock."""
        if index in self._failed or self.replicas[index].updates:
            self.shares.leave(index, finish_begun=True)
        else:
            self.shares.join(index)
        self.changed.notify_all()

    @abstractmethod
    def serve(self, index: int) -> None:
        """Takes items, if there are any, and asks the admitted replica for them in one call."""

    @abstractmethod
    def recall(self, index: int, items: list[int]) -> None:
        """Tells the replica to forget items that it was sent. Called with the lock."""

    @abstractmethod
    def stop(self) -> None:
        """Cancels the calls that can be cancelled. Called with the lock."""

    def take(self, index: int) -> list[int]:
        """Returns items to send to the replica now. Needs the lock."""
        return [] if self._is_over() else self.shares.take(index)

    def take_back(self, index: int, error: RpcError) -> None:
        """Takes back what the replica was sent and did not answer before its call ended so."""
        with self.changed:
            back = self.shares.take_back(index)
            self._state.counts.retried += len(back)
        address = self.replicas[index].client.address
        _log.info(f"{address}: {error.message}: {len(back)} of its prompts are retried")

    def answer(self, index: int, item: int, answer: Answer) -> None:
        """Keeps the replica's answer to an item. Needs the lock."""
        self._answers[item] = answer
        self._retries[index].progress()
        self._state.counts.replicas.add(self.replicas[index].client.address)
        self.changed.notify_all()

    def _is_over(self) -> bool:
        return self._stopped or self._error is not None or self.shares.unfinished == 0

    def _work(self, index: int) -> None:
        """Works for one replica until the request is over."""
        try:
            while self._begin(index):
                seconds = 0.0
                try:
                    self._admit(self.replicas[index].client)
                    self._reached(index)
                    began = time.monotonic()
                    try:
                        self.serve(index)
                    finally:
                        with self.changed:
                            self._retries[index].worked(time.monotonic() - began)
                except RpcError as error:
                    seconds = self._put_back(index, error)
                finally:
                    self._end(index)
                with self.changed:
                    self.changed.wait_for(self._is_over, seconds)
        except BaseException as error:  # It is raised in the caller's thread.
            with self.changed:
                self._error = self._error or error
                self.changed.notify_all()

    def _begin(self, index: int) -> bool:
        """Waits until there is work for the replica; False if the request is over before."""
        replica = self.replicas[index]

        def may_go_on() -> bool:
            wanted = index in self._failed or self.shares.has_work(index)
            return self._is_over() or (wanted and not replica.updates)

        with self.changed:
            self.changed.wait_for(may_go_on)
            if self._is_over():
                return False
            replica.calls += 1
            return True

    def _reached(self, index: int) -> None:
        """Takes the replica into the request, now that it was admitted."""
        replica = self.replicas[index]
        with self.changed:
            self._serving.add(index)
            self._failed.discard(index)
            self._given_up.discard(index)
            was_lost, replica.lost = replica.lost, False
            self.settle(index)
        if was_lost:
            _log.info(f"{replica.client.address} answers again")

    def _end(self, index: int) -> None:
        with self.changed:
            self._serving.discard(index)
            self.replicas[index].calls -= 1
            self.changed.notify_all()

    def _put_back(self, index: int, error: RpcError) -> float:
        """Gives a lost replica's items to the others; returns the seconds until the next attempt.

        Raises `error` if it will not pass, or if the policy gives up every replica.
        """
        replica, policy = self.replicas[index], self._state.retry
        with self.changed:
            if self._is_over():
                return 0.0
            if not may_pass(error):
                raise error
            self._failed.add(index)
            back = self.shares.leave(index)
            self._state.counts.retried += len(back)
            seconds = self._retries[index].wait_after(error)
            if seconds is None:
                self._given_up.add(index)
                seconds = policy.maximum_seconds
            newly_lost, replica.lost = not replica.lost, True
            if len(self._given_up) == len(self.replicas):
                raise error
            self.changed.notify_all()
        told = [f"{len(back)} of its prompts are retried"] if back else []
        if newly_lost and len(self.replicas) == 1:
            told.append(f"waiting for it, up to {policy.seconds:g} s")
        elif newly_lost:
            told.append("it is left out until it answers again")
        if told:
            _log.info(f"{replica.client.address}: {error.message}: {', '.join(told)}")
        return seconds
