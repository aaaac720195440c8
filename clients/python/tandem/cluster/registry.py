"""Clusters that `tandem up` runs for this user, so that other commands find them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tandem.cluster.local import LocalCluster
from tandem.errors import ConfigError
from tandem.rpc.calls import CriticCalls, RolloutCalls, TrainerCalls
from tandem.rpc.credentials import Credentials
from tandem.rpc.retry import RetryPolicy
from tandem.rpc.transport import Connection
from tandem.settings.cluster import ServersSettings

_log = logging.getLogger(__name__)


Client = TypeVar("Client", bound=Connection)


class _Server(BaseModel):
    """The fields of a server's record that other commands need."""

    model_config = ConfigDict(extra="allow")
    role: Literal["rollout", "trainer", "critic"]
    rank: int
    address: str


class _Record(BaseModel):
    """The record of a cluster."""

    directory: str
    credentials: dict[str, str] = {}
    servers: list[_Server]


@contextmanager
def announced(cluster: LocalCluster) -> Iterator[None]:
    """Lets clusters() find the cluster until the body ends, or the process does.

    Says so if the record cannot be written.
    """
    folder = _folder()
    with ExitStack() as stack:
        if folder is None:
            _log.info("other commands cannot find these servers: HOME is not set")
        else:
            record = folder / f"{os.getpid()}.json"
            stack.callback(_remove, record)
            try:
                _write_locked(record, cluster, stack)
            except OSError as error:
                _log.info(f"other commands cannot find these servers: {record}: {error.strerror}")
        yield


def _write_locked(record: Path, cluster: LocalCluster, stack: ExitStack) -> None:
    """Makes the record appear complete and locked; the lock says that the process lives."""
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_suffix(".tmp")
    file = stack.enter_context(temporary.open("w", encoding="utf-8"))
    fcntl.flock(file, fcntl.LOCK_EX)
    servers = [server.describe() for server in cluster.servers]
    record_of = {
        "directory": str(cluster.settings.directory),
        "credentials": cluster.credentials.record(),
        "servers": servers,
    }
    json.dump(record_of, file)
    file.flush()
    temporary.replace(record)


def clusters() -> list[dict[str, Any]]:
    """Returns a record of each running cluster: its "directory", "credentials" and "servers".

    Credentials are paths by the fields of Credentials. A server's record is that of `tandem up
    --json`. A record that cannot be read, or is no such record, is passed over: it helps nobody,
    and servers can be named by their addresses.
    """
    folder = _folder()
    try:
        records = [] if folder is None else sorted(folder.glob("*.json"))
    except OSError:
        return []
    found = []
    for record in records:
        # The cluster may end at any moment.
        with suppress(OSError), record.open("rb") as file:
            if not _is_locked(file.fileno()):
                _remove(record)
            elif (known := _known(file.read())) is not None:
                found.append(known)
    return found


def servers() -> list[dict[str, Any]]:
    """Returns the servers of the cluster that runs; none if no cluster runs.

    A server of several ranks is there by its rank 0.

    Raises ConfigError if several clusters run.
    """
    return [server for server in _only().get("servers", ()) if not server["rank"]]


def with_defaults(own: Credentials, *, found: bool) -> Credentials:
    """Returns `own` credentials, filled up by those of the environment.

    With `found`, for servers of the cluster that runs, those of the cluster come before the
    environment's. Raises ConfigError if several clusters run.
    """
    cluster = Credentials(**_only().get("credentials", {})) if found else Credentials()
    return own.or_else(cluster).or_else(Credentials.from_environment())


def _only() -> dict[str, Any]:
    """Returns the record of the cluster that runs, {} if no cluster runs."""
    found = clusters()
    if len(found) > 1:
        directories = ", ".join(one["directory"] for one in found)
        raise ConfigError(
            f"{len(found)} clusters are running: {directories}",
            hint="give the address of a server; `tandem up` printed them",
        )
    return found[0] if found else {}


def addresses(
    named: ServersSettings, *, any_rollout: bool = True, learner: str = "trainer"
) -> ServersSettings:
    """Returns the addresses of a run's servers: `named`, else of `tandem up`, else the defaults.

    Without `any_rollout` the run needs no rollout server, and the default port stands for none.
    `learner` is the role of the server that the run trains, the trainer or the critic.

    Raises ConfigError if several clusters run, or the one that runs lacks a server.
    """
    known = [] if named.any_named else servers()
    found: dict[str, list[str]] = {"rollout": [], "trainer": [], "critic": []}
    for server in known:
        found[server["role"]].append(server["address"])
    for role in ("rollout", learner) if any_rollout else (learner,):
        if known and not found[role]:
            raise ConfigError(f"servers.{role}: the running cluster has no {role} server")
    rollout = named.rollout or found["rollout"]
    if not rollout and any_rollout:
        rollout = [RolloutCalls.default_address]
    [trainer] = found["trainer"] or [named.trainer or TrainerCalls.default_address]
    critic = next(iter(found["critic"]), named.critic)
    if learner == "critic":
        critic = critic or CriticCalls.default_address
    return named.model_copy(update={"rollout": rollout, "trainer": trainer, "critic": critic})


def connect(
    kind: type[Client], address: str | None, option: str, own: Credentials, **options: Any
) -> Client:
    """Returns a client, with `options`, of the server at `address`.

    By default that is the first server of its role in the cluster that runs, which also has the
    credentials that `own` lacks; else the server at the default port.

    Raises ConfigError, which begins with `option`, if the cluster has no such server, or if several
    clusters run.
    """
    found = False
    if address is None and (known := servers()):
        address = next((one["address"] for one in known if one["role"] == kind.role), None)
        if address is None:
            raise ConfigError(f"{option}: the running cluster has no {kind.role} server")
        found = True
    # Somebody waits for the command: a server that is not there is said at once.
    options = {"retry": RetryPolicy(seconds=1.0)} | options
    return kind(address, credentials=with_defaults(own, found=found), **options)


def _folder() -> Path | None:
    """Returns the folder of the records; None for a user without a home."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return Path(state) / "tandem" / "clusters"


def _remove(record: Path) -> None:
    """Removes a record, if the folder may be written."""
    with suppress(OSError):
        record.unlink(missing_ok=True)


def _known(data: bytes) -> dict[str, Any] | None:
    """Returns the record in a file; None if the file holds none."""
    try:
        known = _Record.model_validate_json(data)
        Credentials(**known.credentials)
        return known.model_dump()
    except (TypeError, ValueError):
        return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
