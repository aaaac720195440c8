"""The numbers of a run as TensorBoard events, which `tensorboard --logdir RUN_DIR` draws."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

# The `tensorboard` package reads and writes its format itself; torch and TensorFlow are not
# imported.
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tandem.metrics import numbers
from tandem.utils.atomic_files import write_atomically


class EventFile:
    """A new events file in `folder`; a context manager. What is added is on disk at once."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        file = (folder / f"events.out.tfevents.{time.time_ns()}").open("xb")
        self._records = RecordWriter(file)
        self._write(Event(file_version="brain.Event:2"))
        # Makes a running TensorBoard drop the steps of an earlier start that are done again.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=first_step, session_log=start))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._records.close()

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Writes every number of a line that has a `step`, under `prefix` and its key."""
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in numbers(line, prefix)
        ]
        self._write(Event(step=line["step"], summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def event_files(folder: Path) -> Iterator[Path]:
    """Yields the events files of `folder` that an EventFile wrote."""
    for file in folder.glob("events.out.tfevents.*"):
        if re.fullmatch(r"events\.out\.tfevents\.\d+", file.name):
            yield file


def forget_after(folder: Path, step: int) -> None:
    """Takes the events of later steps out of the files of `folder`."""
    for file in event_files(folder):
        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        # The loader ends before a record that a crash cut off.
        for record in RawEventFileLoader(str(file)).Load():
            if Event.FromString(record).step <= step:
                records.write(record)
        write_atomically(file, buffer.getvalue())
