"""Programs that execute lines of their input and answer each with a line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rollout.turns import Job, Moment, Turn


class DrivenProgram:
    """A program of its own, for example stream_bench.cc.

    llama_driver.cc and engine_bench.cc are Sides, too. It has a session of its own, as our servers
    have: where other work uses the cores, Linux divides them among sessions (autogroup).
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command; returns the answer. Raises RuntimeError if the program has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def run(self, job: Job) -> Turn:
        """Does the job."""
        answer = self.ask(f"time {job.sequences} {job.prompt_tokens} {job.new_tokens}")
        return Turn(job, Moment(**answer["prefill"]), Moment(**answer["decode"]))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)
