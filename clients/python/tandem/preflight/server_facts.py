"""The properties of planned and of running servers that a run's settings are checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tandem._proto.rollout.v1 import rollout_pb2
from tandem.rpc.wire import tandem_record


@dataclass(frozen=True)
class RolloutFacts:
    """A rollout server's properties that a run's settings are checked against.

    Attributes:
        whose: the server's name in an error message.
        max_model_len: most tokens of a sequence of the senior.
        junior_max_model_len: most tokens of a sequence of the junior; None without a junior.
        has_speculator: whether it has a `senior.speculator`.
        tandem: the server's defaults, the fields of TandemConfig.
    """

    whose: str
    max_model_len: int
    junior_max_model_len: int | None
    has_speculator: bool
    max_queue: int
    tandem: Mapping[str, Any]

    @classmethod
    def of(cls, whose: str, info: rollout_pb2.GetServerInfoResponse) -> Self:
        """Returns the facts of a running server."""
        return cls(
            whose,
            info.server.model.max_model_len,
            info.junior.max_model_len if info.HasField("junior") else None,
            info.speculator_heads > 0,
            info.max_queue,
            tandem_record(info.tandem),
        )

    @property
    def has_junior(self) -> bool:
        """Whether it has a junior."""
        return self.junior_max_model_len is not None

    def longest_sequence(self, *, junior: bool) -> int:
        """Returns the most tokens of a sequence of the senior, or of senior and `junior` together.

        A server without a junior has the senior's limit alone.
        """
        if not junior or self.junior_max_model_len is None:
            return self.max_model_len
        return min(self.max_model_len, self.junior_max_model_len)


@dataclass(frozen=True)
class ServerFacts:
    """Properties of all servers of a run, running or still to be started.

    Attributes:
        max_samples: most samples of a step, the trainer's.
        rollouts: empty if the run uses no rollout server.
        uses_junior: whether the run reads with the rollout servers' juniors.
        other_lengths: longest sequences of trainer and critic, and of the reference if it is a
            server of its own.
    """

    max_samples: int
    rollouts: Sequence[RolloutFacts]
    uses_junior: bool
    other_lengths: Sequence[int]

    @property
    def max_model_len(self) -> int:
        """Longest sequence that every server holds."""
        lengths = [one.longest_sequence(junior=self.uses_junior) for one in self.rollouts]
        return min([*lengths, *self.other_lengths])
