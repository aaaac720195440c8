"""Weights of a server that a run reads and nobody may change while it lasts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import grpc

from tandem._proto.types.v1 import server_pb2
from tandem.errors import FailedPreconditionError


class Answer(Protocol):
    """A server's result, with the weights that the server held then."""

    @property
    def weights(self) -> server_pb2.WeightsVersion:
        """The weights."""
        ...


def require_weights(
    place: str, address: str, answers: Iterable[Answer], first: server_pb2.WeightsVersion
) -> None:
    """Raises FailedPreconditionError for an answer of other weights than the `first` ones.

    `place` is the setting that names the server.
    """
    for one in answers:
        held = one.weights
        if held != first:
            raise FailedPreconditionError(
                f"{place}: {address} holds version {held.version} with digest {held.digest}, the "
                f"run began with version {first.version} with {first.digest}",
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason="WEIGHTS_DIFFER",
                hint="does a trainer teach it or publish to it, or was it restarted with another "
                "model?",
            )
