"""Environments made with OpenEnv's own classes, and their servers in threads of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """A guess."""

    number: int


class GuessObservation(Observation):
    """The answer to a guess."""

    said: str = ""


class GuessEnvironment(Environment):
    """A number to guess; 9 breaks it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        answer: int = 0,
        **more: Any,
    ) -> GuessObservation:
        """Begins a game."""
        self._answer = answer
        return GuessObservation(said=f"Seed {seed}.")

    def step(
        self, action: GuessAction, timeout_s: float | None = None, **more: Any
    ) -> GuessObservation:
        """Compares the guess."""
        if action.number == 9:
            raise RuntimeError("there is no 9")
        right = action.number == self._answer
        said = "right" if right else "higher" if action.number < self._answer else "lower"
        return GuessObservation(said=said, done=right, reward=float(right))

    @property
    def state(self) -> State:
        """Returns nothing of interest."""
        return State()


class EchoAction(Action):
    """A message."""

    message: str


class EchoObservation(Observation):
    """The message again."""

    echoed: str = ""
    length: int = 0


class EchoEnvironment(Environment):
    """Says what it hears; its reward is the length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> EchoObservation:
        """Begins."""
        return EchoObservation(echoed="Speak.")

    def step(
        self, action: EchoAction, timeout_s: float | None = None, **more: Any
    ) -> EchoObservation:
        """Echoes a message."""
        length = len(action.message)
        done = action.message == "bye"
        return EchoObservation(echoed=action.message, length=length, reward=length, done=done)

    @property
    def state(self) -> State:
        """Returns nothing of interest."""
        return State()


class CalculatorEnvironment(MCPEnvironment):
    """Tools of MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("calculator")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        @tools.tool
        def fail() -> str:
            """Does not work."""
            raise ValueError("out of order")

        super().__init__(tools)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> Observation:
        """Begins."""
        return Observation()

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **more: Any
    ) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        """Returns nothing of interest."""
        return State()


def guess_app(sessions: int = 100) -> FastAPI:
    """The application of GuessEnvironment, with so many sessions at once."""
    return create_fastapi_app(
        GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=sessions
    )


def echo_app() -> FastAPI:
    """The application of EchoEnvironment."""
    return create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=100)


def calculator_app() -> FastAPI:
    """The application of CalculatorEnvironment."""
    return create_fastapi_app(
        CalculatorEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=100
    )


def answering(texts: Sequence[str]) -> Callable[[int, int, str], str]:
    """The models say one text after the other."""
    return lambda seed, index, before: texts[min(before.count("<|im_start|>user"), len(texts) - 1)]


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serves an application; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
