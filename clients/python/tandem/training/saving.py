"""Checkpoints that the servers write beside the next steps of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass

from tandem import tracing
from tandem.run_directory.checkpoints import SavedState
from tandem.run_directory.directory import RunDirectory
from tandem.run_directory.mirror import Mirror
from tandem.training.rollout_files import remove_rollouts


@dataclass(frozen=True)
class BegunSave:
    """A checkpoint whose state the servers have copied.

    Attributes:
        state: what state.json is to hold once the checkpoint is on disk.
        waits: each returns when another server has written its part, or raises. Empty: all is on
            disk.
    """

    state: SavedState
    waits: tuple[Callable[[], object], ...] = ()


class Saves:
    """The checkpoints of a run, of which one is written at a time."""

    def __init__(self, run: RunDirectory, mirror: Mirror | None = None) -> None:
        """Prepares to save; `mirror` gets every checkpoint that is on disk."""
        self._run = run
        self._mirror = mirror
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def keep(self, save: BegunSave) -> None:
        """Makes `save` the checkpoint to resume from, once it is on disk.

        A thread waits for what is not on disk yet. The save before must be settled.
        """
        if not save.waits:
            self._write(save.state)
            return
        # A call that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._finish, save), name="checkpoint", daemon=True
        )
        self._thread.start()

    def settle(self, *, wait: bool = True) -> None:
        """Raises what the last save failed with, once; waits for its end unless told not to."""
        if self._thread is None or (not wait and self._thread.is_alive()):
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self, save: BegunSave) -> None:
        try:
            with tracing.span("checkpoint_write"):
                for wait in save.waits:
                    wait()
                self._write(save.state)
        except BaseException as error:  # It is raised in the thread of the run.
            self._error = error

    def _write(self, state: SavedState) -> None:
        self._run.write_state(state)
        if state.rollouts is not None:
            remove_rollouts(self._run.path, frozenset(map(int, state.rollouts.files)))
        if self._mirror is not None:
            self._mirror.add(state)
