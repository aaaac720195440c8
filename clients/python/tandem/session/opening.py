"""From the settings of a run to its session, or only to the result of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.cluster.local import LocalCluster
from tandem.cluster.plan import learner_of, uses_of
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.preflight.running_servers import LearnerInfo, RunningServers, check_running
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.delivery import by_advertised_address
from tandem.rpc.retry import ONCE
from tandem.session.preparing import Prepared, prepare
from tandem.session.reference import JuniorReference
from tandem.session.session import Session
from tandem.session.teachers import Teachers
from tandem.settings.cluster import ServersSettings
from tandem.settings.run import Purpose, RunSettings
from tandem.utils.progress import Progress

# Deadline of a question how far a step is.
_STATUS_SECONDS = 2.0


@dataclass(frozen=True)
class CheckedRun:
    """The result of check_run().

    Attributes:
        settings: those of the run, with the number of steps of `epochs`.
        in_force: sections of the settings with the servers' defaults: every field of objective and
            tandem (for "train"), the models of a cluster, the addresses of running servers.
    """

    settings: RunSettings
    in_force: dict[str, Any]


@contextmanager
def open_session(
    settings: RunSettings, *, purpose: Purpose = "train", progress: Progress | None = None
) -> Iterator[Session]:
    """Opens the session of a run, as a context manager.

    It reads and checks what the run needs, starts its cluster if it has one, and connects.
    Mistakes in the settings are found before anything is started or changed, all of them at once
    (preflight). A call of the body that fails because a server of the run's own cluster has died
    ends with ServerStartError.
    """
    with ExitStack() as stack:
        prepared = prepare(settings, purpose, progress or Progress(), stack, dry_run=False)
        if prepared.environment is not None:
            prepared.environment.open()
        with prepared.connections.explained():
            yield _opened(prepared, stack)


def check_run(
    settings: RunSettings,
    *,
    purpose: Purpose = "train",
    check_trainer: Callable[[TrainerClient], None] | None = None,
) -> CheckedRun:
    """Checks all that open_session() checks, and starts no server.

    `check_trainer` is called with the client of the trainer, if the run does not start it.
    """
    with ExitStack() as stack:
        prepared = prepare(settings, purpose, Progress(), stack, dry_run=True)
        if prepared.cluster is not None:
            return CheckedRun(prepared.inputs.settings, prepared.in_force)
        session = _opened(prepared, stack)
        if check_trainer is not None:
            check_trainer(session.trainer)
        return CheckedRun(session.settings, session.in_force)


def _opened(prepared: Prepared, stack: ExitStack) -> Session:
    """Starts the run's cluster, connects, and checks the settings against the servers."""
    servers = prepared.servers
    if prepared.cluster is not None:
        credentials = prepared.inputs.settings.credentials.credentials()
        cluster = stack.enter_context(LocalCluster(prepared.cluster, credentials=credentials))
        cluster.keep_rollouts()
        servers = prepared.connections.use(cluster)
    # Without an address, or an answer of every server, there are problems.
    learner = getattr(servers, learner_of(prepared.inputs.purpose))
    session = None if learner is None else _connected(servers, learner, prepared, stack)
    return prepared.problems.whole(session)


def _connected(
    servers: ServersSettings, learner: str, prepared: Prepared, stack: ExitStack
) -> Session | None:
    """Opens the clients, and checks the settings against the info of every server.

    `learner` is the address of the server that the run trains. Returns None if a server does not
    answer, which is among the problems then.
    """
    inputs, problems, connections = prepared.inputs, prepared.problems, prepared.connections
    options = connections.options()
    kind = CriticClient if learner_of(inputs.purpose) == "critic" else TrainerClient
    trainer = stack.enter_context(kind(learner, **options))
    # Opens its connection with the first step that takes long enough to be asked about.
    status_client = stack.enter_context(
        kind(learner, **options | {"timeout_seconds": _STATUS_SECONDS})
    )
    # A reward model is published to nobody.
    rollout_addresses = (servers.rollout or ()) if kind is TrainerClient else ()
    clients = [
        stack.enter_context(RolloutClient(address, **options)) for address in rollout_addresses
    ]
    info: LearnerInfo | None = None
    infos: list[rollout_pb2.GetServerInfoResponse] = []
    with problems.collect():
        info = trainer.info()
    for client in clients:
        with problems.collect():
            infos.append(client.info())
    if info is None or len(infos) < len(clients):
        return None
    with problems.collect():
        by_advertised_address(zip(clients, infos, strict=True))
    trainer.retry = connections.retry
    rollouts = RolloutPool(
        list(map(Replica.of, clients, infos)), prepared.progress, connections.retry
    )
    stack.callback(rollouts.close)
    critic_address = servers.critic or getattr(info, "critic_address", None) or None
    critics: dict[str, server_pb2.ModelInfo] = {}
    if trainer.role == "trainer" and uses_of(inputs.settings, inputs.purpose).critic:
        with problems.collect(), connections.critic(critic_address, ONCE) as critic:
            critics[f"the critic at {critic.address}"] = critic.info().server.model
    named = {
        f"the rollout server at {client.address}": one
        for client, one in zip(clients, infos, strict=True)
    }
    reference, settings = prepared.reference, inputs.settings
    frozen = [one.model for one in prepared.teachers.values()]
    if reference is not None:
        frozen.append(reference.server.model)
    running = RunningServers(trainer, info, named, critics, frozen)
    facts, in_force = check_running(running, inputs, problems)
    to_junior = settings.reference == "junior" and inputs.purpose == "train"
    teachers = None
    if settings.distils:
        distillation = settings.distillation()
        teachers = Teachers(
            settings.teachers,
            settings.teacher_column,
            distillation.get("top_k", 0),
            distillation.get("temperature", 0.0),
            prepared.teachers,
            rollouts,
        )
    return Session(
        settings=inputs.settings,
        purpose=inputs.purpose,
        progress=prepared.progress,
        codec=problems.whole(inputs.codec),
        sampling=problems.whole(inputs.sampling),
        data=problems.whole(inputs.data),
        eval_data=inputs.eval_data,
        reward=problems.whole(prepared.reward),
        environment=prepared.environment,
        connections=connections,
        trainer=trainer,
        status_client=status_client,
        rollouts=rollouts,
        critic_address=critic_address,
        reference=JuniorReference(rollouts) if to_junior else reference,
        teachers=teachers,
        longest_sequence=facts.max_model_len,
        in_force=prepared.in_force | in_force,
    )
