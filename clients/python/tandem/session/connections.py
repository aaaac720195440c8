"""The way of a run to its servers, and the notice that one of its own has died."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.cluster.local import LocalCluster
from tandem.errors import ConfigError, RpcError, ServerStartError
from tandem.rpc.client import CriticClient
from tandem.rpc.credentials import Credentials
from tandem.rpc.retry import ONCE, RetryPolicy
from tandem.settings.cluster import ServersSettings


class Connections:
    """The credentials, retries and deadlines that the clients of a run share.

    Attributes:
        credentials: those of the servers.
        cluster: the servers that the run started; None if it uses running ones.
    """

    def __init__(self, settings: ServersSettings, credentials: Credentials) -> None:
        self.credentials = credentials
        self.cluster: LocalCluster | None = None
        self._settings = settings

    def use(self, cluster: LocalCluster) -> ServersSettings:
        """Takes a cluster that was started for the run; returns the addresses of its servers."""
        self.cluster, self.credentials = cluster, cluster.credentials
        return addresses_of(cluster)

    @property
    def retry(self) -> RetryPolicy:
        """The time for which a call waits for a server that does not answer."""
        return RetryPolicy(seconds=self._settings.retry_seconds, check=self.check)

    def options(self, retry: RetryPolicy = ONCE) -> dict[str, Any]:
        """Returns the options of a client, which by default does not wait for its server.

        A run that begins does not, and the clients of a pool never do: the pool does.
        """
        return {
            "timeout_seconds": self._settings.timeout_seconds,
            "credentials": self.credentials,
            "retry": retry,
        }

    def critic(self, address: str | None, retry: RetryPolicy) -> CriticClient:
        """Returns a client of the critic, which the caller closes.

        Raises ConfigError without an address.
        """
        if address is None:
            raise ConfigError("servers.critic: not set, and the trainer has no critic_address")
        return CriticClient(address, **self.options(retry))

    def check(self) -> None:
        """Raises ServerStartError if a server of the run's own cluster has died.

        A rollout server may have died, as long as another one runs: the run continues with that
        one.
        """
        if self.cluster is not None:
            self.cluster.check(spare_rollouts=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises ServerStartError for a call of its body that failed because a server has died."""
        try:
            yield
        except RpcError as error:
            try:
                self.check()
            except ServerStartError as death:
                for note in getattr(error, "__notes__", ()):
                    death.add_note(note)
                raise death from error
            raise


def addresses_of(cluster: LocalCluster) -> ServersSettings:
    """Returns the addresses of a local cluster, as a run wants them."""
    return ServersSettings(
        rollout=[server.address for server in cluster.rollouts] or None,
        trainer=cluster.trainer.address if cluster.has("trainer") else None,
        critic=cluster.critic.address if cluster.has("critic") else None,
    )
