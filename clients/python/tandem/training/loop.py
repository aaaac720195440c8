"""The training loop. Short on purpose: copy it and change it.

One step: prompts → samples of senior and junior together → rewards → one update of the senior →
its new weights to the rollout servers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from tandem import tracing
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.cluster.plan import draws_responses
from tandem.errors import RewardError, StorageError, TandemError
from tandem.evaluation import Evaluation, evaluate
from tandem.evaluation.answers import held_out
from tandem.evaluation.report import in_words
from tandem.metrics import StepClock, staleness_metrics, step_line
from tandem.preflight.learnability import FlatRewards
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.run_directory.account import why_untrained
from tandem.run_directory.checkpoints import SavedState, checkpoint_name
from tandem.run_directory.directory import RunDirectory
from tandem.run_directory.log import FILE_ONLY
from tandem.run_directory.mirror import Mirror
from tandem.run_directory.trajectories.record import Response
from tandem.session.session import Session
from tandem.settings.run import EvalMode
from tandem.training.ahead import RolloutsAhead, open_ahead
from tandem.training.groups import Drawn, Group, draw_groups
from tandem.training.kl_control import first_kl_coefficient, next_kl_coefficient
from tandem.training.own_responses import draw_own_responses
from tandem.training.saving import BegunSave, Saves
from tandem.training.start import start_run
from tandem.utils.interrupt import Interrupt, StopRequested

_log = logging.getLogger(__name__)


# Steps in a row without any reward that end a run.
MOST_UNJUDGED = 3

OnStep = Callable[[dict[str, Any]], None]


def train(
    session: Session,
    run: RunDirectory,
    on_step: OnStep,
    interrupt: Interrupt | None = None,
    *,
    discard_unsaved: bool = False,
) -> int:
    """Runs tandem policy-gradient training; returns the last step that was done."""
    settings = session.settings
    with Loop(session, run, on_step, interrupt, discard_unsaved=discard_unsaved) as loop:
        flat = FlatRewards(settings)
        unjudged = 0
        for step in loop.steps():
            clock = StepClock(session.progress)
            try:
                drawn = loop.rollouts(step, clock)
            except StopRequested as stop:
                loop.give_up(stop)
                break
            unjudged = _tell_failures(session, run, step, drawn, unjudged)
            _tell_missing(session, run, step, drawn)
            samples, kl_coefficient = _samples(drawn.kept), loop.kl_coefficient
            if session.reference is not None and samples:
                with clock.phase("reference"):
                    samples = session.reference.added_to(samples)
            if session.teachers is not None and samples:
                with clock.phase("teachers"):
                    rows = {group.id: group.example for group in drawn.kept}
                    samples = session.teachers.added_to(
                        samples, [rows[sample.group_id] for sample in samples]
                    )
            with session.train_phase(clock):
                report = _train_step(
                    session,
                    run,
                    step,
                    samples,
                    loop.weights,
                    kl_coefficient,
                    clock,
                    all_failed=drawn.all_failed,
                )
            loop.require_critic(report)
            with clock.phase("trajectories"):
                run.trajectories.write_step(step, _responses(drawn.groups))
            line = loop.finish(
                step,
                report,
                clock,
                len(drawn.groups),
                drawn.metrics()
                | loop.staleness(drawn)
                | {"policy/kl_coefficient": kl_coefficient}
                | session.rollouts.take_counts().metrics(),
                next_kl_coefficient(settings, kl_coefficient, report, len(samples)),
            )
            if warning := flat.add(line):
                _log.warning(f"{warning}")
    return loop.last_step


def _samples(groups: Sequence[Group]) -> list[PolicySample]:
    """Returns the responses to train on: those whose reward did not fail."""
    return [
        PolicySample(trajectory, group.id, reward)
        for group in groups
        for trajectory, reward in zip(group.trajectories, group.shaped_rewards, strict=True)
        if reward is not None
    ]


def _train_step(
    session: Session,
    run: RunDirectory,
    step: int,
    samples: Sequence[PolicySample],
    weights: server_pb2.WeightsVersion,
    kl_coefficient: float | None,
    clock: StepClock,
    *,
    all_failed: bool,
) -> trainer_pb2.StepReport:
    """Makes a step of the senior, and tells `clock` how long the critic worked.

    Returns the report of a skipped step if there is no sample.
    """
    if not samples:
        reason = "no response has a reward" if all_failed else "no group has rewards that differ"
        return trainer_pb2.StepReport(step=step, weights=weights, skipped=True, skip_reason=reason)
    reply = session.trainer.train_step(
        samples,
        run_id=run.run_id,
        step=step,
        expected_version=weights.version,
        objective=session.settings.policy_objective() | {"kl_coefficient": kl_coefficient},
        request_id=f"{run.run_id}/{step}",
    )
    if session.uses_critic:
        clock.seconds["critic"] = reply.critic_seconds
    return reply.report


def _responses(groups: Sequence[Group]) -> Iterator[Response]:
    """Yields all responses, of failed rewards and dropped groups too."""
    for group in groups:
        row = group.example.shown_row
        judged = zip(group.trajectories, group.texts, group.rewards, group.punishments, strict=True)
        for index, (trajectory, text, reward, punishment) in enumerate(judged):
            yield Response(
                trajectory,
                text=text,
                reward=reward,
                scores={name: values[index] for name, values in group.scores.items()},
                overlong_punishment=punishment,
                group_id=group.id,
                place=group.example.shown_place,
                row=row,
            )


def _tell_failures(
    session: Session, run: RunDirectory, step: int, drawn: Drawn, unjudged: int
) -> int:
    """Tells the rewards of a step that failed.

    Returns the number of the last steps without any reward, of which `unjudged` were before this
    one. Raises RewardError when there are MOST_UNJUDGED.
    """
    for failure in drawn.failures:
        _log.warning(f"step {step}: {failure}", extra=FILE_ONLY)
    rewards = [reward for group in drawn.groups for reward in group.rewards]
    failed = rewards.count(None)
    if failed:
        _log.info(
            f"step {step}: the reward failed for {failed} of {len(rewards)} responses, which are "
            f"left out; the first: {drawn.failures[0].splitlines()[0]} (all: {run.log})"
        )
    if not drawn.all_failed:
        return 0
    if unjudged + 1 == MOST_UNJUDGED:
        raise RewardError(
            f"step {step}: the reward failed for every response, as in the {unjudged} steps before"
            f"\n{drawn.failures[0]}",
            hint="--resume continues when the judge works again",
        )
    return unjudged + 1


def _tell_missing(session: Session, run: RunDirectory, step: int, drawn: Drawn) -> None:
    """Notes that a step has fewer groups than it should."""
    wanted = session.settings.batch.prompts_per_step
    if len(drawn.kept) < wanted:
        text = (
            f"step {step}: {len(drawn.kept)} of {wanted} groups: the rewards of the other "
            f"{len(drawn.groups) - len(drawn.kept)} that were drawn do not differ "
            f"(batch.filter_groups.max_num_gen_batches: {drawn.num_gen_batches})"
        )
        _log.info(text)


def train_supervised(
    session: Session,
    run: RunDirectory,
    on_step: OnStep,
    interrupt: Interrupt | None = None,
    *,
    discard_unsaved: bool = False,
) -> int:
    """Runs supervised training; returns the last step that was done.

    The senior learns the rows' answers, or with `sft.responses: senior` responses of its own.
    """
    settings = session.settings
    own = draws_responses(settings, "sft")
    with Loop(session, run, on_step, interrupt, discard_unsaved=discard_unsaved) as loop:
        for step in loop.steps():
            clock = StepClock(session.progress)
            examples = session.data.batch(loop.examples_drawn, settings.sft.batch_size)
            drawn = None
            if own:
                with clock.phase("generate"):
                    drawn = draw_own_responses(session, step, examples, loop.weights)
                samples = drawn.samples()
            else:
                samples = [
                    SupervisedSample(one.token_ids, one.response_ids, one.vision_inputs)
                    for one in examples
                ]
            if session.teachers is not None:
                with clock.phase("teachers"):
                    samples = session.teachers.added_to(samples, examples)
            with session.train_phase(clock):
                reply = session.trainer.train_step(
                    samples,
                    run_id=run.run_id,
                    step=step,
                    expected_version=loop.weights.version,
                    objective=settings.supervised_objective(),
                    request_id=f"{run.run_id}/{step}",
                )
            metrics: dict[str, Any] = {}
            if drawn is not None:
                with clock.phase("trajectories"):
                    run.trajectories.write_step(step, drawn.responses(session.codec))
                metrics = drawn.metrics() | session.rollouts.take_counts().metrics()
            loop.finish(step, reply.report, clock, len(examples), metrics)
    return loop.last_step


class Loop:
    """The work of every training loop around its steps; a context manager.

    Entering it brings the servers to where the run starts and lets the run write, in this order, so
    that a run loses nothing when that fails or is interrupted. An error after a step saves what the
    steps before it did, and says so in a note of the error.

    Attributes:
        weights: the senior's weights that the next step starts from.
        last_step: the last step that was done.
        examples_drawn: number of examples of the data that the steps so far used.
        kl_coefficient: the coefficient that the next step begins with; None without a KL.
    """

    def __init__(
        self,
        session: Session,
        run: RunDirectory,
        on_step: OnStep,
        interrupt: Interrupt | None = None,
        *,
        discard_unsaved: bool = False,
    ) -> None:
        self._session = session
        self._run = run
        self._on_step = on_step
        self._interrupt = interrupt
        self._discard_unsaved = discard_unsaved
        self._step = self.last_step = run.first_step - 1
        # The last step whose line is in metrics.jsonl.
        self._recorded = self.last_step
        # The span of the step, while one is done.
        self._span = ExitStack()
        # The rollouts that an asynchronous run draws ahead, and the stack that ends them.
        self._ahead: RolloutsAhead | None = None
        self._open = ExitStack()
        self._mirror: Mirror | None = None
        self._saves = Saves(run)

    def __enter__(self) -> Self:
        session, run = self._session, self._run
        ids = {"tandem.run_id": run.run_id}
        checkpoint = session.settings.checkpoint
        if checkpoint.upload is not None:
            self._mirror = Mirror(
                run.path, checkpoint.upload, checkpoint.keep, required=checkpoint.upload_required
            )
            self._mirror.require_own(run.run_id)
            self._saves = Saves(run, self._mirror)
        with tracing.span("start", ids), session.progress.phase("start"):
            start = start_run(session, run, discard_unsaved=self._discard_unsaved)
            session.check_optimizers(self.last_step)
        self.examples_drawn = _examples_drawn(session, run.state)
        ahead = None
        if session.is_async:
            ahead = open_ahead(session, run, start.weights, self.examples_drawn, self.last_step)
        # Before the first step, or what an error kept the run from after its last one. Nothing is
        # written yet, so Ctrl-C still ends the run at once.
        with session.progress.phase("eval"):
            evaluations = self._evaluations_due(self.last_step)
        if self._interrupt is not None:
            self._interrupt.defer()
            session.reward.stopping = lambda: self._interrupt.requested
            if session.environment is not None:
                session.environment.stopping = lambda: self._interrupt.requested
        run.begin(session.settings.steps)
        run.record(start.record(), session.facts())
        _log.info(str(start))
        self.weights = start.weights
        self._critic = start.critic
        self.kl_coefficient = first_kl_coefficient(session.settings, run.state)
        self._begun = time.monotonic() - run.elapsed_seconds
        if self._mirror is not None:
            self._open.enter_context(self._mirror)
        self._keep(self.last_step, evaluations)
        if ahead is not None:
            self._ahead = self._open.enter_context(ahead)
            ahead.draw_after(self.last_step, self.weights)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._open:
            # A second Ctrl-C is no Exception, and ends the run at once.
            if isinstance(error, Exception):
                error.add_note(f"in step {self._step}: {self._rescue()}")
                with suppress(StorageError):  # The log has it, and the run ends already.
                    self._settle_uploads()
            elif error is None:
                with self._session.progress.phase("checkpoint"):
                    self._settle_last_save()
                self._settle_uploads()
                with self._session.progress.phase("trajectories"):
                    self._run.trajectories.wait()
            self._span.__exit__(kind, error, trace)

    def steps(self) -> Iterator[int]:
        """Yields the steps that are left, until the run is asked to stop."""
        first = self.last_step + 1
        for step in range(first, self._session.settings.steps + 1):
            if self._is_asked_to_stop and step > first:
                self._save_at_stop()
                return
            self._step = step
            self._session.progress.begin(f"step {step}")
            ids = {"tandem.run_id": self._run.run_id, "tandem.step": step}
            self._span.enter_context(tracing.span("step", ids))
            # No `with`: an error in the step ends this generator, and __exit__ tells the span.
            yield step
            self._span.close()

    @property
    def _is_asked_to_stop(self) -> bool:
        return self._interrupt is not None and self._interrupt.requested

    @property
    def _unsaved(self) -> bool:
        """Whether there are steps that no checkpoint of the run holds."""
        return self.last_step > (self._run.state.step if self._run.state else 0)

    def require_critic(self, report: trainer_pb2.StepReport) -> None:
        """Raises FailedPreconditionError unless the critic made the step, from the run's weights.

        A restarted critic begins at its base model, and would train from there. The critic may have
        made a step that the trainer skipped.
        """
        if self._critic is not None and "critic/loss" in report.metrics:
            self._critic = self._session.require_critic(self._critic.version + 1)

    def finish(
        self,
        step: int,
        report: trainer_pb2.StepReport,
        clock: StepClock,
        examples: int,
        metrics: Mapping[str, Any] | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, Any]:
        """Publishes the step's weights; evaluates, saves and records.

        `examples` is the number of examples drawn for the step, `metrics` has the metrics that the
        client computes, and the next step begins with `kl_coefficient`. Returns the line of
        metrics.jsonl.
        """
        run = self._run
        why = why_untrained(report, self.weights)
        run.write_version(step, report.weights, self._critic)
        changed = report.weights != self.weights
        self.weights, self.last_step = report.weights, step
        self.examples_drawn += examples
        self.kl_coefficient = kl_coefficient
        saved: BegunSave | None = None
        try:
            evaluates = bool(run.evaluations_due(step, self._session.settings.steps))
            if self._ahead is not None:
                self._ahead.publish(step, self.weights, clock, evaluates=evaluates)
            else:
                with clock.phase("publish"):
                    if changed:
                        self._session.publish()
            self._session.check()
            if evaluates:
                with clock.timed("eval"):
                    self._keep(step, self._evaluations_due(step))
            if self._ahead is not None and not self._is_asked_to_stop:
                self._ahead.draw_after(step, self.weights)
            self._saves.settle(wait=False)
            self._settle_uploads(wait=False)
            if self._is_asked_to_stop or self._is_to_save(step):
                with clock.phase("checkpoint"):
                    saved = self._save_on_servers()
        except StopRequested:
            pass  # steps() tells what could not be saved.
        finally:
            # The step is done, whether or not it reached the rollout servers and the disk.
            line = step_line(
                {
                    **report.metrics,
                    **(metrics or {}),
                    **clock.metrics(),
                    **(self._ahead.idle_metrics(clock) if self._ahead is not None else {}),
                    **(self._mirror.metrics() if self._mirror is not None else {}),
                    "step": step,
                    "step/trained": int(why is None),
                    "trackers/lines_waiting": run.tracker_lines_waiting,
                    "time_seconds": time.monotonic() - self._begun,
                    "trajectories/lost": run.trajectories.take_lost(),
                    "version/senior": report.weights.version,
                }
            )
            run.write_metrics(line)
            self._recorded = step
            run.track(line)
        # The line is on disk before the checkpoint counts: a resumed run needs it.
        if saved is not None:
            self._saves.keep(saved)
        self._on_step(line)
        if why is not None:
            run.account.why[why] += 1
            _log.info(f"step {step} trained nothing: {why}")
        return line

    def rollouts(self, step: int, clock: StepClock) -> Drawn:
        """Returns the rollouts of a step: draws them, or waits until they are drawn ahead.

        Raises what draw_groups() raises.
        """
        if self._ahead is not None:
            return self._ahead.take(step, clock)
        return draw_groups(
            self._session, step, self.examples_drawn, self.weights, clock, self._run.path
        )

    def staleness(self, drawn: Drawn) -> dict[str, float]:
        """Returns how far the tokens to train lie behind the weights; none in a run in step."""
        if self._ahead is None:
            return {}
        return staleness_metrics(
            (one for group in drawn.kept for one in group.trajectories), self.weights.version
        )

    def _is_to_save(self, step: int) -> bool:
        settings = self._session.settings
        every = settings.checkpoint.every
        due = every > 0 and step % every == 0
        return due or (step == settings.steps and settings.checkpoint.at_end)

    def _evaluations_due(self, step: int) -> dict[EvalMode, Evaluation]:
        """Makes the evaluations after a step that are due and not made yet."""
        modes = self._run.evaluations_due(step, self._session.settings.steps)
        try:
            return evaluate(self._session, modes) if modes else {}
        except StopRequested as stop:
            _log.info(f"the evaluation after step {step} is given up: {stop}")
            return {}

    def _keep(self, step: int, evaluations: Mapping[EvalMode, Evaluation]) -> None:
        """Records evaluations, and their answers."""
        session, run = self._session, self._run
        for mode, evaluation in evaluations.items():
            answers = evaluation.responses(held_out(session), session.codec)
            run.trajectories.write_evaluation(step, mode, answers)
            summary = evaluation.summary()
            run.write_eval({"step": step} | summary)
            _log.info(f"step {step}: {in_words(summary)}")

    def give_up(self, stop: StopRequested) -> None:
        """Saves the steps before the one that was given up, and ends the loop."""
        _log.info(f"step {self._step} is given up: {stop}")
        self._save_at_stop()

    def _save_at_stop(self) -> None:
        """Saves the steps that no checkpoint holds yet, in a run that was asked to stop."""
        self._saves.settle()
        if not self._unsaved:
            return
        try:
            self._saves.keep(self._save_on_servers())
        except StopRequested as stop:
            saved = self._run.state.step if self._run.state else 0
            _log.info(f"the steps after step {saved} could not be saved: {stop}")

    def _settle_last_save(self) -> None:
        """Waits for the last checkpoint; saves again before it raises what that failed with."""
        try:
            self._saves.settle()
        except TandemError as error:
            error.add_note(f"after step {self.last_step}: {self._rescue()}")
            raise

    def _settle_uploads(self, *, wait: bool = True) -> None:
        if self._mirror is not None:
            with self._session.progress.phase("upload"):
                self._mirror.settle(wait=wait)

    def _rescue(self) -> str:
        """Saves the steps that no checkpoint holds yet; returns the outcome in words."""
        with suppress(Exception):  # A save that failed leaves steps unsaved, and is made again.
            self._saves.settle()
        problem = self._save_if_it_can() if self._unsaved else None
        saved = self._run.state.step if self._run.state else 0
        failed = f"; what was done since then could not be saved: {problem}" if problem else ""
        if not saved:
            return f"there is no checkpoint yet, --clean starts again{failed}"
        return f"saved after step {saved}, --resume continues from there{failed}"

    def _save_if_it_can(self) -> str | None:
        """Saves the last steps; returns the reason if it cannot."""
        if self._recorded < self.last_step:
            return f"metrics.jsonl lacks step {self.last_step}"
        trainer = self._session.trainer
        health = trainer.check_health()
        if health.status != "SERVING":
            return f"the {trainer.role} is {health.status} {health.reason}".rstrip()
        try:
            with self._session.progress.phase("checkpoint"), tracing.span("checkpoint"):
                self._saves.keep(self._save_on_servers())
                self._saves.settle()
        except TandemError as error:
            return error.message
        # The thread that draws ahead may have died of anything.
        except Exception as error:
            return repr(error)
        return None

    def _save_on_servers(self) -> BegunSave:
        """Has trainer and critic save themselves as they are after the last step that was done.

        The checkpoint before is settled first. The checkpoint is on disk after the waits of the
        result, and so are the trajectories until the step.

        Raises FailedPreconditionError when the trainer holds other weights than that step left, or
        the critic another version.
        """
        session, run = self._session, self._run
        self._saves.settle()
        session.require_weights(self.weights)
        if self._critic is not None:
            session.require_critic(self._critic.version)
        rollouts = None if self._ahead is None else self._ahead.save(self.last_step)
        # Saving prunes older checkpoints before state.json names the new one. With one more to
        # keep, the checkpoint that it still names survives a crash; the next save prunes it.
        keep = session.settings.checkpoint.keep
        keep = keep + 1 if keep else 0
        name = checkpoint_name(self.last_step)
        trainer, critic = Path("checkpoints"), None
        waits: list[Callable[[], object]] = []
        save = (str(run.path / trainer), name, keep)
        version = self.weights.version
        if session.trainer.start_checkpoint(*save, expected_version=version):
            waits.append(partial(session.trainer.save_checkpoint, *save, expected_version=version))
        if self._critic is not None:
            critic = trainer / "critic"
            save = (str(run.path / critic), name, keep)
            version = self._critic.version
            with session.critic() as client:
                if client.start_checkpoint(*save, expected_version=version):
                    waits.append(partial(_finish_critic, session, save, version))
        with session.progress.phase("trajectories"):
            run.trajectories.wait()
        state = SavedState(
            self.last_step,
            self.weights.version,
            str(trainer / name),
            critic and str(critic / name),
            self.weights.digest,
            self.examples_drawn,
            self.kl_coefficient,
            rollouts,
        )
        return BegunSave(state, tuple(waits))


def _finish_critic(session: Session, save: tuple[str, str, int], version: int) -> None:
    """Waits until the critic has written a checkpoint that it has begun."""
    with session.critic() as client:
        client.save_checkpoint(*save, expected_version=version)


def _examples_drawn(session: Session, state: SavedState | None) -> int:
    """Returns the number of examples of the data that a run had drawn when it saved this state."""
    if state is None:
        return 0
    if state.examples_drawn is not None:
        return state.examples_drawn
    return state.step * session.settings.examples_per_step(session.purpose)
