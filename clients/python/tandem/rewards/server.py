"""The score of a reward model as a reward: a critic server that nobody trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.errors import ConfigError, RpcError
from tandem.rewards.judges.cases import Failure, Outcome, number_of
from tandem.rewards.judges.responses import Response
from tandem.rpc.client import CriticClient
from tandem.rpc.frozen_weights import require_weights
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.retry import ONCE
from tandem.rpc.wire import from_tensor

# Returns a client of a critic, given its address and the deadline of its calls in seconds.
Connect = Callable[[str, float], CriticClient]


class RewardServer:
    """A judge that asks a critic server for the value after the last token of prompt and response.

    One stream of calls has all responses of a step. A server that does not answer is waited for as
    the client's retry policy says.

    Attributes:
        model: the server's model, from open() on.
        weights: the weights that it must hold as long as the run lasts, from open() on.
    """

    waits = True

    def __init__(self, address: str, field: str, limit_seconds: float) -> None:
        self.model = server_pb2.ModelInfo()
        self.weights = server_pb2.WeightsVersion()
        self.address = address
        self._field = field
        self._limit_seconds = limit_seconds
        self._client: CriticClient | None = None
        # An evaluation may be judged while the next step is drawn.
        self._lock = threading.Lock()
        self._asked: list[tuple[SupervisedSample, Future[Outcome]]] = []

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._client is not None

    def open(self, connect: Connect) -> None:
        """Connects, and notes the model and its weights.

        Raises RpcError for a server that does not answer, ConfigError for a critic whose value head
        nobody has trained.
        """
        self.close()
        self._client = connect(self.address, self._limit_seconds)
        retry, self._client.retry = self._client.retry, ONCE
        info = self._client.info()
        self._client.retry = retry
        drawn = critic_pb2.VALUE_HEAD_SOURCE_RANDOM
        if info.value_head_initialized_from == drawn and not info.server.weights.version:
            raise ConfigError(
                f"{self._field}.server: {self.address} serves {info.server.model.path}, which has "
                "no value head: its scores would be random",
                hint="a reward model is a sequence classifier of one label, with score.weight",
            )
        self.model, self.weights = info.server.model, info.server.weights

    def start(self, responses: Sequence[Response]) -> list[Future[Outcome]]:
        """Collects responses with their trajectories; returns the outcome of each."""
        futures: list[Future[Outcome]] = [Future() for _ in responses]
        for response, future in zip(responses, futures, strict=True):
            trajectory = response.trajectory
            tokens = trajectory.response_token_ids[: response.length] if trajectory else ()
            if trajectory is None or not tokens:
                future.set_result(Failure("a response without tokens has no score"))
                continue
            images = tuple(trajectory.vision_inputs)
            sample = SupervisedSample(trajectory.prompt_token_ids, tokens, images)
            with self._lock:
                self._asked.append((sample, future))
        return futures

    def finish(self) -> None:
        """Asks for the scores of all responses that were collected.

        Raises FailedPreconditionError if the server holds other weights than at the beginning.
        """
        with self._lock:
            asked, self._asked = self._asked, []
        if not asked:
            return
        assert self._client is not None, "open() comes first"
        outcomes: list[Outcome]
        try:
            replies = self._client.compute_values([sample for sample, _ in asked])
        except RpcError as error:
            outcomes = [Failure(error.message)] * len(asked)
        else:
            require_weights(f"{self._field}.server", self.address, replies, self.weights)
            outcomes = [number_of(from_tensor(one.final_value)[0]) for one in replies]
        for (_, future), outcome in zip(asked, outcomes, strict=True):
            future.set_result(outcome)

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
