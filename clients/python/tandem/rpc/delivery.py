"""The delivery of weights: addresses of rollout servers, and what each server made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.errors import ConfigError, RpcError, TandemError, from_status


class Addressed(Protocol):
    """A client of a server."""

    address: str


Client = TypeVar("Client", bound=Addressed)


def by_advertised_address(
    infos: Iterable[tuple[Client, rollout_pb2.GetServerInfoResponse]],
) -> dict[str, Client]:
    """Returns the clients by the addresses at which the trainer reaches their servers.

    Raises ConfigError if two of them advertise the same one: the other would get no weights.
    """
    clients: dict[str, Client] = {}
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


def failures(reply: trainer_pb2.PublishWeightsResponse) -> dict[str, RpcError]:
    """Returns the errors of the servers that did not get the weights, by their addresses.

    Raises TandemError if one has other weights than those that were sent.
    """
    failed: dict[str, RpcError] = {}
    for result in reply.results:
        if result.status.code:
            failure = from_status(result.status, method="PublishWeights")
            failure.message = f"{result.target}: {failure.message}"
            failed[result.target] = failure
        elif result.digest != reply.weights.digest:
            raise TandemError(f"{result.target} received weights other than those sent")
    return failed


def delivered(reply: trainer_pb2.PublishWeightsResponse) -> server_pb2.WeightsVersion:
    """Returns the weights that every server got; raises the first failure of one that did not."""
    for failure in failures(reply).values():
        raise failure
    return reply.weights
