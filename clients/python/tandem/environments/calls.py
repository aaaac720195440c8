"""Calls of environments in threads, each with a time limit.

A call that takes too long is given up: what computes in Python ends, an `async def` is cancelled,
and any other call is left to itself, in a thread that another one replaces.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

from tandem.errors import EnvironmentFailedError
from tandem.rewards.judges.cases import FAILURES, Failure, failure_of, number_of
from tandem.rewards.judges.watch import Watch
from tandem.rewards.judges.workers import Workers
from tandem.rpc.images import png_of
from tandem.run_directory.log import FILE_ONLY

_log = logging.getLogger(__name__)

# Most characters that one call may say. Many more fit no context, and whoever encodes or records
# them holds up the other episodes.
MOST_SAID = 1 << 20
# Most bytes of the images of one call, as PNG files in base64.
MOST_SHOWN = 16 << 20
# Seconds between two looks of a thread that waits: a call is given up between them alone.
_LOOK_SECONDS = 0.2
# Seconds that a cancelled coroutine has to end.
_CANCEL_SECONDS = 1.0
# Seconds that the environments of the last episodes have to close at the end of a run.
CLOSE_SECONDS = 10.0


Result = TypeVar("Result")

# The content of a message: a text, or a list of parts.
Content = str | list[dict[str, Any]]


def awaited(future: Future[Result]) -> Result:
    """Returns the result of a future, for which a call waits that may be given up meanwhile."""
    while not wait([future], timeout=_LOOK_SECONDS).done:
        pass
    return future.result()


@dataclass(frozen=True)
class Said:
    """The result of a call of an environment; a line of the run's record of episodes holds it.

    Attributes:
        text: what goes to the model; of reset() also None, for nothing.
        parts: in place of the text, the parts of an answer with images: {"type": "text", "text":
            TEXT} and {"type": "image", "png": the file in base64}.
        tool_failed: whether a tool raised, or could not be called: `text` says so to the model.
        done: whether the environment has ended the episode.
        reward: what get_reward() gave; None in every other call, and where it failed.
        failure: why the environment failed, and no reward counts; "" if it did not.
        timed_out: whether it failed because a call took too long.
        seconds: time of the call.
    """

    text: str | None = None
    parts: Sequence[Mapping[str, str]] = ()
    tool_failed: bool = False
    done: bool = False
    reward: float | None = None
    failure: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @classmethod
    def failed(cls, failure: Failure) -> Self:
        """Returns what a call gave that failed."""
        trace = f"\n{failure.trace}" if failure.trace else ""
        return cls(failure=failure.what + trace, timed_out=failure.timed_out)

    @property
    def content(self) -> Content | None:
        """The content of a message to the model; None for nothing."""
        if not self.parts:
            return self.text
        return [
            {"type": "image", "image": {"bytes": base64.b64decode(part["png"])}}
            if part["type"] == "image"
            else dict(part)
            for part in self.parts
        ]

    def record(self) -> dict[str, Any]:
        """Returns it as JSON, without what is as by default."""
        return {name: value for name, value in asdict(self).items() if value != _NOTHING[name]}


_NOTHING = asdict(Said())


class LiveEnvironment:
    """An environment of one episode, made in the thread of its first call.

    Its coroutines run in an event loop of its own, in the thread of the call.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        find: Callable[[Any, str], Callable[..., Any]] = getattr,
    ) -> None:
        """`find` returns a tool of what `make` returns, by its name."""
        self._make = make
        self._find = find
        self._made: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._idle = threading.Event()

    def reset(self, arguments: Mapping[str, Any]) -> Said:
        """Makes the environment and begins an episode; its text joins the prompt."""
        self._made = self._make()
        value = self._result(self._made.reset(**arguments))
        if value is None or isinstance(value, str):
            return _bounded("reset()", Said(value or None))
        if parts := _shown(value):
            return _bounded("reset()", Said(parts=parts))
        raise TypeError(
            f"reset() returned {type(value).__name__}, neither text nor images nor None"
        )

    def tool(self, name: str, arguments: Mapping[str, Any]) -> Said:
        """Calls a tool; what it raises goes back to the model as text.

        Raises EnvironmentFailedError if the tool does.
        """
        try:
            said = _answer(self._result(self._find(self._made, name)(**arguments)))
        except EnvironmentFailedError:
            raise
        # A user's tool may raise anything, for what a model wrote.
        except FAILURES as error:
            said = Said(f"Error: {type(error).__name__}: {error}", tool_failed=True)
        done = bool(getattr(self._made, "done", False))
        return _bounded(f"{name}()", replace(said, done=done))

    def reward(self) -> Said:
        """Returns what get_reward() gives."""
        reward = number_of(self._result(self._made.get_reward()))
        return Said.failed(reward) if isinstance(reward, Failure) else Said(reward=reward)

    def close(self) -> Said:
        """Closes the environment, if it has a close(), and its event loop."""
        if hasattr(self._made, "close"):
            self._result(self._made.close())
        if self._loop is not None:
            self._loop.close()
        return Said()

    def cancel(self, seconds: float) -> bool:
        """Cancels the coroutine that runs; called in another thread.

        Returns whether it ended within `seconds`; False if none runs.
        """
        loop, task = self._loop, self._task
        if loop is None or task is None:
            return False
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)
        return self._idle.wait(seconds)

    def _result(self, value: Any) -> Any:
        """Returns a value, awaited where it is a coroutine."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(_result_of(value))
        self._idle.clear()
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None
            self._idle.set()


def _bounded(call: str, said: Said) -> Said:
    """Returns the result of a call; raises ValueError for too much text or too many bytes."""
    characters = len(said.text or "") + sum(len(part.get("text", "")) for part in said.parts)
    if characters > MOST_SAID:
        raise ValueError(f"{call} said {characters:,} characters, at most {MOST_SAID:,}")
    size = sum(len(part.get("png", "")) for part in said.parts)
    if size > MOST_SHOWN:
        raise ValueError(f"{call} showed images of {size:,} bytes, at most {MOST_SHOWN:,}")
    return said


def _answer(value: Any) -> Said:
    """Returns the value of a tool for the model: a text, images, or any other value as JSON."""
    if isinstance(value, str):
        return Said(value)
    if parts := _shown(value):
        return Said(parts=parts)
    return Said(json.dumps(value, default=str))


def _shown(value: Any) -> list[dict[str, str]]:
    """Returns the parts of an answer that shows images, as Said has them; none for another answer.

    An image of Pillow is such an answer, and a list of parts, one of which is an image. Raises
    ConfigError for an image that cannot be read.
    """
    if type(value).__module__.startswith("PIL."):
        value = [{"type": "image", "image": value}]
    if not isinstance(value, list | tuple):
        return []
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in value}
    if "image" not in kinds or not kinds <= {"image", "text"}:
        return []
    return [
        {"type": "image", "png": base64.b64encode(png_of(part["image"])).decode()}
        if part["type"] == "image"
        else {"type": "text", "text": str(part["text"])}
        for part in value
    ]


async def _result_of(value: Any) -> Any:
    return await value


@dataclass(frozen=True)
class Call:
    """A call to make.

    Attributes:
        place: where the row of the episode stands.
    """

    environment: LiveEnvironment
    run: Callable[[], Said]
    place: str


class _Caller:
    """Makes the calls of one thread."""

    def __init__(self) -> None:
        self._call: Call | None = None

    def __call__(self, call: Call) -> Said | Failure:
        """Makes a call."""
        self._call = call
        begun = time.monotonic()
        try:
            return replace(call.run(), seconds=time.monotonic() - begun)
        except FAILURES as error:
            return failure_of(error)

    def prepare(self) -> None:
        """Does nothing: a thread is ready."""

    def end(self) -> bool:
        """Cancels a coroutine; returns whether the call ended, for a thread cannot be ended."""
        return self._call is not None and self._call.environment.cancel(_CANCEL_SECONDS)


class EnvironmentCalls:
    """The threads that call the environments of a run."""

    def __init__(self, name: str, threads: int, limit_seconds: float) -> None:
        """`name` begins the notes about long calls."""
        self._workers: Workers[Call, Said] = Workers(
            threads, _Caller, Watch(name, limit_seconds), advice=""
        )
        self._closing: set[Future[Said | Failure]] = set()

    def start(self, call: Call) -> Future[Said | Failure]:
        """Begins a call."""
        [future] = self._workers.start([call])
        return future

    def close_environment(self, environment: LiveEnvironment, place: str) -> None:
        """Closes an environment; nobody waits for it but close()."""
        future = self.start(Call(environment, environment.close, place))
        self._closing.add(future)
        future.add_done_callback(self._closed)

    def close(self) -> None:
        """Waits a moment for environments that are closed, and leaves other calls to themselves."""
        wait(list(self._closing), timeout=CLOSE_SECONDS)
        self._workers.close()

    def _closed(self, future: Future[Said | Failure]) -> None:
        self._closing.discard(future)
        outcome = future.result()
        if isinstance(outcome, Failure):
            text = f"close() of an environment failed: {outcome.what}\n{outcome.trace}".rstrip()
            _log.warning(text, extra=FILE_ONLY)
