"""The process of an environment: it makes the class's objects, one episode at a time.

It imports little, and what it imports is shared by all such processes: they are forked from one
that has imported this module.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.environments.live import MOST_SAID, MOST_SHOWN, LiveEnvironment, Said
from tandem.errors import EnvironmentFailedError, TandemError
from tandem.rewards.judges.cases import Failure, FailureKind, TooMuchError, failure_of
from tandem.rewards.judges.worker_process import begin_worker
from tandem.rewards.loading import load_function

# Kinds of messages to the run: the result of a call, its failure, a question to the junior.
SAID, FAILED, QUESTION = "said", "failed", "question"
# Most bytes of a message to the run: of JSON, which writes a character as twelve at most.
MOST_BYTES = 12 * MOST_SAID + MOST_SHOWN + (1 << 20)


def serve(
    connection: Connection,
    watched: Connection,
    output: Connection,
    loads: tuple[str, Path, str],
    memory_bytes: int,
) -> None:
    """Answers calls of environments until the run ends this process.

    `loads` are the arguments of load_function(). More than `memory_bytes` of memory fail.
    """
    begin_worker(watched)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with suppress(EOFError, OSError):
        try:
            made = load_function(*loads)
        except TandemError as error:
            _send(connection, FAILED, asdict(failure_of(error)))
            return
        _send(connection, SAID, {})
        environment = LiveEnvironment(made)
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            if name == "reset":
                environment = LiveEnvironment(made)
            _send(connection, *_answer(environment, name, arguments, connection))


def _answer(
    environment: LiveEnvironment, name: str, arguments: Sequence[Any], connection: Connection
) -> tuple[str, Mapping[str, Any]]:
    """Makes a call; returns its message."""
    call: Callable[..., Said] = getattr(environment, name)
    if name == "reset":
        row, takes_junior = arguments
        junior = {"junior": _Junior(connection)} if takes_junior else {}
        arguments = [{**row, **junior}]
    try:
        return SAID, call(*arguments).record()
    # It ends this call alone, whatever the environment raises.
    except BaseException as error:
        return FAILED, asdict(failure_of(error))


class _Junior:
    """The junior as AskedJunior, which is asked in the run's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> str:
        """Returns the junior's answer; raises EnvironmentFailedError."""
        question = {
            "messages": [dict(one) for one in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        length = len(json.dumps(question, ensure_ascii=False))
        if length > MOST_SAID:
            raise TooMuchError(
                f"junior() was told {length:,} characters of JSON, at most {MOST_SAID:,}"
            )
        with self._lock:
            _send(self._connection, QUESTION, question)
            answer, failure = pickle.loads(self._connection.recv_bytes())
        if failure is not None:
            raise EnvironmentFailedError(failure)
        return str(answer)


def _send(connection: Connection, kind: str, value: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps([kind, value]).encode())


def read(message: bytes) -> tuple[str, Mapping[str, Any]]:
    """Returns the kind and the value of a message to the run."""
    kind, value = json.loads(message)
    return kind, value


def outcome(kind: str, value: Mapping[str, Any]) -> Said | Failure:
    """Returns the outcome that a message tells."""
    if kind == SAID:
        return Said(**value)
    return Failure(**{**value, "kind": FailureKind(value["kind"])})
