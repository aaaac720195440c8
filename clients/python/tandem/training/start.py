"""The start of runs and evaluations: the weights that the servers get before the first prompt.

Every function first checks, then loads, then publishes. Only here may rollout servers be rolled
back. The next start repairs one that failed in between.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem._proto.types.v1 import server_pb2
from tandem.errors import FailedPreconditionError, UnsavedUpdatesError
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.run_directory.checkpoints import Checkpoint, checkpoint_at, checkpoint_of
from tandem.run_directory.directory import RunDirectory
from tandem.session.session import Session
from tandem.session.weight_errors import other_weights


@dataclass(frozen=True)
class Start:
    """The weights that a run begins with.

    Attributes:
        source: where they came from, in words.
        weights: the senior's, in the trainer and in every rollout server.
        critic: the critic's, if the run trains one.
    """

    source: str
    weights: server_pb2.WeightsVersion
    critic: server_pb2.WeightsVersion | None = None

    def __str__(self) -> str:
        """Returns one line for people."""
        weights = self.weights
        return f"starting from {self.source}: version {weights.version} ({weights.digest[:8]})"

    def record(self) -> dict[str, Any]:
        """Returns the record in run.json."""
        return {
            "from": self.source,
            "version": self.weights.version,
            "digest": self.weights.digest,
        }


def start_run(session: Session, run: RunDirectory, *, discard_unsaved: bool = False) -> Start:
    """Brings the servers to where the run begins or continues.

    Raises:
        UnsavedUpdatesError: a server holds updates that are in no checkpoint, and neither
            `discard_unsaved` nor start_from gives them up.
        FailedPreconditionError: a rollout server was started with another model than the trainer,
            or a checkpoint holds other weights than the run saved (reason WEIGHTS_DIFFER).
    """
    run.require_same_facts(session.facts())
    start_from = session.settings.start_from
    if run.state is not None:
        require_saved(session, discard_unsaved, run.versions, run.critic_versions)
        return _load(session, checkpoint_of(run.path), f"the checkpoint of step {run.state.step}")
    if start_from == "served":
        return _served(session)
    if start_from is None or start_from == "base":
        require_saved(session, discard_unsaved or start_from == "base")
        return _base(session)
    checkpoint = checkpoint_at(Path(start_from))
    require_saved(session, discard_unsaved)
    fresh = session.settings.start_optimizer == "fresh"
    return _load(session, checkpoint, str(checkpoint.trainer), fresh_optimizer=fresh)


def serve_checkpoint(session: Session, path: Path, *, discard_unsaved: bool = False) -> Start:
    """Loads a checkpoint, or a run directory's last one, into the trainer and publishes it."""
    checkpoint = checkpoint_at(path)
    require_saved(session, discard_unsaved)
    return _load(session, checkpoint, str(checkpoint.trainer))


def require_saved(
    session: Session,
    discard: bool,
    ours: Collection[tuple[int, str]] = (),
    our_critics: Collection[tuple[int, str]] = (),
) -> None:
    """Refuses to replace updates that no checkpoint has, unless they are the run's own.

    `ours` and `our_critics` are the (version, digest) of a run that will do its steps again.
    """
    if discard:
        return
    with ExitStack() as stack:
        clients: list[TrainerClient | CriticClient] = [session.trainer]
        if session.uses_critic:
            clients.append(stack.enter_context(session.critic()))
        infos = [client.info() for client in clients]
    if _made_by(ours, infos[0].server.weights):
        return
    for client, info in zip(clients, infos, strict=True):
        # A restarted trainer has none of the run's updates, but the critic may have.
        made = client.role == "critic" and _made_by(our_critics, info.server.weights)
        if info.unsaved and not made:
            raise UnsavedUpdatesError(
                f"the {client.role} at {client.address} holds updates that are in no checkpoint "
                f"(version {info.server.weights.version})",
                hint="start_from=served begins a run with them, --discard-unsaved discards them",
            )


def _made_by(ours: Collection[tuple[int, str]], held: server_pb2.WeightsVersion) -> bool:
    # The digest of weights that were neither published nor saved is not known.
    if any(
        version == held.version and (digest == held.digest or "" in (digest, held.digest))
        for version, digest in ours
    ):
        return True
    # A run that was killed in a step could not record the digest of its weights.
    return bool(ours) and held.version == max(version for version, _ in ours) + 1


def _base(session: Session) -> Start:
    # The servers of a new cluster hold the base model already.
    held = session.trainer.info().server.weights
    if session.cluster is not None and held.version == 0:
        critic_held = _critic_weights(session)
    else:
        held = session.trainer.load_base_model()
        critic_held = _critic_base(session)
    for client in session.rollouts.clients:
        served = client.weights_version()
        if served.version == held.version == 0 and served.digest != held.digest:
            raise other_weights(client.address, served, held)
    model = session.trainer.info().server.model.path
    return _publish(session, f"the base model {model}", held, critic_held)


def _served(session: Session) -> Start:
    held = session.trainer.info().server.weights
    return _publish(session, "what the servers hold", held, _critic_weights(session))


def _load(
    session: Session, checkpoint: Checkpoint, source: str, *, fresh_optimizer: bool = False
) -> Start:
    for client in session.rollouts.clients:
        client.weights_version()  # A server that does not answer is found before anything changes.
    held = session.trainer.load_checkpoint(str(checkpoint.trainer), fresh_optimizer=fresh_optimizer)
    if checkpoint.digest not in (None, held.digest):
        raise FailedPreconditionError(
            f"{checkpoint.trainer} holds weights with digest {held.digest}, the run saved "
            f"{checkpoint.digest}",
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason="WEIGHTS_DIFFER",
            hint="something else was written in its place",
        )
    critic_held = None
    if session.uses_critic and checkpoint.critic is None:
        critic_held = _critic_base(session)
        source += ", the critic from its base model"
    elif session.uses_critic:
        with session.critic() as critic:
            critic_held = critic.load_checkpoint(
                str(checkpoint.critic), fresh_optimizer=fresh_optimizer
            )
    return _publish(session, source, held, critic_held)


def _critic_weights(session: Session) -> server_pb2.WeightsVersion | None:
    if not session.uses_critic:
        return None
    with session.critic() as critic:
        return critic.info().server.weights


def _critic_base(session: Session) -> server_pb2.WeightsVersion | None:
    if not session.uses_critic:
        return None
    with session.critic() as critic:
        return critic.load_base_model()


def _publish(
    session: Session,
    source: str,
    held: server_pb2.WeightsVersion,
    critic_held: server_pb2.WeightsVersion | None,
) -> Start:
    others = [one for one in session.rollouts.clients if one.weights_version() != held]
    if others:
        session.publish(others, allow_rollback=True)
    return Start(source, held, critic_held)
