"""The numbers of a run as TensorBoard events: `tensorboard --logdir RUN_DIR` draws them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

# The `tensorboard` package writes its format itself; torch and TensorFlow are not imported.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tandem.metrics import numbers


class EventFile:
    """A new events file in `folder`; a context manager. What is added is on disk at once."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        file = (folder / f"events.out.tfevents.{time.time_ns()}").open("xb")
        self._records = RecordWriter(file)
        self._write(Event(file_version="brain.Event:2"))
        # Makes TensorBoard forget these steps where an earlier start wrote them.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=first_step, session_log=start))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._records.close()

    def add(self, line: Mapping[str, Any], prefix: str = "") -> None:
        """Every number of a line that has a `step`, under `prefix` and its key."""
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in numbers(line, prefix)
        ]
        self._write(Event(step=line["step"], summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()
