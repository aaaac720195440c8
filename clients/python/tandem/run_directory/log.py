"""The log of a run: what happened, with the time at which it did.

Everything that a run tells goes to the logger "tandem". A handler writes it to the run's log file;
a program of yours may add handlers of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.utils.text_files import encoded

LOG = logging.getLogger("tandem")
# Without a handler, Python would print warnings, which are printed already.
LOG.addHandler(logging.NullHandler())


class RunLog(logging.Handler):
    """Appends to a log file, which may fail: that costs lines of the log, and nothing else.

    Attributes:
        path: the file.
        lost: number of messages that could not be written.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        """`note` is told once that the file cannot be written."""
        super().__init__()
        self.path = path
        self.lost = 0
        self._note = note
        self._file: int | None = None
        self._write(b"")
        formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s")
        formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
        formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message with its time."""
        self._write(encoded(self.format(record) + "\n"))

    def _write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                self._note(
                    f"warning: {self.path} cannot be written ({error.strerror}): the run goes on, "
                    "and its log lacks what happens meanwhile"
                )

    def close(self) -> None:
        """Closes the file."""
        super().close()
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


@contextmanager
def logged_to(path: Path, note: Callable[[str], None]) -> Iterator[RunLog]:
    """Writes to the file `path` what is logged while the body runs; `note` prints a line."""
    handler = RunLog(path, note)
    level = LOG.level
    LOG.setLevel(min(LOG.getEffectiveLevel(), logging.INFO))
    LOG.addHandler(handler)
    try:
        yield handler
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        handler.close()


def logged(note: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that logs a text and prints it with `note`."""

    def both(text: str) -> None:
        is_warning = text.startswith("warning: ")
        LOG.log(
            logging.WARNING if is_warning else logging.INFO, "%s", text.removeprefix("warning: ")
        )
        note(text)

    return both
