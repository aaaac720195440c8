"""A rollout server that no trainer publishes to, whose senior scores the run's responses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tandem._proto.types.v1 import server_pb2
from tandem.models.tokenizer import TextCodec
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.pool.scoring import Scored
from tandem.preflight.vocabulary import check_vocabulary
from tandem.rpc.client import RolloutClient
from tandem.rpc.frozen_weights import require_weights
from tandem.rpc.requests import ToScore
from tandem.session.connections import Connections


class FrozenServer:
    """The senior of a rollout server, at the weights that it holds when the run begins.

    Attributes:
        field: the setting that names the server.
        model: the server's senior.
        weights: the weights that it must hold as long as the run lasts.
    """

    def __init__(
        self,
        field: str,
        server: RolloutPool,
        model: server_pb2.ModelInfo,
        weights: server_pb2.WeightsVersion,
    ) -> None:
        self.field = field
        self.model = model
        self.weights = weights
        self._server = server

    @classmethod
    def connect(
        cls,
        field: str,
        whose: str,
        address: str,
        codec: TextCodec | None,
        connections: Connections,
        stack: ExitStack,
    ) -> FrozenServer:
        """Opens the server at an address, until the stack is closed.

        `whose` begins its name in an error message ("the reference").

        Raises ConfigError if its vocabulary is not that of the run's tokenizer.
        """
        client = stack.enter_context(RolloutClient(address, **connections.options()))
        info = client.info()
        server = RolloutPool([Replica.of(client, info)], retry=connections.retry)
        stack.callback(server.close)
        model = info.server.model
        if codec is not None:
            check_vocabulary(codec, model, f"{whose} at {address}")
        return cls(field, server, model, client.weights_version())

    def score(
        self, sequences: Sequence[ToScore], temperature: float, num_top_logprobs: int = 0
    ) -> list[Scored]:
        """Scores every (token ids, index of the first scored token), in order.

        Raises FailedPreconditionError if the server holds other weights than before.
        """
        scored = self._server.score(
            sequences, senior=True, temperature=temperature, num_top_logprobs=num_top_logprobs
        )
        [client] = self._server.clients
        require_weights(self.field, client.address, scored, self.weights)
        return scored
