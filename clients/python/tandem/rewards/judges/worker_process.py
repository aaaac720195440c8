"""A process that answers messages by calling a user's code, which may hang in it or take it down.

It ends with the process that started it, whatever its code is doing, and so does what it starts.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.rewards.judges.cases import Failure, FailureKind

# Seconds between two looks at whether a process that is silent has ended.
_LOOK_SECONDS = 1.0
# Seconds between two looks at whether a process that was killed has ended.
_MOMENT_SECONDS = 0.05
# Most bytes that are read of a process's output at a time: what a pipe holds.
_PIPE_BYTES = 1 << 16
# Signals that may reach the whole process group. The run ends its step first, then its processes.
_SIGNALS_OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Start and exit code look at all processes of this one, and are not made for several threads.
_polling = threading.Lock()


class WorkerProcess:
    """A running process that answers messages.

    Attributes:
        kill: kills the process with what it started in its session; any thread may call it.
    """

    def __init__(
        self,
        context: SpawnContext | ForkServerContext,
        serve: Callable[..., None],
        *arguments: Any,
        most_bytes: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        """The process calls `serve`, which begins with begin_worker().

        `serve` gets its end of the connection, one that watched_by() takes, and the `arguments`.
        With `on_output` it gets before these a file for its output, and `on_output` is told what
        the process writes there while receive() or death() runs. `most_bytes` bounds an answer.
        """
        self._most_bytes = most_bytes
        self._connection, theirs = context.Pipe()
        # Nothing is sent through it. The process ends when the end of this process closes our end,
        # whatever its code is doing.
        watched, self._alive = context.Pipe(duplex=False)
        given = [theirs, watched]
        self._output: Connection | None = None
        self._on_output = on_output
        if on_output is not None:
            self._output, writes = context.Pipe(duplex=False)
            os.set_blocking(self._output.fileno(), False)
            given.append(writes)
        self._process: BaseProcess = context.Process(target=serve, args=(*given, *arguments))
        with _polling:
            self._process.start()
        for one in given:
            one.close()
        # multiprocessing would wait for the process at the end of this one.
        self.kill = Finalize(self, _kill, (self._process,), exitpriority=0)

    def answer(self, message: bytes) -> bytes | None:
        """Returns the answer to a message; None if the process dies."""
        with suppress(OSError):
            self._connection.send_bytes(message)
            return self.receive()
        return None

    def receive(self, seconds: float = math.inf) -> bytes | None:
        """Returns the next message; None if the process dies, or is silent for `seconds`.

        Also None for a message longer than it may be.
        """
        until = time.monotonic() + seconds
        with suppress(OSError, EOFError):
            # Children of the process may keep the pipe open after the process dies.
            while self._exit_code() is None and time.monotonic() <= until:
                outputs = [] if self._output is None else [self._output]
                ready = wait(
                    [self._connection, self._process.sentinel, *outputs], timeout=_LOOK_SECONDS
                )
                if self._output in ready:
                    self._read_output()
                if self._connection in ready or self._process.sentinel in ready:
                    break
            if self._connection.poll():
                return self._connection.recv_bytes(self._most_bytes)
        return None

    def death(self) -> Failure:
        """Returns the failure of a call in which the process died."""
        self.kill()
        while (code := self._exit_code()) is None:
            wait([self._process.sentinel], timeout=_MOMENT_SECONDS)
        self._read_output()
        if self._output is not None:
            self._output.close()
            self._output = None
        self._connection.close()
        self._alive.close()
        if code < 0:
            hint = ": is the machine out of memory?" if code == -signal.SIGKILL else ""
            why = f"its process was ended by {signal.Signals(-code).name}{hint}"
        else:
            why = f"its process ended with code {code}"
        return Failure(why, kind=FailureKind.CRASH)

    def _exit_code(self) -> int | None:
        """Returns the process's exit code, None while it runs."""
        with _polling:
            return self._process.exitcode

    def _read_output(self) -> None:
        """Tells what the process has written, at most what a pipe holds."""
        if self._output is None or self._on_output is None:
            return
        try:
            written = os.read(self._output.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return
        if written:
            self._on_output(written)
        else:
            self._output.close()
            self._output = None


def _kill(process: BaseProcess) -> None:
    """Kills a process, and what it started in its session."""
    assert process.pid is not None
    # Until it has made its session, there is no such group, and it has started nothing.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def begin_worker(watched: Connection) -> None:
    """Makes this process a worker: it outlives signals of the run, but not the run.

    `watched` must stay referenced for as long as the process lives.
    """
    os.setsid()
    # A handler, unlike SIG_IGN, is not passed on to the programs that the user's code starts.
    for number in _SIGNALS_OF_THE_RUN:
        signal.signal(number, _do_nothing)
    # Whoever forked this process may block them, and programs that it starts would.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_OF_THE_RUN)
    _end_with_the_other_end(watched)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # The kernel takes a worker before the run when memory runs out.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _end_with_the_other_end(watched: Connection) -> None:
    """Lets the kernel kill this process's group once the other end of a pipe is closed.

    A thread could not: code in C may never release the interpreter's lock.
    """
    number = watched.fileno()
    fcntl.fcntl(number, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_ASYNC)
    # It may have been closed before.
    if watched.poll():
        os.killpg(0, signal.SIGKILL)
