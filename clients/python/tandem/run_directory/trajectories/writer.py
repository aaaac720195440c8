"""Writes trajectories in a thread, while the next step runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from tandem.errors import TandemError
from tandem.run_directory.trajectories.files import (
    EVALUATIONS,
    STEPS,
    evaluation_file,
    step_file,
    trajectory_files,
)
from tandem.run_directory.trajectories.record import Response
from tandem.settings.run import TrajectorySettings
from tandem.utils.atomic_files import replacing

_log = logging.getLogger(__name__)


# Tokens of a row group, prompts included, by which the memory of writer and readers is bounded:
# about 100 MB.
_GROUP_TOKENS = 4 << 20


class _AbandonedError(Exception):
    """The file that is being written is not wanted any more."""


class TrajectoryWriter:
    """Writes one file at a time in a thread; the next one waits for it. A context manager.

    So the writer is at most a file behind the run. Leaving the block waits for the last file, or
    gives it up if the run is to end at once (KeyboardInterrupt). A file that cannot be written,
    because the disk is full for example, is counted and noted, and never ends the run.

    Attributes:
        lost: number of files that could not be written.
    """

    def __init__(self, run_dir: Path, settings: TrajectorySettings) -> None:
        self.lost = self._told = 0
        self._run_dir = run_dir
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._path = run_dir
        self._problem: str | None = None
        self._failing = False
        self._abandoned = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._abandoned.set()
        self.wait()
        if self.lost > 1:
            _log.warning(f"{self.lost:,} trajectory files could not be written")

    def write_step(self, step: int, responses: Iterable[Response]) -> None:
        """Writes a step's responses, if the settings keep those of this step.

        Returns when the file before it is written. `responses` is read by the thread.
        """
        every = self._settings.every
        if every and step % every == 0:
            self._start(step_file(self._run_dir, step), responses, STEPS)

    def write_evaluation(self, step: int, mode: str, responses: Iterable[Response]) -> None:
        """Writes the answers of an evaluation after a step, like write_step()."""
        self._start(evaluation_file(self._run_dir, step, mode), responses, EVALUATIONS)

    def wait(self) -> None:
        """Returns when the last file is written, or could not be; notes what was lost."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            self.lost += 1
            if not self._failing:
                _log.warning(
                    f"{self._path} could not be written: {problem}; the run continues, and "
                    "trajectories/lost in metrics.jsonl counts such files"
                )
        elif self._failing:
            _log.info(f"{self._path}: trajectories can be written again")
        self._failing = problem is not None

    def take_lost(self) -> int:
        """Returns the number of files that were lost since the last call."""
        count, self._told = self.lost - self._told, self.lost
        return count

    def _start(self, path: Path, responses: Iterable[Response], folder: str) -> None:
        self.wait()
        self._path = path
        # Not a daemon: the interpreter must not end under a thread that writes.
        self._thread = threading.Thread(
            target=self._write, args=(path, responses, folder), name="trajectories"
        )
        self._thread.start()

    def _write(self, path: Path, responses: Iterable[Response], folder: str) -> None:
        try:
            write_parquet(path, self._wanted(responses), logprobs=self._settings.logprobs)
            self._remove_old(folder)
        except _AbandonedError:
            return
        # Whatever it is, the record of a run is not worth the run.
        except Exception as error:
            told = error.message if isinstance(error, TandemError) else repr(error)
            self._problem = told.removeprefix(f"{path}: ")

    def _wanted(self, responses: Iterable[Response]) -> Iterator[Response]:
        """Yields the responses until the file is given up."""
        for one in responses:
            if self._abandoned.is_set():
                raise _AbandonedError
            yield one

    def _remove_old(self, folder: str) -> None:
        """Removes all but the newest files: of steps, or of each mode of the evaluations."""
        if self._settings.keep == "all":
            return
        left: dict[str, int] = {}
        for file in reversed(trajectory_files(self._run_dir / folder)):
            left[file.mode] = left.get(file.mode, self._settings.keep) - 1
            if left[file.mode] < 0:
                file.path.unlink(missing_ok=True)


def write_parquet(path: Path, responses: Iterable[Response], *, logprobs: bool = True) -> None:
    """Writes responses to a Parquet file, which is there as a whole or not at all.

    The bytes of the file are a function of the responses and of pyarrow's release.

    Raises RunDirectoryError when the file cannot be written.
    """
    # Imported here: it takes a moment, and most commands do without.
    from pyarrow import parquet

    from tandem.run_directory.trajectories.columns import SCHEMA, table_of, write_options

    with (
        replacing(path) as file,
        parquet.ParquetWriter(file, SCHEMA, **write_options()) as writer,
    ):
        for group in _groups(responses):
            writer.write_table(table_of(group, logprobs=logprobs), row_group_size=len(group))


def _groups(responses: Iterable[Response]) -> Iterator[list[Response]]:
    """Yields the responses in order, in lists of about _GROUP_TOKENS tokens."""
    group: list[Response] = []
    tokens = 0
    for one in responses:
        group.append(one)
        tokens += len(one.trajectory.prompt_token_ids) + len(one.trajectory.response_token_ids)
        if tokens >= _GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group
