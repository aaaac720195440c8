"""The reference policy of the KL where it is a rollout server's model (`reference` of a run)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from tandem._proto.types.v1 import trajectory_pb2
from tandem.pool.rollout_pool import RolloutPool, response_to_score, text_to_score
from tandem.rpc.logprobs import LogProbs
from tandem.rpc.requests import PolicySample, ScoredTokens, SupervisedSample
from tandem.session.frozen_server import FrozenServer


class Reference(ABC):
    """The source of the log-probabilities that the trainer compares with."""

    @abstractmethod
    def logprobs(self, responses: Sequence[trajectory_pb2.Trajectory]) -> list[np.ndarray]:
        """Returns float32 [L] of every response, at the temperature of its log-probabilities."""

    def added_to(self, samples: Sequence[PolicySample]) -> list[PolicySample]:
        """Returns the samples with their reference_logprobs."""
        logprobs = self.logprobs([sample.trajectory for sample in samples])
        return [
            dataclasses.replace(sample, reference_logprobs=own)
            for sample, own in zip(samples, logprobs, strict=True)
        ]


class JuniorReference(Reference):
    """The frozen junior of the run's own rollout servers."""

    def __init__(self, rollouts: RolloutPool) -> None:
        self._rollouts = rollouts

    def logprobs(self, responses: Sequence[trajectory_pb2.Trajectory]) -> list[np.ndarray]:
        """Returns what the rollout recorded; a rollout server scores responses that lack it."""
        if all(one.HasField("other_logprobs") for one in responses):
            # Tokens of an environment have no log-probability, and no weight.
            return [
                np.where(both.is_environment, np.float32(0), both.junior)
                for both in map(LogProbs.of, responses)
            ]
        scored = self._rollouts.score(
            [response_to_score(one) for one in responses],
            junior=True,
            temperature=_temperature(responses),
        )
        return [one.junior for one in scored]


class ServerReference(Reference):
    """The senior of a rollout server that no trainer publishes to."""

    def __init__(self, server: FrozenServer) -> None:
        self.server = server

    def logprobs(self, responses: Sequence[trajectory_pb2.Trajectory]) -> list[np.ndarray]:
        """Raises FailedPreconditionError if the server holds other weights than before."""
        sequences = [response_to_score(one) for one in responses]
        return self._scored(sequences, _temperature(responses))

    def of_texts(self, texts: Sequence[SupervisedSample]) -> list[np.ndarray]:
        """Returns float32 [L] of the response of every text; raises as logprobs() does."""
        return self._scored([text_to_score(one) for one in texts], temperature=1.0)

    def _scored(self, sequences: Sequence[ScoredTokens], temperature: float) -> list[np.ndarray]:
        scored = self.server.score(sequences, temperature)
        return [one.senior for one in scored]


def _temperature(responses: Sequence[trajectory_pb2.Trajectory]) -> float:
    """Returns the temperature of a step's log-probabilities; greedy responses have theirs at 1."""
    [temperature] = {one.sampling.temperature for one in responses}
    return temperature or 1.0
