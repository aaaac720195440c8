"""The lock of a run directory: one process at a time uses the directory."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tandem.errors import RunDirectoryBusyError, RunDirectoryError, StorageError

_log = logging.getLogger(__name__)


# The file that is locked. It names the process that holds the lock.
LOCK = ".lock"
# Seconds between two attempts, and between two notes, of a process that waits.
_RETRY_SECONDS = 0.5
_NOTE_SECONDS = 30.0
# The errors of flock for a lock that another process holds.
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
# Its errors where the file system has no locks, as Lustre unless it is mounted with them.
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(folder: Path, wait_seconds: float) -> Iterator[None]:
    """Holds the lock of a run directory while the body runs.

    Where another process holds it, waits for at most `wait_seconds`, and says so.

    Raises:
        RunDirectoryBusyError: another process holds the lock, and did so until the end of the wait.
        RunDirectoryError: the file system has no locks.
        StorageError: the file system could not lock now.
    """
    begun = time.monotonic()
    told_at = -_NOTE_SECONDS
    while (file := _try(folder)) is None:
        waited = time.monotonic() - begun
        by = _holder(folder)
        if waited >= wait_seconds:
            after = f" after {waited:.0f} s" if wait_seconds else ""
            raise RunDirectoryBusyError(
                f"{folder} is in use by another process{by}{after}",
                hint="--wait-for-lock SECONDS waits for it to end",
            )
        if waited - told_at >= _NOTE_SECONDS:
            told_at = waited
            _log.info(
                f"{folder} is in use by another process{by}: waiting for it to end, for at most "
                f"{wait_seconds - waited:.0f} s"
            )
        time.sleep(min(_RETRY_SECONDS, max(0.0, wait_seconds - waited)))
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def _try(folder: Path) -> TextIO | None:
    """Returns the locked file; None if another process holds the lock."""
    # Whoever does not get the lock must not change what the file says of its holder.
    file = (folder / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that made the directory may have removed it, and the file, in between.
        if not os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            raise BlockingIOError(errno.EWOULDBLOCK, "removed")
    except OSError as error:
        file.close()
        if error.errno == errno.ENOENT:
            # The folder went with the run that made it.
            folder.mkdir(parents=True, exist_ok=True)
        elif error.errno not in _TAKEN:
            raise _failed(folder, error) from None
        return None
    with suppress(OSError):  # A full disk takes no name, but a lock.
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), json.dumps(holder).encode())
    return file


def _failed(folder: Path, error: OSError) -> RunDirectoryError | StorageError:
    if error.errno in _UNSUPPORTED:
        return RunDirectoryError(
            f"run_dir: {folder}: its file system has no locks (flock: {error.strerror}), which "
            "keep two processes from writing the same run",
            hint="mount it with locks (Lustre: the option `flock`), or choose another run_dir",
        )
    return StorageError(f"run_dir: {folder}: it cannot be locked now: {error.strerror or error}")


def _holder(folder: Path) -> str:
    """Returns the process that holds the lock, in words; "" if the file does not say."""
    try:
        said = json.loads((folder / LOCK).read_text(encoding="utf-8", errors="replace"))
        return f" (pid {said['pid']} on {said['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
