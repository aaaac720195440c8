"""A process that calls a function, for functions that compute or may take their process down."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

from tandem.errors import TandemError
from tandem.rewards.judges.cases import Case, Failure, Outcome, call, failure_of
from tandem.rewards.loading import load_function

# Processes are spawned, for gRPC does not survive a fork.
_CONTEXT = multiprocessing.get_context("spawn")
# Seconds between two looks at whether a process that is silent has ended.
_LOOK_SECONDS = 1.0
# Most seconds in which a process loads the function.
LOAD_SECONDS = 600.0


class InProcess:
    """Calls a function in a process of its own, which loads the function itself.

    A process that dies in a call makes that call a failure; the next call starts another one.
    """

    def __init__(self, function: str, folder: Path, field: str) -> None:
        """`function`, `folder` and `field` are those of load_function()."""
        self._loads = (function, folder, field)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._ended = False

    def __call__(self, case: Case) -> Outcome:
        """Returns what the function gives the case."""
        try:
            message = pickle.dumps(case, pickle.HIGHEST_PROTOCOL)
        # A value of a row may raise any error.
        except Exception as error:
            return failure_of(error)
        process = self._process
        if process is None:
            return Failure("the judge was closed")
        answer = process.answer(message)
        if answer is None:
            return self._died(process)
        outcome: Outcome = pickle.loads(answer)
        return outcome

    def prepare(self) -> Failure | None:
        """Waits until a process has loaded the function; the reason if it cannot."""
        try:
            with self._lock:
                if self._ended:
                    return Failure("the judge was closed")
                if self._process is not None:
                    return None
                process = self._process = _Process(self._loads)
        except OSError as error:
            return Failure(f"its process cannot be started: {error.strerror or error}")
        loaded = process.receive(LOAD_SECONDS)
        if loaded is None:
            return self._died(process)
        failure: Failure | None = pickle.loads(loaded)
        return failure

    def _died(self, process: _Process) -> Failure:
        with self._lock:
            self._process = None
        return process.death()

    def end(self) -> bool:
        """Kills the process, with what it started; no other one starts."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
        return True


class _Process:
    """A running process of a judge."""

    def __init__(self, loads: tuple[str, Path, str]) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        # Nothing is sent through it. The process ends when the end of this process closes our end,
        # whatever its function is doing.
        watched, self._alive = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, watched, loads))
        self._process.start()
        theirs.close()
        watched.close()
        # multiprocessing would wait for the process at the end of this one.
        self.kill = Finalize(self, _kill, (self._process,), exitpriority=0)

    def answer(self, message: bytes) -> bytes | None:
        """Returns the answer to a message; None if the process dies."""
        with suppress(OSError):
            self._connection.send_bytes(message)
            return self.receive()
        return None

    def receive(self, seconds: float = math.inf) -> bytes | None:
        """Returns the next message; None if the process dies, or is silent for `seconds`."""
        until = time.monotonic() + seconds
        with suppress(OSError, EOFError):
            # Children of the process may keep the pipe open after the process dies.
            while not wait([self._connection, self._process.sentinel], timeout=_LOOK_SECONDS):
                if self._process.exitcode is not None or time.monotonic() > until:
                    return None
            if self._connection.poll():
                return self._connection.recv_bytes()
        return None

    def death(self) -> Failure:
        """Returns the failure of a call in which the process died."""
        self.kill()
        self._process.join()
        self._connection.close()
        self._alive.close()
        code = self._process.exitcode
        if code is not None and code < 0:
            hint = ": is the machine out of memory?" if code == -signal.SIGKILL else ""
            return Failure(f"its process was ended by {signal.Signals(-code).name}{hint}")
        return Failure(f"its process ended with code {code}")


def _kill(process: BaseProcess) -> None:
    """Kills a process, and what it started in its session."""
    assert process.pid is not None
    # Until it has made its session, there is no such group, and it has started nothing.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _serve(connection: Connection, watched: Connection, loads: tuple[str, Path, str]) -> None:
    """Answers the cases of the connection until its other end is closed."""
    # Signals may reach the whole process group. The run ends its step first, then this process.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_when_closed, args=(watched,), daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # The kernel takes a judge before the run when memory runs out.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    with suppress(EOFError, OSError):
        try:
            function = load_function(*loads)
        except TandemError as error:
            connection.send_bytes(pickle.dumps(failure_of(error)))
            return
        connection.send_bytes(pickle.dumps(None))
        while True:
            case: Case = pickle.loads(connection.recv_bytes())
            outcome: Outcome
            try:
                outcome = call(function, case)
            # It ends this call alone, whatever the function raises.
            except BaseException as error:
                outcome = failure_of(error)
            connection.send_bytes(pickle.dumps(outcome))


def _end_when_closed(watched: Connection) -> None:
    with suppress(OSError):
        watched.poll(None)
    os.killpg(0, signal.SIGKILL)
