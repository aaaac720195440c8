"""Everything a run talks to: servers, tokenizer, data and reward, opened and closed together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, Self, TypeVar

import grpc

from tandem import preflight
from tandem.client import CriticClient, RolloutClient, TrainerClient
from tandem.cluster import LocalCluster
from tandem.data import Dataset, load_dataset
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    RpcError,
    ServerStartError,
    TandemError,
    from_status,
)
from tandem.learnability import obstacles
from tandem.preflight import Problems
from tandem.reference import JuniorReference, Reference, ServerReference
from tandem.requests import Prompt
from tandem.rewards import Reward
from tandem.rollout.v1 import rollout_pb2
from tandem.rollout_pool import RolloutPool, Scored
from tandem.settings import ClusterSettings, RunSettings, ServersSettings
from tandem.text import TextCodec
from tandem.text_files import read_bytes
from tandem.trainer.v1 import trainer_pb2
from tandem.types.v1 import server_pb2, trajectory_pb2
from tandem.wire import message_record, tandem_record

# What a session is for: what it reads and checks.
Purpose = Literal["train", "sft", "eval"]

# How often is asked again what a restarted server answered under other weights.
ATTEMPTS = 3

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Session:
    """An opened RunSettings; a context manager.

    What is wrong with the settings is found before anything is started or changed, all of it at
    once (preflight). A `dry_run` ends there: of its attributes, `objective` alone may be used.

    Attributes:
        note: tells people what goes on.
        objective: the objective in force, every field set; {} unless the purpose is "train".
        longest_sequence: most tokens of a prompt with its response that every server holds.
        reference: of the KL, where the trainer does not have it itself.
    """

    rollouts: RolloutPool
    trainer: TrainerClient
    critic_address: str | None
    codec: TextCodec
    data: Dataset
    eval_data: Dataset | None
    reward: Reward
    objective: dict[str, Any]
    longest_sequence: int
    cluster: LocalCluster | None = None
    reference: Reference | None = None

    def __init__(
        self,
        settings: RunSettings,
        on_progress: Callable[[str], None] | None = None,
        *,
        purpose: Purpose = "train",
        dry_run: bool = False,
    ) -> None:
        self.settings = settings
        self.purpose = purpose
        self.note = on_progress or (lambda _: None)
        self._dry_run = dry_run
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    @property
    def uses_critic(self) -> bool:
        """Whether the run trains a critic."""
        return self.purpose == "train" and self.settings.objective.advantage_estimator == "gae"

    def check(self) -> None:
        """Raises ServerStartError when a server of the run's own cluster has died."""
        if self.cluster is not None:
            self.cluster.check()

    def publish(
        self, clients: Sequence[RolloutClient] | None = None, *, allow_rollback: bool = False
    ) -> None:
        """Brings rollout servers, all unless `clients` says which, to the trainer's weights.

        The trainer may reach them by other addresses than the client: those they report.
        """
        chosen = self.rollouts.clients if clients is None else clients
        targets = [client.info().server.advertised_address for client in chosen]
        reply = self.trainer.publish_weights(targets, allow_rollback=allow_rollback)
        for result in reply.results:
            if result.status.code:
                failure = from_status(result.status, method="PublishWeights")
                failure.message = f"{result.target}: {failure.message}"
                raise failure
            if result.digest != reply.weights.digest:
                raise TandemError(f"{result.target} received other weights than were sent")

    def require_weights(self, expected: server_pb2.WeightsVersion) -> None:
        """FailedPreconditionError unless the trainer holds these weights, as after a restart."""
        held = self.trainer.info().server.weights
        if held != expected:
            raise _changed(self.trainer, _in_words(held), _in_words(expected))

    def require_critic(self, version: int) -> server_pb2.WeightsVersion:
        """The critic's weights; FailedPreconditionError unless they are of this version."""
        with self.critic() as critic:
            held = critic.info().server.weights
            if held.version != version:
                raise _changed(critic, f"version {held.version}", f"version {version}")
            return held

    def catch_up(
        self, expected: server_pb2.WeightsVersion | None = None
    ) -> server_pb2.WeightsVersion:
        """Publishes to rollout servers that are behind the trainer, as one that was restarted is.

        Returns the trainer's weights, which all of them serve then.

        Raises:
            FailedPreconditionError: the trainer does not hold the `expected` weights, or a rollout
                server holds others that are not behind: publications of a run only go forward.
        """
        if expected is not None:
            self.require_weights(expected)
        held = expected or self.trainer.info().server.weights
        behind = []
        for client in self.rollouts.clients:
            served = client.weights_version()
            if served.version < held.version:
                behind.append(client)
            elif served != held:
                raise other_weights(client.address, served, held)
        if behind:
            addresses = ", ".join(client.address for client in behind)
            self.note(f"{addresses}: behind, gets version {held.version}")
            self.publish(behind)
        return held

    def generate(
        self,
        prompts: Sequence[Prompt],
        expected: server_pb2.WeightsVersion | None = None,
        *,
        any_version: bool = False,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """The samples of every prompt, in order, all written by the trainer's weights.

        Rollout servers that are behind are brought there first. Samples of a server that was
        restarted in the middle are drawn again, unless `any_version` will do.

        Raises:
            FailedPreconditionError: as catch_up() says, or it happens again and again.
        """
        return self._answered(
            prompts, self.rollouts.generate, _all_by, expected, any_version=any_version
        )

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        expected: server_pb2.WeightsVersion | None = None,
        *,
        senior: bool = True,
    ) -> list[Scored]:
        """Scores of (token ids, index of the first scored token) under the junior, in order, and
        under the trainer's weights unless `senior` is False.

        Rollout servers that are behind, or restart, are treated as in generate().

        Raises:
            FailedPreconditionError: as generate() does, or a rollout server has no junior.
        """
        ask = functools.partial(self.rollouts.score, senior=senior, junior=True)
        return self._answered(sequences, ask, _scored_by, expected)

    def _answered(
        self,
        asked: Sequence[Asked],
        ask: Callable[[Sequence[Asked]], list[Answer]],
        is_by: Callable[[server_pb2.WeightsVersion, Answer], bool],
        expected: server_pb2.WeightsVersion | None,
        *,
        any_version: bool = False,
    ) -> list[Answer]:
        """What the rollout servers answer, all of it by the trainer's weights."""
        answers: dict[int, Answer] = {}
        missing = list(range(len(asked)))
        for _ in range(ATTEMPTS):
            weights = self.catch_up(expected)
            answers |= zip(missing, ask([asked[index] for index in missing]), strict=True)
            if not any_version:
                missing = [index for index in missing if not is_by(weights, answers[index])]
            if any_version or not missing:
                return [answers[index] for index in range(len(asked))]
            self.note(f"{len(missing)} prompts were answered by other weights: asked again")
        raise FailedPreconditionError(
            f"{len(missing)} prompts were answered by other weights than version {weights.version}",
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason="WEIGHTS_DIFFER",
            hint="does another run publish to these rollout servers, or do they restart?",
        )

    def critic(self) -> CriticClient:
        """A client of the run's critic; whoever asks for it closes it.

        Raises ConfigError when neither the settings nor the trainer name one.
        """
        if self.critic_address is None:
            raise ConfigError("servers.critic: not set, and the trainer has no critic_address")
        return CriticClient(
            self.critic_address, timeout_seconds=self.settings.servers.timeout_seconds
        )

    def servers(self) -> dict[str, Any]:
        """The models of the servers and what else of their settings decides what a run does."""
        rollout = self.rollouts.clients[0].info()
        models = {"trainer": self.trainer.info().server.model, "senior": rollout.server.model}
        if rollout.HasField("junior"):
            models["junior"] = rollout.junior
        if self.uses_critic:
            with self.critic() as critic:
                models["critic"] = critic.info().server.model
        record = {
            "models": {name: _model_record(model) for name, model in models.items()},
            "junior_version": rollout.junior_version or None,
            "tandem": tandem_record(rollout.tandem),
        }
        if isinstance(self.reference, ServerReference):
            record["models"]["reference"] = _model_record(self.reference.model)
            record["reference_weights"] = message_record(self.reference.weights)
        return record

    def _close(self, error: BaseException | None) -> None:
        with self._stack:
            if isinstance(error, RpcError):
                try:
                    self.check()
                except ServerStartError as death:
                    for note in getattr(error, "__notes__", ()):
                        death.add_note(note)
                    raise death from error

    def _open(self) -> None:
        settings = self.settings
        problems = Problems()
        self._read(problems)
        if self.purpose == "train":
            with problems.collect():
                preflight.check_overlong_buffer(settings)
            with problems.collect():
                preflight.check_kl(settings)
            self._connect_reference(problems)
            for obstacle in obstacles(settings):
                self.note(f"warning: this run cannot learn: {obstacle}")
        self.objective = {}
        servers = settings.servers
        if settings.cluster is not None:
            codec = getattr(self, "codec", None)
            self.objective = preflight.check_cluster(settings, self.purpose, codec, problems)
            problems.raise_any()
            if self._dry_run:
                return
            servers = self._start(settings.cluster)
        self._connect(servers, problems)
        problems.raise_any()

    def _read(self, problems: Problems) -> None:
        """Tokenizer, reward and data, and whether they go together."""
        self._read_each(problems)
        if "handoff" in preflight.modes_in(self.settings, self.purpose) and hasattr(self, "codec"):
            with problems.collect():
                preflight.handoff_boundary_ids(self.settings, self.codec)
        judged = {"train": ("data", "eval_data"), "sft": ("eval_data",), "eval": ("data",)}
        names = judged[self.purpose]
        if self.settings.eval.modes == ["legibility"]:
            # Nobody judges its answers.
            names = ("data",) if self.purpose == "train" else ()
        for name in names:
            dataset = getattr(self, name, None)
            if dataset is not None and hasattr(self, "reward"):
                with problems.collect():
                    self.reward.check(dataset.examples)

    def _read_each(self, problems: Problems) -> None:
        settings = self.settings
        with problems.collect():
            self.reward = self._stack.enter_context(closing(Reward(settings.reward)))
        with problems.collect():
            self.codec = TextCodec(settings.tokenizer)
        if not hasattr(self, "codec"):
            # Prompts cannot be written; but is there anything to read?
            for field, data in (("data", settings.data), ("eval.data", settings.eval.data)):
                if data is not None and data.jsonl is not None:
                    with problems.collect():
                        read_bytes(data.jsonl, f"{field}.jsonl: {data.jsonl}")
            return
        self.eval_data = None
        if settings.eval.data is not None:
            with problems.collect():
                self.eval_data = load_dataset(
                    settings.eval.data, self.codec, field="eval.data", note=self.note
                )
        if self.purpose == "eval" and self.eval_data is not None:
            self.data = self.eval_data
            return
        with problems.collect():
            self.data = load_dataset(settings.data, self.codec, settings.seed, note=self.note)
            if self.purpose != "eval" and self.eval_data is not None:
                self.data = self._without_held_out(self.data, self.eval_data)

    def _without_held_out(self, data: Dataset, held_out: Dataset) -> Dataset:
        """What is held out is never trained on, also where two seeds make the same problem."""
        left = data.without({key for held in held_out.examples for key in held.keys})
        if removed := len(data) - len(left):
            self.note(
                f"data: {removed:,} of {len(data):,} rows are left out: eval.data has their prompts"
            )
        return left

    def _connect_reference(self, problems: Problems) -> None:
        """Opens the rollout server that is the reference, if one is: not one of a cluster."""
        address = self.settings.reference_address
        if address is None:
            return
        timeout = self.settings.servers.timeout_seconds
        client = self._stack.enter_context(RolloutClient(address, timeout_seconds=timeout))
        with problems.collect():
            info = client.info()
            server = RolloutPool([client], [info.max_queue])
            self._stack.callback(server.close)
            model = info.server.model
            self.reference = ServerReference(server, model, client.weights_version())
            if hasattr(self, "codec"):
                preflight.check_vocabulary(self.codec, model, f"the reference at {address}")

    def _start(self, settings: ClusterSettings) -> ServersSettings:
        cluster = LocalCluster(settings, on_progress=self.note)
        self.cluster = self._stack.enter_context(cluster)
        return addresses_of(self.cluster)

    def _connect(self, servers: ServersSettings, problems: Problems) -> None:
        """Opens the clients, and asks every server whether it can do what the settings want."""
        timeout = self.settings.servers.timeout_seconds
        self.trainer = self._stack.enter_context(
            TrainerClient(servers.trainer, timeout_seconds=timeout)
        )
        clients = [
            self._stack.enter_context(RolloutClient(address, timeout_seconds=timeout))
            for address in servers.rollout
        ]
        trainer: trainer_pb2.GetServerInfoResponse | None = None
        rollouts: list[rollout_pb2.GetServerInfoResponse] = []
        with problems.collect():
            trainer = self.trainer.info()
        for client in clients:
            with problems.collect():
                rollouts.append(client.info())
        self.rollouts = RolloutPool(clients, [info.max_queue for info in rollouts])
        self._stack.callback(self.rollouts.close)
        if trainer is None or len(rollouts) < len(clients):
            return
        self.critic_address = servers.critic or trainer.critic_address or None
        with problems.collect():
            max_queue = min(info.max_queue for info in rollouts)
            preflight.check_sizes(self.settings, self.purpose, trainer.max_samples, max_queue)
        models = {f"the trainer at {servers.trainer}": trainer.server.model}
        modes = preflight.modes_in(self.settings, self.purpose)
        named = {
            f"the rollout server at {address}": info
            for address, info in zip(servers.rollout, rollouts, strict=True)
        }
        for whose, info in named.items():
            models[whose] = info.server.model
            with problems.collect():
                preflight.check_junior(modes, info.HasField("junior"), whose)
        if self.uses_critic:
            with problems.collect(), self.critic() as critic:
                models[f"the critic at {self.critic_address}"] = critic.info().server.model
        if self.settings.reference == "junior" and self.purpose == "train":
            self.reference = JuniorReference(self.rollouts)
            with problems.collect():
                preflight.check_same_junior(named)
        lengths = [model.max_model_len for model in models.values()]
        if isinstance(self.reference, ServerReference):
            lengths.append(self.reference.model.max_model_len)
        self.longest_sequence = min(lengths)
        for field, data in (("data", "data"), ("eval.data", "eval_data")):
            if (dataset := getattr(self, data, None)) is not None:
                with problems.collect():
                    dataset.require_prompts_below(self.longest_sequence, field)
        if hasattr(self, "codec"):
            for whose, model in models.items():
                with problems.collect():
                    preflight.check_vocabulary(self.codec, model, whose)
        if self.purpose == "train":
            with problems.collect():
                self.objective = self._objective_in_force()

    def _objective_in_force(self) -> dict[str, Any]:
        try:
            return message_record(self.trainer.check_objective(self.settings.policy_objective()))
        except RpcError as error:
            raise preflight.named_objective(error) from error


def addresses_of(cluster: LocalCluster) -> ServersSettings:
    """The addresses of a local cluster, as a run wants them."""
    return ServersSettings(
        rollout=[server.address for server in cluster.rollouts],
        trainer=cluster.trainer.address,
        critic=cluster.critic.address if cluster.has("critic") else None,
    )


def other_weights(
    address: str, served: server_pb2.WeightsVersion, trainer: server_pb2.WeightsVersion
) -> FailedPreconditionError:
    """A rollout server holds weights that no publication of a run may replace."""
    return FailedPreconditionError(
        f"{address} serves version {served.version} with digest {served.digest}, the trainer "
        f"holds version {trainer.version} with {trainer.digest}: other weights",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="WEIGHTS_DIFFER",
        hint="one of them was restarted or trained by another run: --resume brings both to the "
        "run's last checkpoint; a new run begins with the base model, the same for both",
    )


def _changed(
    server: TrainerClient | CriticClient, holds: str, left: str
) -> FailedPreconditionError:
    """For a trainer or critic with other weights than the run left there."""
    return FailedPreconditionError(
        f"the {server.role} at {server.address} holds {holds}, not the run's {left}",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="STALE_POLICY_VERSION",
        hint="it was restarted, or another run trains it: --resume goes on from the last "
        "checkpoint",
    )


def _in_words(weights: server_pb2.WeightsVersion) -> str:
    return f"version {weights.version} with digest {weights.digest}"


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
    }
