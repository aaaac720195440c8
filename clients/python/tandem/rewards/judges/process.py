"""A process that calls a function, for functions that compute or may take their process down."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tandem.errors import TandemError
from tandem.rewards.judges.cases import Case, Failure, Outcome, call, failure_of
from tandem.rewards.judges.worker_process import WorkerProcess, begin_worker
from tandem.rewards.loading import load_function

# Processes are spawned, for gRPC does not survive a fork.
_CONTEXT = multiprocessing.get_context("spawn")
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
        self._process: WorkerProcess | None = None
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
                process = self._process = WorkerProcess(_CONTEXT, _serve, self._loads)
        except OSError as error:
            return Failure(f"its process cannot be started: {error.strerror or error}")
        loaded = process.receive(LOAD_SECONDS)
        if loaded is None:
            return self._died(process)
        failure: Failure | None = pickle.loads(loaded)
        return failure

    def _died(self, process: WorkerProcess) -> Failure:
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


def _serve(connection: Connection, watched: Connection, loads: tuple[str, Path, str]) -> None:
    """Answers the cases of the connection until its other end is closed."""
    begin_worker(watched)
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
