"""Calls of environments in processes, each of which has one episode at a time.

An environment that hangs, ends its process, or takes too much memory costs its own episode: its
process is killed and another one takes its place. Processes are used again for the next episodes.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tandem.environments import worker
from tandem.environments.calls import Call, Calls
from tandem.environments.contract import AskJunior, EnvironmentClass
from tandem.environments.live import Said
from tandem.errors import ConfigError, EnvironmentFailedError
from tandem.rewards.judges.cases import Failure, FailureKind, failure_of, too_slow
from tandem.rewards.judges.process import LOAD_SECONDS
from tandem.rewards.judges.watch import Watch
from tandem.rewards.judges.worker_process import WorkerProcess
from tandem.rewards.judges.workers import settle
from tandem.run_directory.log import FILE_ONLY

_log = logging.getLogger(__name__)

# Most bytes of memory of a process, where the settings do not say.
MEMORY_BYTES = 4 << 30
# Most bytes that a call may print, and the last of them that the log has.
MOST_PRINTED = 16 << 20
_KEPT_BYTES = 1 << 14
# Processes are forked from a server that has imported the worker, and has no other thread.
_CONTEXT = multiprocessing.get_context("forkserver")
# Signals that may reach all processes of a run, which ends its step first.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Loads:
    """The class that a process loads, and a bound of its memory.

    Attributes:
        arguments: those of load_function().
        memory_bytes: most bytes of its memory.
    """

    arguments: tuple[str, Path, str]
    memory_bytes: int


class RemoteEnvironment:
    """An environment of one episode in a process, in whose thread its methods are called.

    Attributes:
        tasks: its calls with their outcomes, then None.
        waits: whether no thread was asked for yet.
        process: that of the episode; None before the first call and once it is not used again.
        failure: why it has no process.
    """

    def __init__(self, *, takes_junior: bool) -> None:
        self.tasks: SimpleQueue[tuple[Call[RemoteEnvironment], Future[Said | Failure]] | None]
        self.tasks = SimpleQueue()
        self.waits = True
        self.process: _Process | None = None
        self.failure = Failure("the process of the environment has ended", kind=FailureKind.CRASH)
        self._takes_junior = takes_junior
        self._junior: AskJunior | None = None

    def reset(self, arguments: Mapping[str, Any]) -> Said | Failure:
        """Makes the environment and begins an episode."""
        row = dict(arguments)
        if self._takes_junior:
            self._junior = row.pop("junior")
        return self._ask("reset", row, self._takes_junior)

    def tool(self, name: str, arguments: Mapping[str, Any]) -> Said | Failure:
        """Calls a tool."""
        return self._ask("tool", name, arguments)

    def reward(self) -> Said | Failure:
        """Asks for the reward."""
        return self._ask("reward")

    def close(self) -> Said | Failure:
        """Closes the environment, unless its process has ended."""
        return Said() if self.process is None else self._ask("close")

    def _ask(self, name: str, *arguments: Any) -> Said | Failure:
        if self.process is None:
            return self.failure
        return self.process.call(name, arguments, self._junior)


class CallsInProcesses(Calls[RemoteEnvironment]):
    """Calls in a fixed number of processes; further episodes wait until one is free."""

    def __init__(self, name: str, processes: int, limit_seconds: float, loads: Loads) -> None:
        """`name` begins the notes about long calls."""
        super().__init__()
        self._watch = Watch(name, limit_seconds)
        self._waiting: SimpleQueue[RemoteEnvironment | None] = SimpleQueue()
        self._holders = [_Holder(loads, self._watch, self._waiting) for _ in range(processes)]
        self._opened = False

    def open(self) -> None:
        """Starts the processes; returns once all have loaded the class, or raises ConfigError."""
        _start_fork_server()
        self._opened = True
        for holder in self._holders:
            holder.thread.start()
        for holder in self._holders:
            if (failure := holder.loaded.result()) is not None:
                raise ConfigError(
                    f"environment.class: a process cannot load it: {failure.what}",
                    hint=failure.trace or None,
                )

    def environment(self, kind: EnvironmentClass) -> RemoteEnvironment:
        """Returns an environment, which gets a process with its first call."""
        return RemoteEnvironment(takes_junior=kind.takes_junior)

    def start(self, call: Call[RemoteEnvironment]) -> Future[Said | Failure]:
        """Begins a call."""
        future: Future[Said | Failure] = Future()
        environment = call.environment
        environment.tasks.put((call, future))
        if environment.waits:
            environment.waits = False
            self._waiting.put(environment)
        return future

    def leave(self, environment: RemoteEnvironment) -> None:
        """Frees the process of an environment, once its calls have ended."""
        environment.tasks.put(None)

    def end(self) -> None:
        """Kills the processes, with what they started."""
        if self._opened:
            for holder in self._holders:
                holder.end()


class _Holder:
    """A thread with a process, which it replaces when the process ends.

    Attributes:
        loaded: why the first process could not load the class; None if it has.
    """

    def __init__(
        self, loads: Loads, watch: Watch, waiting: SimpleQueue[RemoteEnvironment | None]
    ) -> None:
        """`waiting` has the environments without a process; None ends one thread."""
        self.thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self.loaded: Future[Failure | None] = Future()
        self._loads = loads
        self._watch = watch
        self._waiting = waiting
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._ended = False

    def end(self) -> None:
        """Kills the process, and ends the thread; no other process starts."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
        self._waiting.put(None)

    def _run(self) -> None:
        settle(self.loaded, self._start())
        while not self._ended and (environment := self._waiting.get()) is not None:
            # A start that failed once is tried again for each episode.
            if self._process is None and (failure := self._start()) is not None:
                environment.failure = failure
            environment.process = self._process
            while (task := environment.tasks.get()) is not None:
                self._make(*task)

    def _make(self, call: Call[RemoteEnvironment], future: Future[Said | Failure]) -> None:
        """Makes a call; replaces the process that it ends."""
        process = call.environment.process
        if process is None:
            settle(future, call.make())
            return

        def give_up() -> None:
            process.kill()
            settle(future, too_slow(self._watch.limit))

        watched = self._watch.begin(call.place, give_up)
        outcome = call.make()
        in_time = self._watch.end(watched)
        process.tell_printed(call.place)
        kind = outcome.kind if isinstance(outcome, Failure) else None
        ended = not in_time or kind in (FailureKind.CRASH, FailureKind.FLOOD)
        if ended:
            call.environment.process = None
        if in_time:
            settle(future, outcome)
        if ended:
            # One that is out of memory, or prints without end, would still be there.
            process.death()
            with self._lock:
                self._process = None
            self._start()

    def _start(self) -> Failure | None:
        """Starts a process, which loads the class; returns why it could not."""
        try:
            with self._lock:
                if self._ended:
                    return Failure("the run has ended")
                process = self._process = _Process(self._loads)
        except OSError as error:
            return Failure(f"a process cannot be started: {error.strerror or error}")
        failure = process.loaded()
        if failure is not None:
            with self._lock:
                self._process = None
        return failure


class _Process:
    """A process of environments, with what it has printed since tell_printed()."""

    def __init__(self, loads: Loads) -> None:
        self._printed = b""
        self._length = 0
        self._process = WorkerProcess(
            _CONTEXT,
            worker.serve,
            loads.arguments,
            loads.memory_bytes,
            most_bytes=worker.MOST_BYTES,
            on_output=self._hear,
        )
        self.kill: Callable[[], object] = self._process.kill
        self.death = self._process.death

    def loaded(self) -> Failure | None:
        """Waits until the process has loaded the class; returns why it could not."""
        answer = self._process.receive(LOAD_SECONDS)
        outcome = self._died() if answer is None else worker.outcome(*worker.read(answer))
        self.tell_printed("its class")
        return outcome if isinstance(outcome, Failure) else None

    def call(
        self, name: str, arguments: tuple[Any, ...], junior: AskJunior | None
    ) -> Said | Failure:
        """Returns the outcome of a call, in which the environment may ask the junior."""
        try:
            message = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
        # A value of a row may raise any error.
        except Exception as error:
            return failure_of(error)
        while (answer := self._process.answer(message)) is not None:
            kind, value = worker.read(answer)
            if kind != worker.QUESTION:
                return worker.outcome(kind, value)
            message = pickle.dumps(_told(junior, value))
        return self._died()

    def tell_printed(self, place: str) -> None:
        """Writes into the log what the process has printed in a call."""
        if not self._length:
            return
        left_out = self._length - len(self._printed)
        cut = f", of which the first {left_out:,} are left out" if left_out else ""
        text = self._printed.decode(errors="backslashreplace").rstrip()
        _log.info(
            f"environment: {place}: {self._length:,} bytes printed{cut}\n{text}", extra=FILE_ONLY
        )
        self._printed, self._length = b"", 0

    def _hear(self, output: bytes) -> None:
        self._length += len(output)
        self._printed = (self._printed + output)[-_KEPT_BYTES:]
        if self._length > MOST_PRINTED:
            self.kill()

    def _died(self) -> Failure:
        failure = self._process.death()
        if self._length > MOST_PRINTED:
            text = f"a call printed more than {MOST_PRINTED:,} bytes"
            return Failure(text, kind=FailureKind.FLOOD)
        last = self._printed.decode(errors="backslashreplace").rstrip()
        return replace(failure, trace=f"it printed last:\n{last}" if last else "")


def _told(junior: AskJunior | None, question: Mapping[str, Any]) -> tuple[str, str | None]:
    """Returns the junior's answer to a question, and why there is none."""
    assert junior is not None
    messages = question["messages"]
    try:
        return junior(messages, **{k: v for k, v in question.items() if k != "messages"}), None
    except EnvironmentFailedError as error:
        return "", error.message


def _start_fork_server() -> None:
    """Starts the server that forks the processes, which signals to all of a run do not reach."""
    _CONTEXT.set_forkserver_preload(["__main__", worker.__name__])
    # It would unblock the signals again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
