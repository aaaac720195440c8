"""The scores of sequences, computed by the replicas of a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import server_pb2, tensor_pb2
from tandem.pool.request import Admit, PoolRequest, PoolState
from tandem.rpc.requests import ToScore
from tandem.rpc.transport import MAX_RECEIVE_BYTES
from tandem.rpc.wire import from_tensor

# Most tokens of one Score call: their ids, of 5 bytes at most, fit into a message.
SCORE_TOKENS = 1 << 16


@dataclass(frozen=True)
class Scored:
    """The log-probabilities of a sequence's tokens, from the first scored token on.

    Attributes:
        senior: under the senior, float32 [tokens scored]; None if it was not requested.
        junior: under the junior, in the same way.
        senior_top: the likeliest tokens at each place and their log-probabilities, [tokens scored,
            num_top_logprobs], as the server sent them; None if they were not requested.
        junior_top: the same of the junior.
        weights: the weights of the senior that the server held.
    """

    senior: np.ndarray | None
    junior: np.ndarray | None
    weights: server_pb2.WeightsVersion
    senior_top: tuple[tensor_pb2.Tensor, tensor_pb2.Tensor] | None = None
    junior_top: tuple[tensor_pb2.Tensor, tensor_pb2.Tensor] | None = None


@dataclass(frozen=True)
class ScoreOptions:
    """How sequences are scored.

    Attributes:
        senior: whether under the senior.
        junior: whether under the junior.
        temperature: divides the logits; None: 1.
        num_top_logprobs: number of the likeliest tokens that are returned for each place.
    """

    senior: bool
    junior: bool
    temperature: float | None
    num_top_logprobs: int = 0

    @property
    def call_tokens(self) -> int:
        """Most tokens of one Score call, whose reply must fit into a message."""
        # Id and log-probability of each of the likeliest tokens, under both models.
        reply = 2 * 8 * self.num_top_logprobs * SCORE_TOKENS
        return SCORE_TOKENS // max(1, math.ceil(reply / (MAX_RECEIVE_BYTES // 2)))


def _top(
    scores: rollout_pb2.SequenceScores, model: str
) -> tuple[tensor_pb2.Tensor, tensor_pb2.Tensor] | None:
    """Returns the likeliest tokens under a model, if the scores have them."""
    if not scores.HasField(f"{model}_top_token_ids"):
        return None
    return getattr(scores, f"{model}_top_token_ids"), getattr(scores, f"{model}_top_logprobs")


class PoolScoring(PoolRequest[ToScore, Scored]):
    """A request for the scores of (token ids, index of the first scored token)."""

    def __init__(
        self,
        state: PoolState,
        sequences: Sequence[ToScore],
        options: ScoreOptions,
        admit: Admit,
    ) -> None:
        self._tokens = [max(1, len(one[0])) for one in sequences]
        super().__init__(
            state,
            sequences,
            units=self._tokens,
            order=range(len(sequences)),
            limits=[(options.call_tokens, options.call_tokens)] * len(state.replicas),
            admit=admit,
        )
        self._options = options

    def serve(self, index: int) -> None:
        """Calls Score once, with ScoreOptions.call_tokens tokens at most."""
        with self.changed:
            items = self.take(index)
        if not items:
            return
        batch = [self.items[item] for item in items]
        options = self._options
        reply = self.replicas[index].client.score(
            batch,
            senior=options.senior,
            junior=options.junior,
            temperature=options.temperature,
            num_top_logprobs=options.num_top_logprobs,
        )
        with self.changed:
            for item, scores in zip(items, reply.sequences, strict=True):
                one = Scored(
                    from_tensor(scores.senior_logprobs) if options.senior else None,
                    from_tensor(scores.junior_logprobs) if options.junior else None,
                    reply.weights,
                    _top(scores, "senior") if options.senior else None,
                    _top(scores, "junior") if options.junior else None,
                )
                self.shares.answer(index, item, self._tokens[item])
                self.answer(index, item, one)
                self._state.progress.advance(1, self._tokens[item])

    def recall(self, index: int, items: list[int]) -> None:
        """Does nothing: every sequence of a call has begun, because the window is the capacity."""

    def stop(self) -> None:
        """Does nothing: a Score call ends with its client."""
