"""The way of the trainer's weights to the rollout servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import grpc

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.errors import RpcError, UnavailableError
from tandem.pool.rollout_pool import RolloutPool
from tandem.rpc import delivery
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.retry import Retries, RetryPolicy, may_pass

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes the trainer's weights to rollout servers."""

    def __init__(
        self,
        trainer: TrainerClient,
        rollouts: RolloutPool,
        retry: RetryPolicy,
        *,
        one_by_one: bool,
        to_lost: bool,
    ) -> None:
        """Prepares to publish.

        With `one_by_one`, each of several servers ends its calls before it gets the weights. With
        `to_lost`, servers that were left out get the weights, too, once they answer: otherwise
        catch_up() is called for them.
        """
        # Publications of one version share its update: two at a time would disturb each other. A
        # request may be over while a thread of it still brings a server up.
        self._delivering = threading.RLock()
        self._trainer = trainer
        self._rollouts = rollouts
        self._retry = retry
        self._one_by_one = one_by_one
        self._to_lost = to_lost
        self._said: set[str] = set()

    def publish(
        self, clients: Sequence[RolloutClient] | None = None, *, allow_rollback: bool = False
    ) -> None:
        """Publishes the trainer's weights to `clients`, by default to all rollout servers in use.

        Servers that do not answer are treated as Session.publish() says.

        Raises ConfigError if two servers advertise one address.
        """
        if clients is not None or allow_rollback:
            chosen = self._rollouts.clients if clients is None else clients
            for _, failure in self._deliver(chosen, allow_rollback):
                raise failure
            return
        retries = Retries(self._retry)
        while (failure := self._publish_to_all()) is not None:
            if (seconds := retries.wait_after(failure)) is None:
                raise failure
            self._say_once(f"publication: {failure.message}: trying again")
            time.sleep(seconds)

    def catch_up(self, client: RolloutClient, version: int) -> server_pb2.WeightsVersion | None:
        """Publishes to a server that is behind `version`; returns what another one serves."""
        with self._delivering:
            # Another publication may have reached it meanwhile.
            served = client.weights_version()
            if served.version >= version:
                return served
            _log.info(f"{client.address} is behind: publishing version {version}")
            self.publish([client])
            return None

    def _publish_to_all(self) -> RpcError | None:
        """Publishes to the rollout servers in use; returns a failure if none got the weights.

        Raises a failure that does not pass by itself.
        """
        replicas = [
            replica
            for replica in self._rollouts.replicas
            if not replica.lost or (self._to_lost and replica.client.health() == "SERVING")
        ]
        if self._to_lost and not replicas:
            return UnavailableError(
                "no rollout server answers", code=grpc.StatusCode.UNAVAILABLE, method="Health"
            )
        failures: list[tuple[RolloutClient, RpcError]] = []
        if self._one_by_one and len(self._rollouts.replicas) > 1:
            for replica in replicas:
                with self._rollouts.drained(replica):
                    failures += self._deliver([replica.client])
        else:
            failures += self._deliver([replica.client for replica in replicas])
        for _, failure in failures:
            if not may_pass(failure):
                raise failure
        if failures and len(failures) == len(replicas):
            return failures[0][1]
        for client, failure in failures:
            self._rollouts.leave_out(client, failure)
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
            targets = delivery.by_advertised_address(infos)
            if not targets:
                return failures
            reply = self._trainer.publish_weights(list(targets), allow_rollback=allow_rollback)
            failures += [
                (targets[target], failure) for target, failure in delivery.failures(reply).items()
            ]
            for result in reply.results:
                if result.speculator == trainer_pb2.SPECULATOR_DELIVERY_UNUSED:
                    self._say_once(
                        f"{result.target}: has no senior.speculator, and does not draft with the "
                        "trainer's speculator"
                    )
            return failures

    def _say_once(self, text: str) -> None:
        """Logs a text, unless the publisher did before."""
        if text not in self._said:
            self._said.add(text)
            _log.info(text)
