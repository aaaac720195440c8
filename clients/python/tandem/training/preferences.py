"""Training on pairs of a chosen and a rejected response (`tandem dpo`).

One step: log-probabilities of both responses of every pair, of the model and of the reference → the
loss of the pairs and its derivatives → one update of the senior.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem._proto.trainer.v1 import trainer_pb2
from tandem.data.dataset import Example
from tandem.data.preferences import REFERENCE_COLUMNS
from tandem.metrics import StepClock
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.run_directory.directory import RunDirectory
from tandem.session.reference import ServerReference
from tandem.session.session import Session
from tandem.settings.run import DpoSettings
from tandem.training.loop import Loop, OnStep
from tandem.training.pair_losses import Numbers, PairLoss, Pairs, pair_loss
from tandem.utils.interrupt import Interrupt


def train_preferences(
    session: Session,
    run: RunDirectory,
    on_step: OnStep,
    interrupt: Interrupt | None = None,
    *,
    discard_unsaved: bool = False,
) -> int:
    """Runs training on the rows' pairs; returns the last step that was done."""
    settings = session.settings.dpo
    with Loop(session, run, on_step, interrupt, discard_unsaved=discard_unsaved) as loop:
        for step in loop.steps():
            clock = StepClock(session.progress)
            examples = session.data.batch(loop.examples_drawn, settings.batch_size)
            samples = samples_of(examples)
            with clock.phase("reference"):
                reference = _reference(session, examples, samples)
            with session.train_phase(clock):
                loss, reply = step_of_pairs(
                    session.trainer,
                    samples,
                    reference,
                    settings,
                    run_id=run.run_id,
                    step=step,
                    expected_version=loop.weights.version,
                )
            metrics = {"loss/total": loss.value, **loss.metrics}
            loop.finish(step, reply.report, clock, len(examples), metrics)
    return loop.last_step


def samples_of(examples: Sequence[Example]) -> list[SupervisedSample]:
    """Returns the responses of pairs: the chosen and the rejected one of each in turn."""
    return [
        SupervisedSample(one.token_ids, ids, one.vision_inputs)
        for one in examples
        for ids in (one.response_ids, one.rejected_ids)
    ]


def step_of_pairs(
    trainer: TrainerClient,
    samples: Sequence[SupervisedSample],
    reference: Numbers,
    settings: DpoSettings,
    *,
    run_id: str,
    step: int,
    expected_version: int,
) -> tuple[PairLoss, trainer_pb2.TrainStepResponse]:
    """Makes one update on pairs; returns their loss before it, and the trainer's reply.

    `samples` hold the chosen and the rejected response of each pair in turn, and `reference` [2 N]
    the sums of their log-probabilities under the reference policy. Raises ValueError for half a
    pair, FailedPreconditionError if the trainer holds another version than `expected_version`.
    """
    if len(samples) % 2 or len(reference) != len(samples):
        raise ValueError(
            f"samples: {len(samples)} responses and {len(reference)} numbers of the reference are "
            "not two of each for every pair"
        )
    sums = log_prob_sums(trainer, samples)
    tokens = np.array([len(one.response_token_ids) for one in samples], dtype=np.float64)
    pairs = Pairs(
        *(part for numbers in (sums, reference, tokens) for part in (numbers[::2], numbers[1::2]))
    )
    loss = pair_loss(pairs, settings)
    weights = np.stack([loss.chosen_weights, loss.rejected_weights], axis=1).ravel()
    reply = trainer.train_step(
        [
            SupervisedSample(
                one.prompt_token_ids,
                one.response_token_ids,
                one.vision_inputs,
                weights=np.full(len(one.response_token_ids), weight),
            )
            for one, weight in zip(samples, weights, strict=True)
        ],
        run_id=run_id,
        step=step,
        expected_version=expected_version,
        objective={"aggregation": "token_sum"},
        request_id=f"{run_id}/{step}",
    )
    return loss, reply


def log_prob_sums(
    trainer: TrainerClient, samples: Sequence[SupervisedSample], *, reference: bool = False
) -> Numbers:
    """Returns the log-probability of each response under the trainer's model, or its reference."""
    replies = trainer.compute_log_probs(samples, reference=reference)
    return np.array([from_tensor(reply.logprobs).sum(dtype=np.float64) for reply in replies])


def _reference(
    session: Session, examples: Sequence[Example], samples: Sequence[SupervisedSample]
) -> Numbers:
    """Returns the log-probability of each response under the reference policy of the run."""
    source = session.settings.dpo.reference_source
    if source == "none":
        return np.zeros(len(samples))
    if source == "rows":
        rows = [[one.row[name] for name in REFERENCE_COLUMNS] for one in examples]
        return np.array(rows, dtype=np.float64).ravel()
    if isinstance(session.reference, ServerReference):
        return np.array([one.sum(dtype=np.float64) for one in session.reference.of_texts(samples)])
    return log_prob_sums(session.trainer, samples, reference=True)
