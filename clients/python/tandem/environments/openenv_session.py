"""Sessions of an OpenEnv server: reset and step as JSON over a WebSocket.

The connections of a process share one thread, which also answers the server's pings while the
models write. A session lives as long as its connection.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tandem.environments.calls import awaited
from tandem.errors import ConfigError, EnvironmentFailedError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Result = TypeVar("Result")

# Most bytes of a message of the server.
MOST_BYTES = 64 << 20
# Most seconds of a handshake, and of a page of the server.
_OPEN_SECONDS = 10.0
# Most seconds of an answer where no call of a run bounds it.
ANSWER_SECONDS = 60.0
# Seconds between two attempts to begin a session, doubled from the first up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 2.0
# Codes of errors that the action caused: the model is told of them. After any other error the
# server has no session.
_OF_THE_ACTION = ("EXECUTION_ERROR", "VALIDATION_ERROR")


class ActionError(Exception):
    """An action that the server refused, or that failed in its environment."""


@dataclass(frozen=True)
class Observed:
    """The answer to reset or step.

    Attributes:
        observation: fields of the observation, without `reward`, `done` and `metadata`.
        reward: None where the server gave none.
        done: whether the episode has ended.
    """

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvSession:
    """A session with a server, which has an environment of its own for it."""

    def __init__(self, url: str, retry_seconds: float, answer_seconds: float | None = None) -> None:
        """`retry_seconds` is how long reset() asks for a session again.

        An answer may take `answer_seconds`; None where the caller has a limit of its own.
        """
        self._url = url
        self._retry_seconds = retry_seconds
        self._answer_seconds = answer_seconds
        self._connection: ClientConnection | None = None

    def reset(self, data: Mapping[str, Any]) -> Observed:
        """Begins a session and an episode.

        Raises EnvironmentFailedError.
        """
        return _waited(self._begin({"type": "reset", "data": data}))

    def step(self, action: Mapping[str, Any]) -> Observed:
        """Takes a step.

        Raises ActionError where the action is at fault, and EnvironmentFailedError where the
        session is lost: the environment's state is lost with it.
        """
        try:
            return _waited(self._asked({"type": "step", "data": action}))
        except (ActionError, EnvironmentFailedError):
            raise
        # Other failures of a connection are not the model's doing.
        except Exception as error:
            raise EnvironmentFailedError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Ends the session."""
        _waited(self._dropped())

    async def _begin(self, message: Mapping[str, Any]) -> Observed:
        until = time.monotonic() + self._retry_seconds
        pause = _FIRST_PAUSE
        while True:
            try:
                self._connection = await _connected(self._url)
                return await self._asked(message)
            except ActionError as error:
                raise EnvironmentFailedError(f"reset failed: {error}") from None
            except (EnvironmentFailedError, OSError) as error:
                await self._dropped()
                if time.monotonic() + pause > until:
                    text = f"no session at {self._url}: {error}"
                    raise EnvironmentFailedError(text) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _asked(self, message: Mapping[str, Any]) -> Observed:
        from websockets.exceptions import ConnectionClosed

        if self._connection is None:
            raise EnvironmentFailedError("the session has ended")
        try:
            # A server that refuses a session says why, and may close it before this message.
            with suppress(ConnectionClosed):
                await self._connection.send(json.dumps(message, default=str))
            async with asyncio.timeout(self._answer_seconds):
                answer = await self._connection.recv()
        except TimeoutError as error:
            raise EnvironmentFailedError(f"no answer in {self._answer_seconds:g} s") from error
        except ConnectionClosed as error:
            raise EnvironmentFailedError(f"the connection has ended: {error}") from error
        except asyncio.CancelledError:
            # The answer may still come, and would be taken for that to the next message.
            self._connection.transport.abort()
            raise
        return _observed(answer)

    async def _dropped(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def page(url: str, name: str) -> Any:
    """Returns a page of a server, JSON; raises OSError or ValueError."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    place = urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/{name}", "", ""))
    try:
        with urllib.request.urlopen(place, timeout=_OPEN_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise OSError(f"{place}: HTTP status {error.code}") from error


def require_room(url: str, sessions: int) -> None:
    """Raises ConfigError for a server that has fewer sessions at once than a run needs."""
    try:
        answers = _waited(_asked_at_once(url, sessions))
    except (EnvironmentFailedError, OSError) as error:
        raise ConfigError(f"environment.openenv.url: no session at {url}: {error}") from error
    for most in filter(None, map(_most_sessions, answers)):
        if most < sessions:
            raise ConfigError(
                f"environment.concurrent_episodes: {url} has {most} sessions at once, and "
                f"{sessions} episodes would be under way",
                hint=f"environment.concurrent_episodes: {most}, or more sessions of the server",
            )


async def _asked_at_once(url: str, sessions: int) -> list[str | bytes]:
    """Returns what a server says in each of so many sessions, all of which are open at once.

    They ask for the state, so that no episode begins; "" where one does not come.
    """
    from websockets.exceptions import ConnectionClosed

    opened: list[ClientConnection] = []

    async def ask() -> str | bytes:
        connection = await _connected(url)
        opened.append(connection)
        with suppress(ConnectionClosed):
            await connection.send(json.dumps({"type": "state"}))
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                return await connection.recv()
        return ""

    try:
        return await asyncio.gather(*(ask() for _ in range(sessions)))
    finally:
        await asyncio.gather(*(connection.close() for connection in opened))


def _most_sessions(answer: str | bytes) -> int | None:
    """Returns how many sessions a server has at once, if it says so because it is full."""
    try:
        message = json.loads(answer)
        full = message["type"] == "error" and message["data"]["code"] == "CAPACITY_REACHED"
        most = message["data"].get("max_sessions") if full else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return most if isinstance(most, int) else None


def require_websockets() -> None:
    """Raises ConfigError unless the package of the extra is installed."""
    try:
        import websockets.asyncio.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "environment.openenv: the package websockets is not installed",
            hint="pip install 'tandem-rl[openenv]'",
        ) from error


async def _connected(url: str) -> ClientConnection:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake

    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    place = urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))
    try:
        return await connect(
            place, open_timeout=_OPEN_SECONDS, close_timeout=1.0, max_size=MOST_BYTES, proxy=None
        )
    except (InvalidHandshake, TimeoutError) as error:
        raise EnvironmentFailedError(f"{place}: {error or 'no answer'}") from error


def _observed(text: str | bytes) -> Observed:
    """Returns what an answer says; raises ActionError and EnvironmentFailedError."""
    try:
        answer = json.loads(text)
        kind, data = answer["type"], answer["data"]
        if kind == "error":
            code, said = data.get("code"), _complaint(data)
        else:
            observation = dict(data["observation"])
            reward, done = data.get("reward"), data.get("done", False)
            if not isinstance(reward, bool | int | float | None) or not isinstance(done, bool):
                raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        shown = text[:200] if isinstance(text, str) else f"{len(text)} bytes"
        raise EnvironmentFailedError(f"the server's answer cannot be read: {shown}") from None
    if kind == "error":
        if code in _OF_THE_ACTION:
            raise ActionError(said)
        raise EnvironmentFailedError(f"{said} ({code})")
    for name in ("reward", "done", "metadata"):
        observation.pop(name, None)
    return Observed(observation, None if reward is None else float(reward), done)


def _complaint(data: Mapping[str, Any]) -> str:
    """Returns what an error says: of an action that does not fit, each field with its problem."""
    fields = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors") or ()]
    return "; ".join(fields) or str(data.get("message"))


class _SharedLoop:
    """The loop of all sessions, in a thread of its own that the first one starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.AbstractEventLoop:
        """Returns the loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = self._loop.run_forever
                threading.Thread(target=run, name="openenv", daemon=True).start()
            return self._loop


_shared_loop = _SharedLoop()


def _waited(work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of what runs in the loop; cancels it if the caller is given up."""
    future = asyncio.run_coroutine_threadsafe(work, _shared_loop())
    try:
        return awaited(future)
    finally:
        future.cancel()
