"""The events of a Generate call, read in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import RpcError, from_status


@dataclass(frozen=True)
class TokensCame:
    """Tokens of a sample, from position `offset` of its response on."""

    request_id: str
    sample_index: int
    offset: int
    token_ids: Sequence[int]
    authorship_mask: bytes


@dataclass(frozen=True)
class SampleFinished:
    """A sample that is whole.

    Attributes:
        draft_tokens: drafts that passes verified.
        accepted_draft_tokens: drafts that were accepted.
    """

    request_id: str
    trajectory: trajectory_pb2.Trajectory
    draft_tokens: int
    accepted_draft_tokens: int

    @property
    def sample_index(self) -> int:
        """The sample's index among those of its prompt."""
        return self.trajectory.sample_index


@dataclass(frozen=True)
class PromptFailed:
    """A prompt of which no further sample comes."""

    request_id: str
    error: RpcError


Event = TokensCame | SampleFinished | PromptFailed


def read_event(message: rollout_pb2.GenerateResponse) -> Event | None:
    """Returns the event in a message; None for a heartbeat and for kinds that are not known."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        came = message.tokens
        return TokensCame(
            came.request_id, came.sample_index, came.offset, came.token_ids, came.authorship_mask
        )
    if kind == "finished":
        sample = message.finished
        return SampleFinished(
            sample.request_id,
            sample.trajectory,
            sample.draft_tokens,
            sample.accepted_draft_tokens,
        )
    if kind == "failed":
        name = message.failed.request_id
        error = from_status(message.failed.status, request_id=name, method="Generate")
        return PromptFailed(name, error)
    return None
