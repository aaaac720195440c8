"""Calls of environments, each with a time limit: what a run needs of them, and those in threads.

A call in a thread that takes too long is given up: what computes in Python ends, an `async def` is
cancelled, and any other call is left to itself, in a thread that another one replaces.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from tandem.environments.contract import EnvironmentClass
from tandem.environments.live import LiveEnvironment, Said
from tandem.rewards.judges.cases import FAILURES, Failure, failure_of
from tandem.rewards.judges.watch import Watch
from tandem.rewards.judges.workers import Workers
from tandem.run_directory.log import FILE_ONLY

_log = logging.getLogger(__name__)

# Seconds between two looks of a thread that waits: a call is given up between them alone.
_LOOK_SECONDS = 0.2
# Seconds that a cancelled coroutine has to end.
_CANCEL_SECONDS = 1.0
# Seconds that the environments of the last episodes have to close at the end of a run.
CLOSE_SECONDS = 10.0


Result = TypeVar("Result")


def awaited(future: Future[Result]) -> Result:
    """Returns the result of a future, for which a call waits that may be given up meanwhile."""
    while not wait([future], timeout=_LOOK_SECONDS).done:
        pass
    return future.result()


class Environment(Protocol):
    """An environment of one episode; LiveEnvironment is one."""

    def reset(self, arguments: Mapping[str, Any], /) -> Said | Failure:
        """Begins an episode."""
        ...

    def tool(self, name: str, arguments: Mapping[str, Any], /) -> Said | Failure:
        """Calls a tool."""
        ...

    def reward(self) -> Said | Failure:
        """Asks for the reward."""
        ...

    def close(self) -> Said | Failure:
        """Closes the environment."""
        ...


Made = TypeVar("Made", bound=Environment)


@dataclass(frozen=True)
class Call(Generic[Made]):
    """A call to make.

    Attributes:
        place: where the row of the episode stands.
    """

    environment: Made
    run: Callable[[Made], Said | Failure]
    place: str

    def make(self) -> Said | Failure:
        """Makes the call, in the thread in which this is called; says how long it took."""
        begun = time.monotonic()
        try:
            outcome = self.run(self.environment)
        except FAILURES as error:
            return failure_of(error)
        if isinstance(outcome, Failure):
            return outcome
        return replace(outcome, seconds=time.monotonic() - begun)


class Calls(ABC, Generic[Made]):
    """The calls of a run's environments."""

    def __init__(self) -> None:
        self._closing: set[Future[Said | Failure]] = set()

    @abstractmethod
    def environment(self, kind: EnvironmentClass) -> Made:
        """Returns an environment for one episode; its reset() makes it."""

    @abstractmethod
    def start(self, call: Call[Made]) -> Future[Said | Failure]:
        """Begins a call; an environment has one at a time."""

    @abstractmethod
    def leave(self, environment: Made) -> None:
        """Takes note that no further call of an environment begins."""

    @abstractmethod
    def end(self) -> None:
        """Ends the calls that run, or leaves them to themselves."""

    def open(self) -> None:
        """Makes everything ready for calls; raises ConfigError if that fails."""

    def close_environment(self, environment: Made, place: str) -> None:
        """Closes an environment and leaves it; nobody waits for it but close()."""
        future = self.start(Call(environment, type(environment).close, place))
        self._closing.add(future)
        future.add_done_callback(self._closed)
        self.leave(environment)

    def close(self) -> None:
        """Waits a moment for environments that are closed, and ends what else there is."""
        wait(list(self._closing), timeout=CLOSE_SECONDS)
        self.end()

    def _closed(self, future: Future[Said | Failure]) -> None:
        self._closing.discard(future)
        outcome = future.result()
        if isinstance(outcome, Failure):
            text = f"close() of an environment failed: {outcome.what}\n{outcome.trace}".rstrip()
            _log.warning(text, extra=FILE_ONLY)


class _Caller:
    """Makes the calls of one thread."""

    def __init__(self) -> None:
        self._call: Call[LiveEnvironment] | None = None

    def __call__(self, call: Call[LiveEnvironment]) -> Said | Failure:
        """Makes a call."""
        self._call = call
        return call.make()

    def prepare(self) -> None:
        """Does nothing: a thread is ready."""

    def end(self) -> bool:
        """Cancels a coroutine; returns whether the call ended, for a thread cannot be ended."""
        return self._call is not None and self._call.environment.cancel(_CANCEL_SECONDS)


class CallsInThreads(Calls[LiveEnvironment]):
    """Calls in threads of this process."""

    def __init__(self, name: str, threads: int, limit_seconds: float) -> None:
        """`name` begins the notes about long calls."""
        super().__init__()
        self._workers: Workers[Call[LiveEnvironment], Said] = Workers(
            threads, _Caller, Watch(name, limit_seconds), advice="; `executor: process` can"
        )

    def environment(self, kind: EnvironmentClass) -> LiveEnvironment:
        """Returns an environment, made in the thread of its first call."""
        return LiveEnvironment(kind.make, kind.find)

    def start(self, call: Call[LiveEnvironment]) -> Future[Said | Failure]:
        """Begins a call."""
        [future] = self._workers.start([call])
        return future

    def leave(self, environment: LiveEnvironment) -> None:
        """Does nothing: no thread waits for an environment."""

    def end(self) -> None:
        """Leaves the calls that run to themselves."""
        self._workers.close()
