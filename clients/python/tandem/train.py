"""The training loop. Short on purpose: copy it and change it.

One step: prompts → samples of senior and junior together → rewards → one update of the senior →
its new weights to the rollout servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.data import Example, fill
from tandem.errors import ConfigError
from tandem.evaluate import evaluate, in_words
from tandem.interrupt import Interrupt
from tandem.learnability import FlatRewards, obstacles
from tandem.metrics import StepClock, response_metrics, step_line
from tandem.requests import STEP_NAME, PolicySample, Prompt, SupervisedSample
from tandem.rewards import Judged
from tandem.run_dir import RunDirectory, SavedState
from tandem.schedule import prompt_seed
from tandem.session import Session
from tandem.settings import given
from tandem.types.v1 import trajectory_pb2
from tandem.wire import trajectory_record

OnStep = Callable[[dict[str, Any]], None]


def train(
    session: Session, run: RunDirectory, on_step: OnStep, interrupt: Interrupt | None = None
) -> int:
    """Tandem policy-gradient training; returns the last step that was done."""
    settings = session.settings
    version = _begin(session, run, interrupt)
    for obstacle in obstacles(settings):
        session.note(f"warning: this run cannot learn: {obstacle}")
    flat = FlatRewards(settings)
    start = time.monotonic() - run.elapsed_seconds
    step = run.first_step - 1
    for step in range(run.first_step, settings.steps + 1):
        clock = StepClock()

        examples = session.data.batch(step, settings.batch.prompts_per_step)
        with clock.phase("generate"):
            groups = session.rollouts.generate(
                [step_prompt(session, example, step, i) for i, example in enumerate(examples)]
            )

        with clock.phase("reward"):
            texts = [[session.codec.decode(t.response_token_ids) for t in g] for g in groups]
            judged = session.reward(examples, texts)
        samples, records = _samples(step, groups, texts, judged.rewards)
        _tell_failures(session, run, step, judged, len(records))

        with clock.phase("train"):
            reply = session.trainer.train_step(
                samples,
                run_id=run.run_id,
                step=step,
                expected_version=version,
                objective=given(settings.objective),
                request_id=f"{run.run_id}/{step}",
            )
        with clock.phase("publish"):
            if reply.report.weights.version != version:
                session.publish()
        version = reply.report.weights.version

        line = step_line(
            {
                **reply.report.metrics,
                **response_metrics(groups, judged.rewards),
                **clock.metrics(),
                "step": step,
                "time_seconds": time.monotonic() - start,
                "version/senior": version,
            }
        )
        run.write_trajectories(step, records)
        run.write_metrics(line)
        on_step(line)
        if warning := flat.add(line):
            session.note(f"warning: {warning}")
        if reply.report.skipped:
            print(f"step {step} skipped: {reply.report.skip_reason}", file=run.log)
        if _end_of_step(session, run, step, version, interrupt):
            break
    return step


def step_prompt(session: Session, example: Example, step: int, index: int) -> Prompt:
    """The request for one prompt of a step."""
    settings = session.settings
    return Prompt(
        token_ids=example.token_ids,
        seed=prompt_seed(settings.seed, step, index),
        num_samples=settings.batch.samples_per_prompt,
        sampling=given(settings.sampling),
        tandem=given(settings.tandem),
        return_other_logprobs=settings.return_other_logprobs,
    )


def _samples(
    step: int,
    groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
    texts: Sequence[Sequence[str]],
    rewards: Sequence[Sequence[float | None]],
) -> tuple[list[PolicySample], list[dict[str, Any]]]:
    """What to train on, and what to record: also the responses whose reward failed."""
    samples: list[PolicySample] = []
    records: list[dict[str, Any]] = []
    for index, group in enumerate(zip(groups, texts, rewards, strict=True)):
        group_id = f"step-{step}/prompt-{index}"
        for trajectory, text, reward in zip(*group, strict=True):
            records.append(
                trajectory_record(trajectory, text=text, reward=reward, group_id=group_id)
            )
            if reward is not None:
                samples.append(PolicySample(trajectory, group_id, reward))
    return samples, records


def _tell_failures(
    session: Session, run: RunDirectory, step: int, judged: Judged, responses: int
) -> None:
    """Says how many rewards of a step failed; ConfigError when none is left."""
    failures = judged.failures
    for failure in failures:
        print(f"step {step}: {failure}", file=run.log)
    if len(failures) == responses:
        raise ConfigError(f"step {step}: the reward failed for every response\n{failures[0]}")
    if failures:
        session.note(
            f"step {step}: the reward failed for {len(failures)} of {responses} responses, which "
            f"are left out; the first: {failures[0].splitlines()[0]} (all: {run.log.name})"
        )


def train_supervised(
    session: Session, run: RunDirectory, on_step: OnStep, interrupt: Interrupt | None = None
) -> int:
    """Supervised training on the rows' answers; returns the last step that was done."""
    settings = session.settings
    response_end(session)  # Raises before anything is written.
    version = _begin(session, run, interrupt)
    start = time.monotonic() - run.elapsed_seconds
    step = run.first_step - 1
    for step in range(run.first_step, settings.steps + 1):
        clock = StepClock()
        examples = session.data.batch(step, settings.sft.batch_size)
        samples = [supervised_sample(session, example) for example in examples]
        with clock.phase("train"):
            reply = session.trainer.train_step(
                samples,
                run_id=run.run_id,
                step=step,
                expected_version=version,
                request_id=f"{run.run_id}/{step}",
            )
        with clock.phase("publish"):
            if reply.report.weights.version != version:
                session.publish()
        version = reply.report.weights.version
        line = step_line(
            {
                **reply.report.metrics,
                **clock.metrics(),
                "step": step,
                "time_seconds": time.monotonic() - start,
                "version/senior": version,
            }
        )
        run.write_metrics(line)
        on_step(line)
        if _end_of_step(session, run, step, version, interrupt):
            break
    return step


def supervised_sample(session: Session, example: Example) -> SupervisedSample:
    """The text to learn after an example's prompt; ConfigError when the row does not have it."""
    sft = session.settings.sft
    text = fill(sft.response, example.row, "sft.response")
    response = session.codec.encode(text, special=False)
    return SupervisedSample(example.token_ids, [*response, *response_end(session)])


def response_end(session: Session) -> list[int]:
    """The token ids after every text to learn; ConfigError when the tokenizer does not name it."""
    if not session.settings.sft.append_eos:
        return []
    if session.codec.eos_token_id is None:
        raise ConfigError(
            f"sft.append_eos: {session.settings.tokenizer} names no end-of-sequence token",
            hint="eos_token in tokenizer_config.json names it; sft.append_eos=false does without",
        )
    return [session.codec.eos_token_id]


def _begin(session: Session, run: RunDirectory, interrupt: Interrupt | None) -> int:
    """Brings the servers to where the run goes on from, then lets it write; their version.

    In this order, so that a run loses nothing when its checkpoint cannot be loaded, nor when it is
    interrupted until then.
    """
    if run.state is None:
        version = session.synchronize()
    else:
        if run.state.critic is not None:
            with session.critic() as critic:
                critic.load_checkpoint(str(run.path / run.state.critic))
        version = session.serve_checkpoint(run.path / run.state.trainer)
    if interrupt is not None:
        interrupt.defer()
    run.begin()
    return version


def _end_of_step(
    session: Session, run: RunDirectory, step: int, version: int, interrupt: Interrupt | None
) -> bool:
    """Evaluates and saves when it is time; true when the run was asked to stop."""
    settings = session.settings
    session.check()
    if settings.eval.every and step % settings.eval.every == 0:
        summary = evaluate(session).summary()
        run.write_eval({"step": step} | summary)
        session.note(f"step {step}: {in_words(summary)}")
    stop = interrupt is not None and interrupt.requested
    last = step == settings.steps
    due = settings.checkpoint.every > 0 and step % settings.checkpoint.every == 0
    if due or stop or (last and settings.checkpoint.at_end):
        save(session, run, step, version)
    return stop


def save(session: Session, run: RunDirectory, step: int, version: int) -> SavedState:
    """Saves trainer and critic as they are after `step`."""
    # Saving prunes the older ones before state.json names the new one: with one more to keep, the
    # one that it still names survives a crash in between. The next save prunes it.
    keep = session.settings.checkpoint.keep
    keep = keep + 1 if keep else 0
    name = STEP_NAME.format(step)
    trainer, critic = Path("checkpoints"), None
    session.trainer.save_checkpoint(str(run.path / trainer), name, keep)
    if session.settings.objective.advantage_estimator == "gae":
        critic = trainer / "critic"
        with session.critic() as client:
            client.save_checkpoint(str(run.path / critic), name, keep)
    state = SavedState(step, version, str(trainer / name), critic and str(critic / name))
    run.write_state(state)
    return state
