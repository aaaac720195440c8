"""Options, folders, limits and the table, which the sections of bench_rollout.py share."""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rollout.driven import DrivenProgram
from rollout.gguf_file import write_gguf
from rollout.machine import Limits
from rollout.servers import NotSupportedError, RolloutServer
from rollout.table import Table
from rollout.turns import Job, Side, Turns

_BUILD_SCRIPT = Path(__file__).parent / "build_llama_cpp.sh"


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        skip: shell patterns of the names of sides that do not run.
    """

    model: Path
    prompt_tokens: int
    new_tokens: int
    rounds: int
    counts: tuple[int, ...]
    skip: tuple[str, ...]

    def job(self, sequences: int) -> Job:
        """Returns the job of so many sequences."""
        return Job(sequences, self.prompt_tokens, self.new_tokens)

    def skips(self, side: str) -> bool:
        """Whether a side is left out."""
        return any(fnmatch.fnmatchcase(side, pattern) for pattern in self.skip)


class Bench:
    """A run: its options, a folder for its files, the machine's limits, and the table."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.limits = Limits()
        self.table = Table()
        self._llama: Path | None = None
        self._clusters = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.options.prompt_tokens + self.options.new_tokens

    def server(
        self,
        settings: Mapping[str, Any],
        asked: Mapping[str, Any] = MappingProxyType({}),
        *,
        longest: int = 0,
        trainer: dict[str, Any] | None = None,
    ) -> RolloutServer:
        """Returns a rollout server that is not running yet, for as many sequences as a job has."""
        self._clusters += 1
        return RolloutServer(
            self.folder / f"cluster-{self._clusters}",
            settings,
            asked=asked,
            sequences=max(self.options.counts),
            longest=longest or self.longest,
            trainer=trainer,
        )

    def llama(self, form: str) -> DrivenProgram:
        """Returns llama.cpp with the model in a format of gguf_file.FORMATS, not running yet."""
        if self._llama is None:
            built = subprocess.run([_BUILD_SCRIPT], check=True, stdout=subprocess.PIPE, text=True)
            self._llama = Path(built.stdout.splitlines()[-1])
        file = self.folder / f"{form}.gguf"
        if not file.exists():
            write_gguf(self.options.model, file, form)
        threads = str(torch.get_num_threads())
        bounds = [str(max(self.options.counts)), str(self.longest)]
        return DrivenProgram([self._llama / "llama_driver", file, threads, *bounds])

    def take_turns(self, sides: Mapping[str, Side], job: Job) -> Turns:
        """Measures the limits of the machine, lets the sides alternate, and prints their times."""
        self.limits.measure()
        turns = Turns(sides, job, self.options.rounds)
        turns.print()
        return turns

    def start(
        self, stack: ExitStack, name: str, server: RolloutServer, figures: Iterable[str] = ()
    ) -> RolloutServer | None:
        """Starts a side's server; None if it is skipped, or not supported, as the table then says.

        Args:
            figures: those that cannot be measured without the server.
        """
        reason = "skipped"
        if not self.options.skips(name):
            try:
                return stack.enter_context(server)
            except NotSupportedError as error:
                print(f"  {name}: not supported: {error}", flush=True)
                reason = "not supported"
        for figure in figures:
            self.table.missing(figure, reason)
        return None


def build_directory() -> Path:
    """Returns the folder of the build that the servers are from."""
    return Path(os.environ.get("TANDEM_BUILD_DIR", "build/release"))
