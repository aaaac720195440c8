"""Tandem's side of a comparison: the loss and the gradients of one step of its servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradients import BARE_GRADIENT, gradients_in
from peer_batch import MAX_COMPLETION_LENGTH, TEMPERATURE, Models, Outcome, Response
from safetensors.torch import load_file
from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.rpc.requests import PolicySample, SupervisedSample, TeacherTokens
from tandem.rpc.wire import from_tensor, to_message, to_tensor
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import DpoSettings
from tandem.training.preferences import log_prob_sums, step_of_pairs


class Tandem:
    """A trainer with a reference model and a critic; every step starts from the same weights."""

    def __init__(self, trainer: TrainerClient, critic: CriticClient, directory: Path) -> None:
        self.critic = critic
        self._trainer = trainer
        self._directory = directory
        self._names = map(str, itertools.count())

    def step(
        self,
        batch: Sequence[Response],
        objective: Mapping[str, Any],
        teachers: Sequence[TeacherTokens] = (),
    ) -> Outcome:
        """The outcome of one policy step on `batch`, with what a teacher says of each response."""
        [metrics] = self._iterations(batch, objective, 1, teachers)
        outcome = self._outcome(self._trainer, metrics, "loss/total")
        assert abs(outcome.norm / metrics["policy/grad_norm"] - 1) < 1e-6
        return outcome

    def step_on_pairs(self, samples: Sequence[SupervisedSample], settings: DpoSettings) -> Outcome:
        """The outcome of one step on pairs, whose chosen and rejected responses come in turn."""
        self._trainer.load_base_model()
        loss, _ = step_of_pairs(
            self._trainer,
            samples,
            log_prob_sums(self._trainer, samples, reference=True),
            settings,
            run_id="peers",
            step=1,
            expected_version=0,
        )
        metrics = {"loss/total": loss.value, **loss.metrics}
        return self._outcome(self._trainer, metrics, "loss/total")

    def trained(
        self, batch: Sequence[Response], objective: Mapping[str, Any], iterations: int
    ) -> dict[str, torch.Tensor]:
        """The weights after `iterations` steps on one batch."""
        self._iterations(batch, objective | {"max_staleness": iterations - 1}, iterations)
        path = self._trainer.export_model(str(self._directory / next(self._names)))
        return load_file(Path(path) / "model.safetensors")

    def _iterations(
        self,
        batch: Sequence[Response],
        objective: Mapping[str, Any],
        iterations: int,
        teachers: Sequence[TeacherTokens] = (),
    ) -> list[Mapping[str, float]]:
        """Metrics of the steps, each on the whole batch, which the weights before them drew."""
        self.critic.load_base_model()
        weights = self._trainer.load_base_model()
        settings = {"old_logprobs": "provided", **objective}
        provided = settings["old_logprobs"] == "provided"
        samples = [
            PolicySample(
                _trajectory(response, weights),
                group_id=str(response.group),
                reward=response.reward,
                old_logprobs=response.old if provided else None,
                teacher=teacher,
            )
            for response, teacher in zip(batch, teachers or [None] * len(batch), strict=True)
        ]
        metrics = []
        for step in range(iterations):
            report = self._trainer.train_step(
                samples, run_id="peers", step=step + 1, expected_version=step, objective=settings
            ).report
            assert not report.skipped, report.skip_reason
            metrics.append(report.metrics)
        return metrics

    def critic_outcome(self, metrics: Mapping[str, float]) -> Outcome:
        """The outcome of the critic's update in a step that reported `metrics`."""
        return self._outcome(self.critic, metrics, "critic/loss")

    def critic_step(
        self,
        batch: Sequence[Response],
        old_values: Sequence[torch.Tensor],
        returns: Sequence[torch.Tensor],
        value_clip: float,
    ) -> Outcome:
        """The outcome of one critic step on the senior's tokens."""
        self.critic.load_base_model()
        header = critic_pb2.TrainStepHeader(
            run_id="peers",
            step=1,
            request_id="once",
            num_samples=len(batch),
            value_clip=value_clip,
        )
        samples = [
            critic_pb2.ValueSample(
                prompt_token_ids=response.prompt,
                response_token_ids=response.tokens,
                old_values=to_tensor(old),
                returns=to_tensor(targets),
                loss_mask=bytes(response.authors),
            )
            for response, old, targets in zip(batch, old_values, returns, strict=True)
        ]
        reply = self.critic.send_train_step(
            [
                critic_pb2.TrainStepRequest(header=header),
                *(critic_pb2.TrainStepRequest(sample=sample) for sample in samples),
            ]
        )
        assert not reply.skipped, reply.skip_reason
        return self.critic_outcome(reply.metrics)

    def values(self, batch: Sequence[Response]) -> list[torch.Tensor]:
        """The values of the response tokens by the untrained critic."""
        self.critic.load_base_model()
        replies = self.critic.compute_values(
            SupervisedSample(response.prompt, response.tokens) for response in batch
        )
        return [torch.tensor(from_tensor(reply.values)) for reply in replies]

    def _outcome(
        self, client: TrainerClient | CriticClient, metrics: Mapping[str, float], loss: str
    ) -> Outcome:
        path = client.save_checkpoint(str(self._directory), next(self._names), keep=1)
        return Outcome(metrics[loss], gradients_in(path), metrics)


@dataclass(frozen=True)
class Comparison:
    """Models of one family, a batch for both sides, and Tandem's servers of the models."""

    models: Models
    batch: list[Response]
    tandem: Tandem


@contextmanager
def serve(
    models: Models,
    directory: Path,
    optimizer: Mapping[str, float] = BARE_GRADIENT,
    lora: Mapping[str, Any] | None = None,
) -> Iterator[Tandem]:
    """Starts the servers of `models`; with `lora`, the reference is the model without adapters."""
    common = {"compute": {"num_threads": 1}, "max_model_len": 64, "optimizer": dict(optimizer)}
    settings = ClusterSettings(
        directory=directory / "cluster",
        trainer=common
        | {
            "model": str(models.policy),
            "teacher_model": str(models.reference),
            **({"lora": lora} if lora else {"reference_model": str(models.reference)}),
        },
        critic=common | {"model": str(models.critic)},
    )
    with (
        LocalCluster(settings) as running,
        TrainerClient(running.trainer.address) as trainer,
        CriticClient(running.critic.address) as critic,
    ):
        yield Tandem(trainer, critic, directory / "checkpoints")


def _trajectory(
    response: Response, weights: server_pb2.WeightsVersion
) -> trajectory_pb2.Trajectory:
    """The response as a rollout server would have recorded it."""
    length = len(response.tokens)
    trajectory = trajectory_pb2.Trajectory(
        prompt_token_ids=response.prompt,
        response_token_ids=response.tokens,
        authorship_mask=bytes(response.authors),
        author_logprobs=to_tensor(response.behaviour),
        other_logprobs=to_tensor(response.behaviour),
        senior_versions=[trajectory_pb2.VersionRun(weights=weights, count=length)],
        junior_version="any",
        finish_reason=(
            trajectory_pb2.FINISH_REASON_LENGTH
            if response.truncated
            else trajectory_pb2.FINISH_REASON_STOP
        ),
    )
    sampling = {"temperature": TEMPERATURE, "top_p": 1.0, "max_tokens": MAX_COMPLETION_LENGTH}
    to_message(sampling, trajectory.sampling, "sampling")
    to_message({"enabled": True, "selection_strategy": "word", "prob_senior": 0.5,
                "chunk_size": 1, "max_gap_tokens": 32}, trajectory.tandem, "tandem")  # fmt: skip
    return trajectory
