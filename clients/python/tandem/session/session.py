"""The resources of a run: servers, tokenizer, data and reward, opened and closed together."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import xxhash

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.cluster import registry
from tandem.cluster.local import LocalCluster
from tandem.cluster.plan import draws_responses, modes_in, planned, uses_of
from tandem.cluster.readiness import wait_until_serving
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.supervised import LearntRows, with_responses
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    RpcError,
    ServerStartError,
    TandemError,
    from_status,
)
from tandem.metrics import StepClock
from tandem.models.files import end_token_ids
from tandem.models.tokenizer import TextCodec
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.pool.scoring import Scored
from tandem.preflight import checks
from tandem.preflight.checks import Problems, RolloutFacts, ServerFacts
from tandem.preflight.learnability import obstacles
from tandem.preflight.planned_cluster import check_cluster
from tandem.preflight.schedules import (
    check_optimizers,
    check_schedules,
    notes_on_schedules,
    with_run_settings,
)
from tandem.rewards.reward import READING_PATTERNS, Reward
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.credentials import Credentials
from tandem.rpc.requests import Prompt
from tandem.rpc.retry import ONCE, Retries, RetryPolicy, may_pass
from tandem.rpc.wire import message_record, tandem_record
from tandem.session.reference import JuniorReference, Reference, ServerReference
from tandem.session.step_progress import StepProgress
from tandem.settings.cluster import ClusterSettings, ServersSettings
from tandem.settings.paths import SERVER_MODELS
from tandem.settings.run import Purpose, RunSettings, SamplingSettings
from tandem.trackers.trackers import require_installed
from tandem.utils.progress import Progress
from tandem.utils.text_files import read_bytes

_log = logging.getLogger(__name__)


# Most times that prompts are sent, or sequences scored, until the trainer's weights answer.
ATTEMPTS = 3
# Deadline of a question how far a step is.
_STATUS_SECONDS = 2.0

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Session:
    """The servers, tokenizer, data and reward of a RunSettings, opened; a context manager.

    Mistakes in the settings are found before anything is started or changed, all of them at once
    (preflight). A `dry_run` ends there, and `in_force` is the only attribute that may be used.

    Attributes:
        settings: those of the run; once it is open, with the number of steps of `epochs`.
        progress: is told what the run is doing.
        sampling: the fields of SamplingParams for the run's responses.
        in_force: sections of the settings with the servers' defaults: every field of objective and
            tandem (for "train"), the models of a cluster, the addresses of running servers.
        rollouts: none for supervised training, unless servers are named for it, it evaluates, or
            it learns the senior's own responses.
        longest_sequence: most tokens of a prompt with its response that every server holds.
        reference: the KL's reference, if it is not the trainer's own model.
    """

    rollouts: RolloutPool
    trainer: TrainerClient
    critic_address: str | None
    codec: TextCodec
    data: Dataset
    eval_data: Dataset | None
    reward: Reward
    sampling: dict[str, Any]
    in_force: dict[str, Any]
    longest_sequence: int
    cluster: LocalCluster | None = None
    reference: Reference | None = None

    def __init__(
        self,
        settings: RunSettings,
        *,
        purpose: Purpose = "train",
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.settings = settings
        self.purpose = purpose
        self._dry_run = dry_run
        self._said: set[str] = set()
        self._stack = ExitStack()
        self._credentials = Credentials()
        # Publications of one version share its update: two at a time would disturb each other. A
        # request may be over while a thread of it still brings a server up.
        self._delivering = threading.RLock()

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
        return uses_of(self.settings, self.purpose).critic

    def check(self) -> None:
        """Raises ServerStartError if a server of the run's own cluster has died.

        A rollout server may have died, as long as another one runs: the run continues with that
        one.
        """
        if self.cluster is not None:
            self.cluster.check(spare_rollouts=True)

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
        if clients is not None or allow_rollback:
            chosen = self.rollouts.clients if clients is None else clients
            for _, failure in self._deliver(chosen, allow_rollback):
                raise failure
            return
        retries = Retries(self._retry)
        while (failure := self._publish_to_all()) is not None:
            if (seconds := retries.wait_after(failure)) is None:
                raise failure
            self._say_once(f"publication: {failure.message}: trying again")
            time.sleep(seconds)

    def _publish_to_all(self) -> RpcError | None:
        """Publishes to the rollout servers in use; returns a failure if none got the weights.

        Raises a failure that does not pass by itself.
        """
        replicas = [replica for replica in self.rollouts.replicas if not replica.lost]
        failures: list[tuple[RolloutClient, RpcError]] = []
        if self.settings.objective.max_staleness and len(self.rollouts.replicas) > 1:
            for replica in replicas:
                with self.rollouts.drained(replica):
                    failures += self._deliver([replica.client])
        else:
            failures += self._deliver([replica.client for replica in replicas])
        for _, failure in failures:
            if not may_pass(failure):
                raise failure
        if failures and len(failures) == len(replicas):
            return failures[0][1]
        for client, failure in failures:
            self.rollouts.leave_out(client, failure)
        return None

    def _deliver(
        self, clients: Sequence[RolloutClient], allow_rollback: bool = False
    ) -> list[tuple[RolloutClient, RpcError]]:
        """Publishes the trainer's weights to the clients; returns those that did not get them."""
        with self._delivering:
            failures: list[tuple[RolloutClient, RpcError]] = []
            infos: list[tuple[RolloutClient, rollout_pb2.GetServerInfoResponse]] = []
            for client in clients:
                try:
                    infos.append((client, client.info()))
                except RpcError as error:
                    failures.append((client, error))
            targets = _by_advertised_address(infos)
            if not targets:
                return failures
            reply = self.trainer.publish_weights(list(targets), allow_rollback=allow_rollback)
            for result in reply.results:
                if result.status.code:
                    failure = from_status(result.status, method="PublishWeights")
                    failure.message = f"{result.target}: {failure.message}"
                    failures.append((targets[result.target], failure))
                elif result.digest != reply.weights.digest:
                    raise TandemError(f"{result.target} received weights other than those sent")
                elif result.speculator == trainer_pb2.SPECULATOR_DELIVERY_UNUSED:
                    self._say_once(
                        f"{result.target}: has no senior_speculator, and does not draft with the "
                        "trainer's speculator"
                    )
            return failures

    def require_weights(self, expected: server_pb2.WeightsVersion) -> None:
        """Raises FailedPreconditionError unless the trainer holds these weights."""
        held = self.trainer.info().server.weights
        if held != expected:
            raise _changed(self.trainer, _in_words(held), _in_words(expected))

    def require_critic(self, version: int) -> server_pb2.WeightsVersion:
        """Returns the critic's weights; FailedPreconditionError unless they have this version."""
        with self.critic() as critic:
            held = critic.info().server.weights
            if held.version != version:
                raise _changed(critic, f"version {held.version}", f"version {version}")
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
        any_version: bool = False,
    ) -> None:
        """Publishes the trainer's weights to a rollout server that is behind `weights`.

        A server that has been restarted is. With `any_version` the trainer may meanwhile be ahead
        of `weights`, and the server at most as far ahead as the trainer.

        Raises:
            FailedPreconditionError: it serves others that are not behind, and the publications of a
                run only go forward.
        """
        served = client.weights_version()
        if served.version < weights.version:
            with self._delivering:
                # Another publication may have reached it meanwhile.
                served = client.weights_version()
                if served.version < weights.version:
                    _log.info(f"{client.address} is behind: publishing version {weights.version}")
                    self.publish([client])
                    return
        held = weights
        if any_version and served != weights:
            held = self.weights()
            if weights.version < served.version < held.version:
                return  # The trainer is ahead of its last publication.
        if served != held:
            raise other_weights(client.address, served, held)

    def generate(
        self,
        prompts: Sequence[Prompt],
        expected: server_pb2.WeightsVersion | None = None,
        *,
        any_version: bool = False,
        on_answer: Callable[[int, list[trajectory_pb2.Trajectory]], None] | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the samples of every prompt, in order, all written by the trainer's weights.

        `on_answer` is called with the number of a prompt and its samples as soon as they have
        arrived, in any thread and order; it must return at once.

        A rollout server that is behind is brought there before it draws any. Samples of a server
        that got other weights in the middle are drawn again, unless `any_version` will do.

        Raises:
            FailedPreconditionError: as in weights() and bring_up(), or other weights answered again
                and again.
        """
        return self._answered(
            prompts,
            self.rollouts.generate,
            _all_by,
            expected,
            any_version=any_version,
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
        any_version: bool = False,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Returns the answers of the rollout servers to `asked`, all by the trainer's weights."""
        answers: dict[int, Answer] = {}
        missing = list(range(len(asked)))
        for _ in range(ATTEMPTS):
            weights = self.weights(expected)
            admit = functools.partial(self.bring_up, weights, any_version=any_version)
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
            if trainer.HasField(field):
                optimizers[f"the trainer at {self.trainer.address}: {name}"] = getattr(
                    trainer, field
                )
        if self.uses_critic:
            with self.critic() as critic:
                info = critic.info()
                if info.HasField("optimizer"):
                    optimizers[f"the critic at {critic.address}: optimizer"] = info.optimizer
        check_optimizers(optimizers, self.settings, self.purpose, steps_done)

    def critic(self, retry: RetryPolicy | None = None) -> CriticClient:
        """Returns a client of the run's critic, which the caller closes.

        `retry` is that of the run by default. Raises ConfigError if neither the settings nor the
        trainer name a critic.
        """
        if self.critic_address is None:
            raise ConfigError("servers.critic: not set, and the trainer has no critic_address")
        return CriticClient(self.critic_address, **self._client_options(retry or self._retry))

    @property
    def _retry(self) -> RetryPolicy:
        return RetryPolicy(seconds=self.settings.servers.retry_seconds, check=self.check)

    def _client_options(self, retry: RetryPolicy = ONCE) -> dict[str, Any]:
        """Returns the options of a client, which by default does not wait for its server.

        A run that begins does not, and the clients of a pool never do: the pool does.
        """
        return {
            "timeout_seconds": self.settings.servers.timeout_seconds,
            "credentials": self._credentials,
            "retry": retry,
        }

    @contextmanager
    def train_phase(self, clock: StepClock) -> Iterator[None]:
        """The phase of a step in which the trainer works, counted in micro-batches."""
        with clock.phase("train"), StepProgress(self._trainer_status, self.progress):
            yield

    def facts(self) -> dict[str, Any]:
        """Returns what results depend on besides the settings; a resumed run needs the same."""
        return {"servers": self._servers(), "inputs": self._inputs()}

    def _inputs(self) -> dict[str, Any]:
        """Returns digests of the rows, and of the files of the reward functions."""
        inputs = {"data": self.data.digest()}
        if self.purpose == "train" and self.reward.files:
            files = [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in self.reward.files]
            inputs["reward"] = files[0] if len(files) == 1 else files
        return inputs

    def _servers(self) -> dict[str, Any]:
        """Returns the models of the servers, and those of their settings that results depend on."""
        models = {"trainer": self.trainer.info().server.model}
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
        problems = Problems(_named_models(settings))
        servers = settings.servers
        finds_cluster = settings.cluster is None and not servers.any_named
        with problems.collect():
            self._credentials = registry.with_defaults(
                settings.credentials.credentials(), found=finds_cluster
            )
        if settings.cluster is None:
            with problems.collect():
                servers = registry.addresses(
                    servers, any_rollout=uses_of(settings, self.purpose).rollout
                )
        self._read(problems)
        settings = self.settings  # now with the steps of `epochs`
        if settings.cluster is None and servers.start_timeout_seconds > 0:
            problems.raise_any()
            self._wait_for(servers)
        if self.purpose == "train":
            with problems.collect():
                checks.check_overlong_buffer(settings)
            with problems.collect():
                checks.check_kl(settings, servers.rollout or ())
            self._connect_reference(problems)
            checks.note_start_and_reference(settings)
            for obstacle in obstacles(settings):
                _log.warning(f"this run cannot learn: {obstacle}")
        self.in_force = {}
        if settings.cluster is not None:
            cluster = self._plan(settings.cluster, problems)
            problems.raise_any()
            if self._dry_run:
                return
            servers = self._start(cluster)
        elif servers.trainer is not None:
            self.in_force["servers"] = servers.model_dump(mode="json", exclude_none=True)
        if servers.trainer is not None:
            self._connect(servers, problems)
        problems.raise_any()

    def _wait_for(self, servers: ServersSettings) -> None:
        named = [*(servers.rollout or ()), servers.trainer]
        if self.uses_critic:
            named.append(servers.critic)
        wait_until_serving(
            [address for address in named if address is not None],
            self._credentials,
            servers.start_timeout_seconds,
        )

    def _plan(self, cluster: ClusterSettings, problems: Problems) -> ClusterSettings:
        """Returns the cluster as the run starts it, once its servers have checked themselves."""
        settings, uses = self.settings, uses_of(self.settings, self.purpose)
        with problems.collect():
            cluster = with_run_settings(cluster, settings, self.purpose)
        plan = planned(cluster, uses)
        if self.purpose in ("train", "sft"):
            problems.errors.extend(check_schedules(plan, settings, self.purpose))
            notes_on_schedules(plan, settings, self.purpose)
        for role in ("rollout", "trainer", "critic"):
            if getattr(settings.servers, role) is not None:
                _log.info(f"servers.{role} is not used: the run starts the servers of `cluster`")
        # A server without work in this run is not a mistake: only a dry run notes it.
        if self._dry_run and cluster.critic is not None and not uses.critic:
            _log.info(
                "this run needs no critic (objective.advantage_estimator: gae does), so "
                "cluster.critic is not used"
            )
        if self._dry_run and cluster.rollout and not uses.rollout:
            _log.info(
                "this run draws no responses (evaluations and sft.responses: senior do), so "
                "cluster.rollout is not used"
            )
        needed = ["rollout", "trainer"] if uses.rollout else ["trainer"]
        for role in needed:
            if getattr(plan, role) in (None, []):
                problems.errors.append(ConfigError(f"cluster.{role}: a run needs a {role} server"))
        objective = settings.policy_objective() if self.purpose == "train" else None
        codec = getattr(self, "codec", None)
        checked = check_cluster(plan, objective, codec, problems, uses_junior=uses.junior)
        plan = checked.cluster
        with problems.collect():
            self._warn_of_end_tokens(plan, problems)
        self.in_force["cluster"] = plan.model_dump(mode="json", exclude_none=True)
        if checked.servers is not None:
            self._check_servers(checked.servers, problems)
        if checked.objective:
            self._take_objective(checked.objective, problems)
        return plan

    def _check_servers(self, servers: ServerFacts, problems: Problems) -> None:
        """Compares the settings with the servers, which are running or checked."""
        checks.check_servers(self.settings, self.purpose, servers, self._data_sets(), problems)
        if self.purpose == "train" and servers.rollouts:
            self.in_force["tandem"] = checks.tandem_in_force(self.settings, servers.rollouts[0])

    def _say_once(self, text: str) -> None:
        """Logs a text, unless the session did before."""
        if text not in self._said:
            self._said.add(text)
            _log.info(text)

    def _warn_of_end_tokens(self, plan: ClusterSettings, problems: Problems) -> None:
        """Warns of an end token of the tokenizer that ends no response of a cluster's models."""
        models = [((plan.trainer or {}).get("model"), None)]
        models += [(one.get("senior_model"), one.get("junior_model")) for one in plan.rollout]
        for senior, junior in dict.fromkeys(models):
            if senior and (Path(senior) / "config.json").exists():
                ending = end_token_ids(Path(senior))
                # A server ends a response at the tokens of both.
                ending |= end_token_ids(Path(junior)) if junior else set()
                self._warn_of_end_token(ending, str(senior), problems)

    def _warn_of_end_token(self, ending: Collection[int], whose: str, problems: Problems) -> None:
        """Warns of an end token of the tokenizer that is none of a model's, if the run needs it."""
        if not hasattr(self, "sampling"):
            return  # The tokenizer, or a stop text, is refused.
        learns = self.purpose == "sft" and not draws_responses(self.settings, "sft")
        stops = () if learns else self.sampling.get("stop_token_ids", ())
        checks.warn_of_end_token(
            self.settings, self.purpose, self.codec, {*ending, *stops}, whose, problems
        )

    def _data_sets(self) -> dict[str, Dataset]:
        """The data sets that could be read, by the field that names them."""
        sets = {"data": "data", "eval.data": "eval_data"}
        read = {field: getattr(self, name, None) for field, name in sets.items()}
        return {field: dataset for field, dataset in read.items() if dataset is not None}

    def _read(self, problems: Problems) -> None:
        """Reads tokenizer, reward and data, and checks that they go together."""
        self._read_each(problems)
        checks.note_greedy_samples(self.settings, self.purpose)
        if "handoff" in modes_in(self.settings, self.purpose) and hasattr(self, "codec"):
            with problems.collect():
                checks.handoff_boundary_ids(self.settings, self.codec)
        draws = draws_responses(self.settings, self.purpose)
        if self.purpose == "sft" and not draws and hasattr(self, "data"):
            with problems.collect():
                self.data = with_responses(self.data, self.settings.sft, self.codec)
        judged = {"train": ("data", "eval_data"), "sft": ("eval_data",), "eval": ("data",)}
        names = judged.get(self.purpose, ())
        if self.settings.eval.modes == ["legibility"]:
            # Legibility judges no answer.
            names = ("data",) if self.purpose == "train" else ()
        for name in names:
            dataset = getattr(self, name, None)
            if dataset is not None and hasattr(self, "reward"):
                with problems.collect():
                    self.reward.check(dataset.examples)
                    for warning in self.reward.warnings(dataset.examples):
                        _log.info(warning)

    def _read_each(self, problems: Problems) -> None:
        settings = self.settings
        trains = self.purpose in ("train", "sft")
        if trains:
            with problems.collect():
                require_installed(settings.trackers)
        for place, one in enumerate(settings.reward_functions):
            if one.answer_pattern is not None and one.function not in READING_PATTERNS:
                field = f"rewards.{place}" if settings.rewards else "reward"
                _log.warning(
                    f"{field}.answer_pattern has no effect with {one.function}: it only applies to "
                    f"{' and '.join(READING_PATTERNS)}"
                )
        with problems.collect():
            self.reward = self._stack.enter_context(closing(Reward(*settings.reward_functions)))
            self.reward.progress = self.progress
        with problems.collect():
            self.codec = TextCodec(settings.tokenizer)
            self.sampling = _sampling(settings.sampling, self.codec)
        if not hasattr(self, "codec"):
            # Prompts cannot be written, but missing files can be named.
            for field, data in (("data", settings.data), ("eval.data", settings.eval.data)):
                if data is not None and data.jsonl is not None:
                    with problems.collect():
                        read_bytes(data.jsonl, f"{field}.jsonl: {data.jsonl}")
            return
        self.eval_data = None
        if settings.eval.data is not None:
            with problems.collect():
                self.eval_data = load_dataset(settings.eval.data, self.codec, field="eval.data")
        if not trains and self.eval_data is not None:
            self.data = self.eval_data
            return
        with problems.collect():
            learns_rows = self.purpose == "sft" and not draws_responses(settings, "sft")
            self.data = load_dataset(
                settings.data,
                self.codec,
                settings.seed,
                learnt=LearntRows(settings.sft) if learns_rows else None,
            )
            if trains and self.eval_data is not None:
                self.data = self._without_held_out(self.data, self.eval_data)
            if trains:
                self.settings = settings.with_steps_of(len(self.data), self.purpose)

    def _without_held_out(self, data: Dataset, held_out: Dataset) -> Dataset:
        """Returns the data without the held-out prompts, which two seeds of a task may share."""
        left = data.without({key for held in held_out.examples for key in held.keys})
        if removed := len(data) - len(left):
            _log.info(
                f"data: {removed:,} of {len(data):,} rows are left out: eval.data has their prompts"
            )
        return left

    def _connect_reference(self, problems: Problems) -> None:
        """Opens the running rollout server that is the reference, if one is."""
        address = self.settings.reference_address
        if address is None:
            return
        client = self._stack.enter_context(RolloutClient(address, **self._client_options()))
        with problems.collect():
            info = client.info()
            server = RolloutPool([Replica.of(client, info)], retry=self._retry)
            self._stack.callback(server.close)
            model = info.server.model
            self.reference = ServerReference(server, model, client.weights_version())
            if hasattr(self, "codec"):
                checks.check_vocabulary(self.codec, model, f"the reference at {address}")

    def _start(self, settings: ClusterSettings) -> ServersSettings:
        cluster = LocalCluster(settings, credentials=self.settings.credentials.credentials())
        self.cluster = self._stack.enter_context(cluster)
        cluster.keep_rollouts()
        self._credentials = cluster.credentials
        return addresses_of(self.cluster)

    def _connect(self, servers: ServersSettings, problems: Problems) -> None:
        """Opens the clients, and checks the settings against the info of every server."""
        options = self._client_options()
        self.trainer = self._stack.enter_context(TrainerClient(servers.trainer, **options))
        # Opens its connection with the first step that takes long enough to be asked about.
        self._trainer_status = self._stack.enter_context(
            TrainerClient(servers.trainer, **options | {"timeout_seconds": _STATUS_SECONDS})
        )
        clients = [
            self._stack.enter_context(RolloutClient(address, **options))
            for address in servers.rollout or ()
        ]
        trainer: trainer_pb2.GetServerInfoResponse | None = None
        rollouts: list[rollout_pb2.GetServerInfoResponse] = []
        with problems.collect():
            trainer = self.trainer.info()
        for client in clients:
            with problems.collect():
                rollouts.append(client.info())
        if trainer is None or len(rollouts) < len(clients):
            return
        with problems.collect():
            _by_advertised_address(zip(clients, rollouts, strict=True))
        self.trainer.retry = self._retry
        replicas = list(map(Replica.of, clients, rollouts))
        self.rollouts = RolloutPool(replicas, self.progress, self._retry)
        self._stack.callback(self.rollouts.close)
        self.critic_address = servers.critic or trainer.critic_address or None
        named = {
            f"the rollout server at {client.address}": info
            for client, info in zip(clients, rollouts, strict=True)
        }
        self._check_connected(trainer, named, problems)

    def _check_connected(
        self,
        trainer: trainer_pb2.GetServerInfoResponse,
        named: Mapping[str, rollout_pb2.GetServerInfoResponse],
        problems: Problems,
    ) -> None:
        """Checks the settings against the trainer, the rollout servers by name, and the critic.

        Sets `reference`, `longest_sequence` and `in_force` by what it finds.
        """
        models = {f"the trainer at {self.trainer.address}": trainer.server.model}
        for whose, info in named.items():
            models[whose] = info.server.model
        if self.uses_critic:
            with problems.collect(), self.critic(ONCE) as critic:
                models[f"the critic at {self.critic_address}"] = critic.info().server.model
        if self.settings.reference == "junior" and self.purpose == "train":
            self.reference = JuniorReference(self.rollouts)
            with problems.collect():
                checks.check_same_junior(named)
        uses_junior = uses_of(self.settings, self.purpose).junior
        lengths = [model.max_model_len for model in models.values()]
        lengths += [checks.longest_sequence(one, junior=uses_junior) for one in named.values()]
        if isinstance(self.reference, ServerReference):
            lengths.append(self.reference.model.max_model_len)
        self.longest_sequence = min(lengths)
        facts = [
            RolloutFacts(
                whose,
                info.HasField("junior"),
                info.speculator_heads > 0,
                info.max_queue,
                tandem_record(info.tandem),
            )
            for whose, info in named.items()
        ]
        draws = draws_responses(self.settings, self.purpose)
        if draws and self.settings.start_from in (None, "base"):
            with problems.collect():
                checks.check_same_senior(trainer, named)
        self._check_servers(
            ServerFacts(trainer.max_samples, self.longest_sequence, facts), problems
        )
        if hasattr(self, "codec"):
            for whose, model in models.items():
                with problems.collect():
                    checks.check_vocabulary(self.codec, model, whose)
                    checks.check_prompt_ids(self.codec, self._data_sets(), model, whose)
        with problems.collect():
            at = f"the trainer at {self.trainer.address}"
            self._warn_of_end_token(trainer.server.model.eos_token_ids, at, problems)
            for whose, info in named.items():
                both = (info.server.model.eos_token_ids, info.junior.eos_token_ids)
                self._warn_of_end_token({token for ids in both for token in ids}, whose, problems)
        if self.purpose == "train":
            with problems.collect():
                self._take_objective(self._objective_in_force(), problems)

    def _take_objective(self, objective: dict[str, Any], problems: Problems) -> None:
        """Keeps the objective in force, and compares it with how samples are drawn."""
        self.in_force["objective"] = objective
        with problems.collect():
            checks.check_importance_weights(self.settings, objective)

    def _objective_in_force(self) -> dict[str, Any]:
        try:
            return message_record(self.trainer.check_objective(self.settings.policy_objective()))
        except RpcError as error:
            raise checks.named_objective(error) from error


def _sampling(settings: SamplingSettings, codec: TextCodec) -> dict[str, Any]:
    """Returns the fields of SamplingParams: the names of special tokens as their ids."""
    params = settings.given()
    if texts := params.pop("stop", None):
        params |= codec.stops(texts, "sampling.stop")
        ids = {*settings.stop_token_ids, *params["stop_token_ids"]}
        params["stop_token_ids"] = sorted(ids)
    return params


def _named_models(settings: RunSettings) -> Iterator[Path]:
    """Yields the directories of models that the settings name."""
    yield settings.tokenizer
    if settings.cluster is not None:
        plan = planned(settings.cluster)
        for section in (*plan.rollout, plan.trainer or {}, plan.critic or {}):
            for key in SERVER_MODELS:
                if isinstance(section.get(key), str):
                    yield Path(section[key])


def addresses_of(cluster: LocalCluster) -> ServersSettings:
    """Returns the addresses of a local cluster, as a run wants them."""
    return ServersSettings(
        rollout=[server.address for server in cluster.rollouts] or None,
        trainer=cluster.trainer.address,
        critic=cluster.critic.address if cluster.has("critic") else None,
    )


def _by_advertised_address(
    infos: Iterable[tuple[RolloutClient, rollout_pb2.GetServerInfoResponse]],
) -> dict[str, RolloutClient]:
    """Returns the clients by the addresses at which the trainer reaches their servers.

    Raises ConfigError if two of them advertise the same one: the other would get no weights.
    """
    clients: dict[str, RolloutClient] = {}
    for client, info in infos:
        address = info.server.advertised_address
        if address in clients:
            raise ConfigError(
                f"the rollout servers at {clients[address].address} and {client.address} advertise "
                f"the same address, {address}",
                hint="give each server its own server.advertised_address",
            )
        clients[address] = client
    return clients


def other_weights(
    address: str, served: server_pb2.WeightsVersion, trainer: server_pb2.WeightsVersion
) -> FailedPreconditionError:
    """Returns the error for a rollout server whose weights no publication of a run may replace."""
    if served.version == trainer.version == 0:
        hint = (
            "they were started with different models: senior_model of a rollout server and model "
            "of the trainer must name the same model (cluster.model names it for all)"
        )
    else:
        hint = (
            "one of them was restarted or trained by another run: --resume brings both to the "
            "run's last checkpoint; a new run begins with the base model, the same for both"
        )
    return FailedPreconditionError(
        f"{address} serves version {served.version} with digest {served.digest}, the trainer "
        f"holds version {trainer.version} with {trainer.digest}: other weights",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="WEIGHTS_DIFFER",
        hint=hint,
    )


def _changed(
    server: TrainerClient | CriticClient, holds: str, left: str
) -> FailedPreconditionError:
    """Returns the error for a trainer or critic with other weights than the run left there."""
    return FailedPreconditionError(
        f"the {server.role} at {server.address} holds {holds}, not the run's {left}",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="STALE_POLICY_VERSION",
        hint="it was restarted, or another run trains it: --resume continues from the last "
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
        # They are also those of generation_config.json, which may change without the weights.
        "eos_token_ids": list(model.eos_token_ids),
    }
