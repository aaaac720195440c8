"""Training of a reward model on pairs of responses (`tandem reward-model`).

One step: scores of both responses of every pair → the Bradley-Terry loss and its derivatives → one
update of the critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem.data.preferences import margin_of
from tandem.metrics import StepClock
from tandem.rpc.client import CriticClient
from tandem.rpc.requests import SupervisedSample, ValueSample
from tandem.rpc.wire import from_tensor
from tandem.run_directory.directory import RunDirectory
from tandem.session.session import Session
from tandem.training.loop import Loop, OnStep
from tandem.training.pair_losses import Numbers
from tandem.training.preferences import samples_of
from tandem.utils.interrupt import Interrupt


@dataclass(frozen=True)
class ScoreLoss:
    """The loss of the scores of N pairs.

    Attributes:
        value: the mean over the pairs.
        by_chosen: [N], the derivative by the score of each chosen response.
        by_rejected: [N], by that of each rejected one.
        metrics: what metrics.jsonl shows of the batch.
    """

    value: float
    by_chosen: Numbers
    by_rejected: Numbers
    metrics: dict[str, float]


def bradley_terry(
    chosen: Numbers, rejected: Numbers, margins: Numbers, center_coefficient: float = 0.0
) -> ScoreLoss:
    """Returns the loss of scores: the mean of -log sigmoid(chosen - rejected - margin).

    `center_coefficient` adds that times the mean of (chosen + rejected)^2.
    """
    differences, sums = chosen - rejected, chosen + rejected
    z = differences - margins
    count = len(z)
    slopes = -np.exp(-np.logaddexp(0.0, z)) / count
    pull = 2 * center_coefficient * sums / count
    return ScoreLoss(
        float(np.logaddexp(0.0, -z).mean() + center_coefficient * (sums**2).mean()),
        slopes + pull,
        -slopes + pull,
        {
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float(differences.mean()),
            "rewards/accuracies": float((differences > 0).mean()),
        },
    )


def scores_of(critic: CriticClient, samples: Sequence[SupervisedSample]) -> Numbers:
    """Returns the score of each prompt with its response: the value after the last token."""
    replies = critic.compute_values(samples)
    return np.array([from_tensor(one.final_value)[0] for one in replies], dtype=np.float64)


def step_of_scores(
    critic: CriticClient,
    samples: Sequence[SupervisedSample],
    margins: Numbers,
    center_coefficient: float = 0.0,
    *,
    run_id: str,
    step: int,
    expected_version: int,
) -> tuple[ScoreLoss, critic_pb2.TrainStepResponse]:
    """Makes one update on pairs; returns their loss before it, and the critic's reply.

    `samples` hold the chosen and the rejected response of each pair in turn, and `margins` [N] by
    how much the chosen ones are better. Raises ValueError for half a pair, FailedPreconditionError
    if the critic holds another version than `expected_version`.
    """
    if len(samples) != 2 * len(margins):
        raise ValueError(
            f"samples: {len(samples)} responses and {len(margins)} margins are not two and one for "
            "every pair"
        )
    scores = scores_of(critic, samples)
    loss = bradley_terry(scores[::2], scores[1::2], margins, center_coefficient)
    slopes = np.stack([loss.by_chosen, loss.by_rejected], axis=1).ravel()
    reply = critic.train_step(
        [
            ValueSample(
                one.prompt_token_ids,
                one.response_token_ids,
                [*np.zeros(len(one.response_token_ids)), slope],
                one.vision_inputs,
            )
            for one, slope in zip(samples, slopes, strict=True)
        ],
        run_id=run_id,
        step=step,
        expected_version=expected_version,
        request_id=f"{run_id}/{step}",
    )
    return loss, reply


def train_reward_model(
    session: Session,
    run: RunDirectory,
    on_step: OnStep,
    interrupt: Interrupt | None = None,
    *,
    discard_unsaved: bool = False,
) -> int:
    """Runs training of a reward model on the rows' pairs; returns the last step that was done."""
    settings = session.settings.reward_model
    with Loop(session, run, on_step, interrupt, discard_unsaved=discard_unsaved) as loop:
        for step in loop.steps():
            clock = StepClock(session.progress)
            examples = session.data.batch(loop.examples_drawn, settings.batch_size)
            with session.train_phase(clock):
                loss, reply = step_of_scores(
                    session.trainer,
                    samples_of(examples),
                    np.array([margin_of(one) for one in examples]),
                    settings.center_rewards_coefficient,
                    run_id=run.run_id,
                    step=step,
                    expected_version=loop.weights.version,
                )
            report = trainer_pb2.StepReport(
                step=step,
                weights=reply.weights,
                skipped=reply.skipped,
                skip_reason=reply.skip_reason,
                metrics=reply.metrics,
            )
            # The critic's own loss is that of the derivatives.
            metrics = {"loss/total": loss.value, "critic/loss": loss.value, **loss.metrics}
            loop.finish(step, report, clock, len(examples), metrics)
    return loop.last_step
