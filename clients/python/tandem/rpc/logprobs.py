"""The log-probabilities of a trajectory as arrays, by author and by model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc.wire import from_tensor
from tandem.utils.authors import ENVIRONMENT, SENIOR


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the response tokens of a trajectory, in nats; float32 [T] each.

    The gRPC messages name them by who wrote the token, run files and `tandem view` by model: where
    the senior wrote, `senior` is `author` and `junior` is `other`; where the junior wrote, the
    other way round. NaN stands where nothing was computed: at the tokens of an environment, which
    no model wrote, and everywhere in `other` unless the prompt asked for `return_other_logprobs`.

    Attributes:
        is_senior: whether the senior wrote the token; bool [T].
        is_environment: whether an environment said it; bool [T].
        author: under the model that wrote the token.
        other: under the other model.
    """

    is_senior: np.ndarray
    is_environment: np.ndarray
    author: np.ndarray
    other: np.ndarray

    @classmethod
    def of(cls, trajectory: trajectory_pb2.Trajectory) -> LogProbs:
        """Reads the log-probabilities of a trajectory."""
        mask = np.frombuffer(trajectory.authorship_mask, np.uint8)
        said = mask == ENVIRONMENT
        author = from_tensor(trajectory.author_logprobs)
        other = np.full_like(author, np.nan)
        if trajectory.HasField("other_logprobs"):
            other = from_tensor(trajectory.other_logprobs)
        nothing = np.float32(np.nan)
        return cls(
            mask == SENIOR,
            said,
            np.where(said, nothing, author),
            np.where(said, nothing, other),
        )

    @cached_property
    def senior(self) -> np.ndarray:
        """Under the senior, whoever wrote the token."""
        return np.where(self.is_senior, self.author, self.other)

    @cached_property
    def junior(self) -> np.ndarray:
        """Under the junior, whoever wrote the token."""
        return np.where(self.is_senior, self.other, self.author)
