"""Starts the rollout servers of a local cluster again when they die."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tandem.errors import TandemError

_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from tandem.cluster.local import LocalCluster

# Seconds between two looks at the servers.
_LOOK_SECONDS = 0.5
# Starts of one server within SPAN_SECONDS after which it stays as it is: what ends it so often does
# not pass by itself.
MOST_STARTS = 3
SPAN_SECONDS = 600.0


class RolloutKeeper:
    """A thread that starts dead rollout servers again; a trainer's weights would be lost with it.

    Attributes:
        kept: the names of the servers that are started again if they die.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.kept = frozenset(server.name for server in cluster.rollouts)
        self._cluster = cluster
        self._starts: dict[str, list[float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="rollout-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a server that it is starting is waited for no longer."""
        self._stop.set()
        self._thread.join()

    @property
    def stopping(self) -> bool:
        """Whether stop() was called."""
        return self._stop.is_set()

    def _keep(self) -> None:
        from tandem.cluster.local import server_name

        while not self._stop.wait(_LOOK_SECONDS):
            for server in list(self._cluster.servers):
                name = server_name(server)
                if name in self.kept and not server.running:
                    self._start(name, str(self._cluster.death_of(server)))
                    break  # The servers are others now.

    def _start(self, name: str, death: str) -> None:
        now = time.monotonic()
        starts = [one for one in self._starts.get(name, ()) if now - one < SPAN_SECONDS]
        if len(starts) >= MOST_STARTS:
            self.kept -= {name}
            _log.warning(f"{death}: it died {len(starts) + 1} times and is not started again")
            return
        self._starts[name] = [*starts, now]
        _log.warning(f"{death}: restarting it")
        try:
            self._cluster.restart(name)
        except TandemError as error:
            if not self.stopping:
                _log.warning(f"{error}")
        else:
            _log.info(f"{name} is serving again")
