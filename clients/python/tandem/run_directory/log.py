"""The log of a run: what happened, with the time at which it did.

Everything that a run tells goes to the loggers below "tandem". A handler writes it to the run's log
file; the command line has one that prints it; a program of yours may add handlers of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.utils.text_files import encoded

LOG = logging.getLogger("tandem")
# Marks a message that no handler prints, because people see the same in another form.
FILE_ONLY = {"file_only": True}

_log = logging.getLogger(__name__)


def shown(record: logging.LogRecord) -> str | None:
    """Returns a message as people see it; None if it is only for the log file."""
    if getattr(record, "file_only", False):
        return None
    kind = "warning: " if record.levelno >= logging.WARNING else ""
    return kind + record.getMessage()


class RunLog(logging.Handler):
    """Appends to a log file, which may fail: that costs lines of the log, and nothing else.

    Attributes:
        path: the file.
        lost: number of messages that could not be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.lost = 0
        self._file: int | None = None
        self._write(b"")
        formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s")
        formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
        formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message with its time, but for those about this file."""
        if record.name != __name__:
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
                _log.warning(
                    f"{self.path} cannot be written ({error.strerror}): the run continues, and "
                    "its log lacks what happens meanwhile"
                )

    def close(self) -> None:
        """Closes the file."""
        super().close()
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


@contextmanager
def logged_to(path: Path) -> Iterator[RunLog]:
    """Writes to the file `path` what is logged while the body runs."""
    handler = RunLog(path)
    with handled_by(handler):
        try:
            yield handler
        finally:
            handler.close()


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Hands what is logged while the body runs to a handler, from INFO on."""
    level = LOG.level
    LOG.setLevel(min(LOG.getEffectiveLevel(), logging.INFO))
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
