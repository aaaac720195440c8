"""A run's servers, tokenizer, data and reward, all of them open."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import grpc
import xxhash

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.cluster.local import LocalCluster
from tandem.cluster.plan import uses_of
from tandem.data.dataset import Dataset
from tandem.environments.run_environment import RunEnvironment
from tandem.errors import FailedPreconditionError, RpcError, UnavailableError
from tandem.metrics import StepClock
from tandem.models.tokenizer import TextCodec
from tandem.pool.rollout_pool import RolloutPool
from tandem.pool.scoring import Scored
from tandem.preflight.schedules import check_optimizers
from tandem.rewards.reward import Reward
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt
from tandem.rpc.wire import message_record, tandem_record
from tandem.session.connections import Connections
from tandem.session.publisher import Publisher
from tandem.session.reference import Reference, ServerReference
from tandem.session.step_progress import StepProgress
from tandem.session.teachers import Teachers
from tandem.session.weight_errors import (
    changed_weights,
    in_words,
    lost_weights,
    other_weights,
)
from tandem.settings.run import Purpose, RunSettings
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


# Most times that prompts are sent, or sequences scored, until the trainer's weights answer.
ATTEMPTS = 3

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class WeightsRule(Enum):
    """The weights that may answer a request that expects some.

    Attributes:
        CURRENT: the expected ones, which the trainer must hold.
        ANY_SINCE: the expected ones, and newer ones as far as the trainer is ahead of them.
        PINNED: the expected ones, whatever the trainer holds meanwhile.
    """

    CURRENT = "current"
    ANY_SINCE = "any_since"
    PINNED = "pinned"


@dataclass(eq=False, kw_only=True)
class Session:
    """The servers, tokenizer, data and reward of a run, open: open_session() makes one.

    Attributes:
        settings: those of the run, with the number of steps of `epochs`.
        progress: is told what the run is doing.
        sampling: the fields of SamplingParams for the run's responses.
        eval_data: the prompts of `eval.data`, if the run has any.
        environment: that of a run that draws episodes; None where it draws single responses.
        connections: what the clients of the run have in common.
        trainer: the server that the run trains: the trainer, or the critic that becomes a reward
            model.
        status_client: a second client of it, which is asked how far a step is.
        rollouts: none for supervised training, unless servers are named for it, it evaluates, or
            it learns the senior's own responses.
        reference: the KL's reference, if it is not the trainer's own model.
        teachers: those of the run's distillation; None without one.
        longest_sequence: most tokens of a prompt with its response that every server holds.
        in_force: sections of the settings with the servers' defaults, as in CheckedRun.
    """

    settings: RunSettings
    purpose: Purpose
    progress: Progress
    codec: TextCodec
    sampling: Mapping[str, Any]
    data: Dataset
    eval_data: Dataset | None
    reward: Reward
    environment: RunEnvironment | None
    connections: Connections
    trainer: TrainerClient | CriticClient
    status_client: TrainerClient | CriticClient
    rollouts: RolloutPool
    critic_address: str | None
    reference: Reference | None
    teachers: Teachers | None
    longest_sequence: int
    in_force: dict[str, Any]

    def __post_init__(self) -> None:
        self._publisher = Publisher(
            self.trainer,
            self.rollouts,
            self.connections.retry,
            # Nothing is drawn while an asynchronous run publishes.
            one_by_one=bool(self.settings.objective.max_staleness) and not self.is_async,
            # Drawing with PINNED weights brings no server up.
            to_lost=self.is_async,
        )

    @property
    def is_async(self) -> bool:
        """Whether rollouts are drawn ahead, while earlier steps train."""
        return self.purpose == "train" and self.settings.async_.max_staleness > 0

    @property
    def cluster(self) -> LocalCluster | None:
        """The servers that the run started; None if it uses running ones."""
        return self.connections.cluster

    @property
    def uses_critic(self) -> bool:
        """Whether the run trains a critic beside its trainer."""
        uses = uses_of(self.settings, self.purpose)
        return uses.critic and uses.trainer

    def check(self) -> None:
        """Raises ServerStartError if a server of the run's own cluster has died.

        A rollout server may have died, as long as another one runs: the run continues with that
        one.
        """
        self.connections.check()

    def publish(
        self, clients: Sequence[RolloutClient] | None = None, *, allow_rollback: bool = False
    ) -> None:
        """Publishes the trainer's weights to `clients`, by default to all rollout servers in use.

        The trainer reaches them at the addresses that they advertise. By default, a server that
        does not answer is left out as long as another one gets the weights; without any, it is
        tried again for servers.retry_seconds. With objective.max_staleness above 0 this may be
        called while samples are drawn: one server after the other then ends its calls and gets the
        weights, while the others continue. A single server gets them at once, and its samples
        continue under them.

        Raises ConfigError if two servers advertise one address.
        """
        self._publisher.publish(clients, allow_rollback=allow_rollback)

    def require_weights(self, expected: server_pb2.WeightsVersion) -> None:
        """Raises FailedPreconditionError unless the trainer holds these weights."""
        held = self.trainer.info().server.weights
        if held != expected:
            raise changed_weights(self.trainer, in_words(held), in_words(expected))

    def require_critic(self, version: int) -> server_pb2.WeightsVersion:
        """Returns the critic's weights; FailedPreconditionError unless they have this version."""
        with self.critic() as critic:
            held = critic.info().server.weights
            if held.version != version:
                raise changed_weights(critic, f"version {held.version}", f"version {version}")
            return held

    def weights(
        self, expected: server_pb2.WeightsVersion | None = None
    ) -> server_pb2.WeightsVersion:
        """Returns the trainer's weights.

        Raises FailedPreconditionError if the trainer does not hold the `expected` weights.
        """
        if expected is None:
            return self.trainer.info().server.weights
        self.require_weights(expected)
        return expected

    def bring_up(
        self,
        weights: server_pb2.WeightsVersion,
        client: RolloutClient,
        *,
        rule: WeightsRule = WeightsRule.CURRENT,
    ) -> None:
        """Publishes the trainer's weights to a rollout server that is behind `weights`.

        A server that has been restarted is. Nothing is published to one of PINNED weights: the
        trainer may not hold these any more.

        Raises:
            UnavailableError: it does not serve the PINNED weights, and others may.
            FailedPreconditionError: it serves others that are not behind, and the publications of a
                run only go forward; or nobody holds the PINNED weights.
        """
        served = client.weights_version()
        if rule is WeightsRule.PINNED:
            if served != weights:
                raise self._without_pinned(client, served, weights)
            return
        if served.version < weights.version:
            caught_up = self._publisher.catch_up(client, weights.version)
            if caught_up is None:
                return
            served = caught_up
        held = weights
        if rule is WeightsRule.ANY_SINCE and served != weights:
            held = self.weights()
            if weights.version < served.version < held.version:
                return  # The trainer is ahead of its last publication.
        if served != held:
            raise other_weights(client.address, served, held)

    def _without_pinned(
        self,
        client: RolloutClient,
        served: server_pb2.WeightsVersion,
        weights: server_pb2.WeightsVersion,
    ) -> RpcError:
        """Returns the error for a rollout server that does not serve the pinned weights."""
        others = [one for one in self.rollouts.replicas if one.client is not client]
        if any(not one.lost for one in others):
            return UnavailableError(
                f"it serves {in_words(served)}, and gets others with the next publication",
                code=grpc.StatusCode.UNAVAILABLE,
            )
        return lost_weights(client.address, served, weights)

    def generate(
        self,
        prompts: Sequence[Prompt],
        expected: server_pb2.WeightsVersion | None = None,
        *,
        rule: WeightsRule = WeightsRule.CURRENT,
        on_answer: Callable[[int, list[trajectory_pb2.Trajectory]], None] | None = None,
        progress: Progress | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the samples of every prompt, in order, all written by the weights of the `rule`.

        `on_answer` is called with the number of a prompt and its samples as soon as they have
        arrived, in any thread and order; it must return at once. `progress` is told how many there
        are, by default that of the run.

        A rollout server that is behind is brought there before it draws any. Samples of a server
        that got other weights in the middle are drawn again, unless the rule is ANY_SINCE.

        Raises:
            FailedPreconditionError: as in weights() and bring_up(), or other weights answered again
                and again.
        """
        return self._answered(
            prompts,
            functools.partial(self.rollouts.generate, progress=progress),
            _all_by,
            expected,
            rule=rule,
            on_answer=on_answer,
        )

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        expected: server_pb2.WeightsVersion | None = None,
        *,
        senior: bool = True,
    ) -> list[Scored]:
        """Scores every (token ids, index of the first scored token), in order.

        The scores are those under the junior and, unless `senior` is False, under the trainer's
        weights. Rollout servers that are behind, or restart, are treated as in generate().

        Raises:
            FailedPreconditionError: as generate() does, or a rollout server has no junior.
        """
        ask = functools.partial(self.rollouts.score, senior=senior, junior=True)
        return self._answered(sequences, ask, _scored_by, expected)

    def _answered(
        self,
        asked: Sequence[Asked],
        ask: Callable[..., list[Answer]],
        is_by: Callable[[server_pb2.WeightsVersion, Answer], bool],
        expected: server_pb2.WeightsVersion | None,
        *,
        rule: WeightsRule = WeightsRule.CURRENT,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Returns the answers of the rollout servers to `asked`, all by the rule's weights."""
        answers: dict[int, Answer] = {}
        missing = list(range(len(asked)))
        pinned = expected if rule is WeightsRule.PINNED else None
        any_version = rule is WeightsRule.ANY_SINCE
        for _ in range(ATTEMPTS):
            weights = pinned or self.weights(expected)
            admit = functools.partial(self.bring_up, weights, rule=rule)
            options: dict[str, Any] = {"admit": admit}
            if on_answer is not None:

                def take(
                    place: int,
                    answer: Answer,
                    places: Sequence[int] = missing,
                    by: server_pb2.WeightsVersion = weights,
                ) -> None:
                    # Others are asked for again.
                    if any_version or is_by(by, answer):
                        on_answer(places[place], answer)

                options["on_answer"] = take
            answered = ask([asked[index] for index in missing], **options)
            answers |= zip(missing, answered, strict=True)
            if not any_version:
                missing = [index for index in missing if not is_by(weights, answers[index])]
            if any_version or not missing:
                return [answers[index] for index in range(len(asked))]
            _log.info(f"{len(missing)} prompts were answered by other weights: retrying them")
        raise FailedPreconditionError(
            f"{len(missing)} prompts were answered by other weights than version {weights.version}",
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason="WEIGHTS_DIFFER",
            hint="does another run publish to these rollout servers, or do they restart?",
        )

    def check_optimizers(self, steps_done: int) -> None:
        """Raises ConfigError if a server's schedule ends before the run does, at learning rate 0.

        The servers hold what the run continues from, `steps_done` steps after its start.
        """
        trainer = self.trainer.info()
        optimizers = {}
        for name, field in (
            ("optimizer", "optimizer"),
            ("speculator.optimizer", "speculator_optimizer"),
        ):
            if field in trainer.DESCRIPTOR.fields_by_name and trainer.HasField(field):
                whose = f"the {self.trainer.role} at {self.trainer.address}: {name}"
                optimizers[whose] = getattr(trainer, field)
        if self.uses_critic:
            with self.critic() as critic:
                info = critic.info()
                if info.HasField("optimizer"):
                    optimizers[f"the critic at {critic.address}: optimizer"] = info.optimizer
        check_optimizers(optimizers, self.settings, self.purpose, steps_done)

    def critic(self) -> CriticClient:
        """Returns a client of the run's critic, which the caller closes.

        Raises ConfigError if neither the settings nor the trainer name a critic.
        """
        return self.connections.critic(self.critic_address, self.connections.retry)

    @contextmanager
    def train_phase(self, clock: StepClock) -> Iterator[None]:
        """The phase of a step in which the trainer works, counted in micro-batches."""
        with clock.phase("train"), StepProgress(self.status_client, self.progress):
            yield

    def facts(self) -> dict[str, Any]:
        """Returns what results depend on besides the settings; a resumed run needs the same."""
        return {"servers": self._servers(), "inputs": self._inputs()}

    def _inputs(self) -> dict[str, Any]:
        """Returns digests of the rows, and of the files of reward functions and environment."""
        inputs = {"data": self.data.digest()}
        if self.environment is not None and (digest := self.environment.environment.digest):
            inputs["environment"] = digest
        if self.purpose == "train" and self.reward.files:
            files = [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in self.reward.files]
            inputs["reward"] = files[0] if len(files) == 1 else files
        return inputs

    def _servers(self) -> dict[str, Any]:
        """Returns the models of the servers, and those of their settings that results depend on."""
        models = {self.trainer.role: self.trainer.info().server.model}
        sampling = {}
        for client in self.rollouts.clients[:1]:
            rollout = client.info()
            models["senior"] = rollout.server.model
            if rollout.HasField("junior"):
                models["junior"] = rollout.junior
            sampling["junior_version"] = rollout.junior_version or None
            sampling["tandem"] = tandem_record(rollout.tandem)
        if self.uses_critic:
            with self.critic() as critic:
                models["critic"] = critic.info().server.model
        record = {
            "models": {name: _model_record(model) for name, model in models.items()},
            **sampling,
        }
        if isinstance(self.reference, ServerReference):
            record["models"]["reference"] = _model_record(self.reference.server.model)
            record["reference_weights"] = message_record(self.reference.server.weights)
        # They are open where the run has something to judge.
        judges = {name: one for name, one in self.reward.servers.items() if one.is_open}
        if judges:
            record["reward_models"] = {
                name: _model_record(one.model) | {"weights": message_record(one.weights)}
                for name, one in judges.items()
            }
        for name, server in (self.teachers.servers if self.teachers else {}).items():
            record["models"][f"teacher {name}"] = _model_record(server.model)
            record.setdefault("teacher_weights", {})[name] = message_record(server.weights)
        return record


def _all_by(weights: server_pb2.WeightsVersion, group: Sequence[trajectory_pb2.Trajectory]) -> bool:
    return all(run.weights == weights for one in group for run in one.senior_versions)


def _scored_by(weights: server_pb2.WeightsVersion, scored: Scored) -> bool:
    return scored.weights == weights


def _model_record(model: server_pb2.ModelInfo) -> dict[str, Any]:
    return {
        "path": model.path,
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "vocabulary_digest": model.vocabulary_digest or None,
        "max_model_len": model.max_model_len,
        # They are also those of generation_config.json, which may change without the weights.
        "eos_token_ids": list(model.eos_token_ids),
    }
