"""Draws the rollouts of an asynchronous run in a thread, while earlier steps train."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem import tracing
from tandem._proto.types.v1 import server_pb2
from tandem.metrics import IdleShares, StepClock, WorkTime
from tandem.run_directory.checkpoints import SavedRollouts
from tandem.run_directory.directory import RunDirectory
from tandem.session.session import Session
from tandem.training.groups import Drawn, draw_groups
from tandem.training.rollout_files import (
    StepRollouts,
    read_rollouts,
    remove_rollouts,
    write_rollouts,
)
from tandem.training.schedule import Schedule
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


class RolloutsAhead:
    """The rollouts of the steps to come, drawn and judged in a thread; a context manager.

    Steps are drawn one after the other, each with the weights that the Schedule says, and taken in
    the same order: nothing depends on what is ready first. Leaving the block gives up what is drawn
    at the moment.
    """

    def __init__(
        self,
        session: Session,
        run_dir: Path,
        schedule: Schedule,
        served: server_pb2.WeightsVersion,
        first: int,
        last_step: int,
        rollouts: Sequence[StepRollouts] = (),
    ) -> None:
        """Prepares to draw the steps after `last_step`, or after `rollouts`, which are drawn.

        `served` are the weights that the rollout servers hold, and `first` is the number of
        examples of the data that were drawn before the first of the steps.
        """
        self._schedule = schedule
        self._session = session
        self._run_dir = run_dir
        self._changed = threading.Condition()
        self._drawn = {one.step: (one, StepClock()) for one in rollouts}
        # The last step that is drawn, and the number of examples of the data until its end.
        self._last_drawn = rollouts[-1].step if rollouts else last_step
        self._examples = rollouts[-1].end if rollouts else first
        # The last step that may be drawn now, and the weights that draw it.
        self._last_allowed = self._last_drawn
        self._served = self._weights = served
        self._closed = False
        self._error: BaseException | None = None
        self._progress = Progress()
        self._work = WorkTime()

    def __enter__(self) -> Self:
        # The waits of the thread belong to the caller's span. A call that hangs must not keep the
        # process alive.
        thread = threading.Thread(
            target=copy_context().run, args=(self._draw,), name="rollouts-ahead", daemon=True
        )
        session = self._session
        session.progress.beside = self._progress
        session.reward.progress = self._progress
        if session.environment is not None:
            session.environment.progress = self._progress
        self._idle = IdleShares(self._work.seconds)
        thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._session.rollouts.give_up()

    def draw_after(self, step: int, weights: server_pb2.WeightsVersion) -> None:
        """Lets the steps be drawn that the schedule draws with the weights after `step`, if any.

        The rollout servers hold these weights.
        """
        if not self._schedule.is_publication(step):
            return
        last = min(self._schedule.last_drawn_with(step), self._session.settings.steps)
        with self._changed:
            self._weights = weights
            self._last_allowed = max(self._last_allowed, last)
            self._changed.notify_all()

    def publish(
        self, step: int, weights: server_pb2.WeightsVersion, clock: StepClock, *, evaluates: bool
    ) -> None:
        """Publishes the weights after a step when the schedule, or an evaluation, asks for them.

        First it waits until the weights that they replace are not needed any more. Raises what
        draw_groups() raised, and what Session.publish() raises.
        """
        if not (evaluates or self._schedule.is_publication(step)):
            return
        with clock.phase("wait"):
            self._wait_for(self._last_before(step))
        with clock.phase("publish"):
            if weights != self._served:
                self._session.publish()
                self._served = weights

    def take(self, step: int, clock: StepClock) -> Drawn:
        """Returns the rollouts of a step once they are there; adds the times of drawing to `clock`.

        Raises what draw_groups() raised.
        """
        with clock.phase("wait"):
            self._wait_for(step)
        rollouts, times = self._drawn.pop(step)
        clock.seconds |= times.seconds
        return rollouts.drawn

    def save(self, step: int) -> SavedRollouts:
        """Writes the steps after `step` whose weights are gone when the run continues from there.

        It waits until they are drawn. Raises what draw_groups() raised, and StorageError.
        """
        last = self._last_before(step)
        self._wait_for(last)
        digests = {
            str(later): write_rollouts(self._run_dir, self._drawn[later][0])
            for later in range(step + 1, last + 1)
        }
        return SavedRollouts(self._schedule.staleness, self._schedule.origin, digests)

    def idle_metrics(self, clock: StepClock) -> dict[str, float]:
        """Returns the idle shares of the servers since the last call, at the end of a step."""
        seconds = clock.seconds
        valuing = seconds.get("critic", 0.0) if self._session.uses_critic else None
        return self._idle.metrics(
            self._work.seconds, seconds.get("train", 0.0), seconds.get("eval", 0.0), valuing
        )

    def _last_before(self, step: int) -> int:
        """Returns the last step to draw with older weights than those after a step."""
        return min(self._schedule.last_drawn_before(step), self._session.settings.steps)

    def _wait_for(self, step: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._last_drawn >= step or self._error is not None)
            if self._last_drawn < step and self._error is not None:
                raise self._error

    def _draw(self) -> None:
        try:
            while self._may_draw():
                step = self._last_drawn + 1
                self._draw_step(step)
        except BaseException as error:  # It is raised in the thread that takes the step.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _may_draw(self) -> bool:
        """Waits until a step may be drawn; False if none will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._last_drawn < self._last_allowed)
            return not self._closed

    def _draw_step(self, step: int) -> None:
        self._progress.begin(f"step {step}")
        clock = _DrawClock(self._progress, self._work)
        with tracing.span("draw ahead", {"tandem.step": step}):
            drawn = draw_groups(
                self._session, step, self._examples, self._weights, clock, self._run_dir
            )
        rollouts = StepRollouts(step, self._examples, drawn)
        with self._changed:
            self._drawn[step] = (rollouts, clock)
            self._last_drawn = step
            self._examples = rollouts.end
            self._changed.notify_all()


def open_ahead(
    session: Session,
    run: RunDirectory,
    served: server_pb2.WeightsVersion,
    examples_drawn: int,
    last_step: int,
) -> RolloutsAhead:
    """Returns the rollouts of a run that begins, or continues from its last checkpoint.

    The rollout servers hold the weights `served`.

    A run that another `async.max_staleness` had drawn for, or that is prolonged beyond what its
    weights had drawn, begins a new schedule: its next step is drawn with the weights of the step
    before.

    Raises RunDirectoryError for files that are damaged or missing.
    """
    staleness = session.settings.async_.max_staleness
    saved = None if run.state is None else run.state.rollouts
    rollouts: list[StepRollouts] = []
    schedule = Schedule(staleness, last_step)
    if saved is not None and saved.staleness == staleness:
        rollouts = [
            read_rollouts(run.path, int(step), digest, session.data)
            for step, digest in saved.files.items()
        ]
        last_drawn = rollouts[-1].step if rollouts else last_step
        schedule = Schedule(staleness, saved.origin)
        if last_drawn < schedule.last_drawn_before(last_step):
            schedule = Schedule(staleness, last_drawn)
    elif saved is not None:
        _log.info("async.max_staleness changed: the steps that were drawn ahead are drawn again")
    if saved is not None and saved.origin < schedule.origin < session.settings.steps:
        _log.info(f"step {schedule.origin + 1} is drawn with the weights of the step before")
    remove_rollouts(run.path, frozenset(one.step for one in rollouts))
    return RolloutsAhead(session, run.path, schedule, served, examples_drawn, last_step, rollouts)


class _DrawClock(StepClock):
    """The clock of a step that is drawn ahead, whose generation counts as work."""

    def __init__(self, progress: Progress, work: WorkTime) -> None:
        super().__init__(progress)
        self._work = work

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Also counts the phase "generate" as work of the rollout servers."""
        if name != "generate":
            with super().timed(name):
                yield
            return
        with super().timed(name), self._work.block():
            yield
