"""An environment of one episode, and what its calls give.

Processes of environments import this module, so it imports little.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from tandem.errors import EnvironmentFailedError
from tandem.rewards.judges.cases import FAILURES, Failure, FailureKind, TooMuchError, number_of

# Most characters that one call may say. Many more fit no context, and whoever encodes or records
# them holds up the other episodes.
MOST_SAID = 1 << 20
# Most bytes of the images of one call, as PNG files in base64.
MOST_SHOWN = 16 << 20

# The content of a message: a text, or a list of parts.
Content = str | list[dict[str, Any]]


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
        failure_kind: the kind of its failure.
        seconds: time of the call.
    """

    text: str | None = None
    parts: Sequence[Mapping[str, str]] = ()
    tool_failed: bool = False
    done: bool = False
    reward: float | None = None
    failure: str = ""
    failure_kind: FailureKind = FailureKind.ERROR
    seconds: float = 0.0

    @classmethod
    def failed(cls, failure: Failure) -> Self:
        """Returns what a call gave that failed."""
        trace = f"\n{failure.trace}" if failure.trace else ""
        return cls(failure=failure.what + trace, failure_kind=failure.kind)

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

        Raises EnvironmentFailedError, MemoryError and TooMuchError if the tool does.
        """
        try:
            said = _answer(self._result(self._find(self._made, name)(**arguments)))
        except (EnvironmentFailedError, MemoryError, TooMuchError):
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
    """Returns the result of a call; raises TooMuchError for more than it may say."""
    characters = len(said.text or "") + sum(len(part.get("text", "")) for part in said.parts)
    if characters > MOST_SAID:
        raise TooMuchError(f"{call} said {characters:,} characters, at most {MOST_SAID:,}")
    size = sum(len(part.get("png", "")) for part in said.parts)
    if size > MOST_SHOWN:
        raise TooMuchError(f"{call} showed images of {size:,} bytes, at most {MOST_SHOWN:,}")
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
    # The import takes a moment, and text does not need it.
    from tandem.rpc.images import png_of

    return [
        {"type": "image", "png": base64.b64encode(png_of(part["image"])).decode()}
        if part["type"] == "image"
        else {"type": "text", "text": str(part["text"])}
        for part in value
    ]


async def _result_of(value: Any) -> Any:
    return await value
