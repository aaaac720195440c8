"""Joins the turns of an episode, and what its environment said between them, to one response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem._proto.types.v1 import sampling_pb2, trajectory_pb2
from tandem.errors import TurnsDifferError
from tandem.rpc.wire import from_tensor, to_tensor
from tandem.utils.authors import ENVIRONMENT

# Fields of a Trajectory that all turns of a response have in common.
_COMMON = ("prompt_token_ids", "seed", "sample_index", "tandem", "junior_version")
# Fields with a float for each token, and whether a turn may lack them: log_keep_mass is then 0.
_FLOATS = {"author_logprobs": False, "other_logprobs": False, "log_keep_mass": True}


def join(
    turn: trajectory_pb2.Trajectory,
    environment_token_ids: Sequence[int],
    next_turn: trajectory_pb2.Trajectory,
) -> trajectory_pb2.Trajectory:
    """Returns a response, what an environment said, and the next turn as one response.

    `turn` is a whole response: a first turn, or what join() returned. `next_turn` is what the
    server returned for a prompt whose `response` was the two (Prompt.response). Tokens of the
    environment have author 2, log-probabilities 0, and the senior's version of the token before
    them. `sampling.max_tokens` is the most tokens that the joined response could have had.

    Raises TurnsDifferError, which names the field, for turns that are not of one response.
    """
    said = len(environment_token_ids)
    begun = len(turn.response_token_ids)
    _require_fit(turn, begun + said, next_turn)
    whole = trajectory_pb2.Trajectory()
    whole.CopyFrom(next_turn)
    whole.response_offset = 0
    whole.response_token_ids[:] = [
        *turn.response_token_ids,
        *environment_token_ids,
        *next_turn.response_token_ids,
    ]
    whole.authorship_mask = (
        turn.authorship_mask + bytes([ENVIRONMENT]) * said + next_turn.authorship_mask
    )
    for name, optional in _FLOATS.items():
        _join_floats(name, optional, turn, said, next_turn, whole)
    _join_top(turn, said, next_turn, whole)
    if turn.accepted_draft_mask or next_turn.accepted_draft_mask:
        whole.accepted_draft_mask = _drafts(turn) + bytes(said) + _drafts(next_turn)
    _join_versions(turn, said, next_turn, whole)
    whole.sampling.max_tokens = begun + said + next_turn.sampling.max_tokens
    return whole


def _require_fit(
    turn: trajectory_pb2.Trajectory, end: int, next_turn: trajectory_pb2.Trajectory
) -> None:
    """Raises TurnsDifferError unless `next_turn` continues `turn` at position `end`."""
    if turn.response_offset:
        raise TurnsDifferError(
            "response_offset",
            f"the turn begins at {turn.response_offset} of its response, not at 0: join the turns "
            "from the first on",
        )
    if next_turn.response_offset != end:
        raise TurnsDifferError(
            "response_offset",
            f"the next turn begins at {next_turn.response_offset}, but {end} tokens come before it",
        )
    for name in _COMMON:
        if getattr(turn, name) != getattr(next_turn, name):
            raise TurnsDifferError(name, "differs between the turns")
    if turn.vision_inputs != next_turn.vision_inputs[: len(turn.vision_inputs)]:
        raise TurnsDifferError("vision_inputs", "the next turn lacks images of the turn")
    if _bounded(turn.sampling) != _bounded(next_turn.sampling):
        raise TurnsDifferError("sampling", "differs between the turns in more than max_tokens")
    if turn.HasField("routed_experts") != next_turn.HasField("routed_experts"):
        raise TurnsDifferError("routed_experts", "only one of the turns has it")
    if next_turn.HasField("routed_experts"):
        rows = len(next_turn.prompt_token_ids) + end + len(next_turn.response_token_ids) - 1
        recorded = next_turn.routed_experts.shape[0] if next_turn.routed_experts.shape else 0
        if recorded != rows:
            raise TurnsDifferError(
                "routed_experts",
                f"the next turn has those of {recorded} tokens, not of all {rows} before the last",
            )


def _bounded(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Returns sampling parameters without max_tokens, which bounds one turn."""
    one = sampling_pb2.SamplingParams()
    one.CopyFrom(sampling)
    one.ClearField("max_tokens")
    return one


def _join_floats(
    name: str,
    optional: bool,
    turn: trajectory_pb2.Trajectory,
    said: int,
    next_turn: trajectory_pb2.Trajectory,
    whole: trajectory_pb2.Trajectory,
) -> None:
    there = [one.HasField(name) for one in (turn, next_turn)]
    if not any(there):
        return
    if not all(there) and not optional:
        raise TurnsDifferError(name, "only one of the turns has it")
    before, after = (
        from_tensor(getattr(one, name))
        if one.HasField(name)
        else np.zeros(len(one.response_token_ids), np.float32)
        for one in (turn, next_turn)
    )
    joined = np.concatenate([before, np.zeros(said, np.float32), after])
    getattr(whole, name).CopyFrom(to_tensor(joined))


def _join_top(
    turn: trajectory_pb2.Trajectory,
    said: int,
    next_turn: trajectory_pb2.Trajectory,
    whole: trajectory_pb2.Trajectory,
) -> None:
    there = [one.HasField("top_token_ids") for one in (turn, next_turn)]
    if not any(there):
        return
    if not all(there) or turn.top_token_ids.shape[1] != next_turn.top_token_ids.shape[1]:
        raise TurnsDifferError("top_token_ids", "the turns have different numbers of them")
    count = turn.top_token_ids.shape[1]
    for name, nothing in (("top_token_ids", np.int32(-1)), ("top_logprobs", np.float32(0))):
        before, after = (from_tensor(getattr(one, name)) for one in (turn, next_turn))
        joined = np.concatenate([before, np.full((said, count), nothing), after])
        getattr(whole, name).CopyFrom(to_tensor(joined, joined.dtype))


def _drafts(turn: trajectory_pb2.Trajectory) -> bytes:
    """Returns which tokens are accepted drafts; a turn without drafts has none."""
    return turn.accepted_draft_mask or bytes(len(turn.response_token_ids))


def _join_versions(
    turn: trajectory_pb2.Trajectory,
    said: int,
    next_turn: trajectory_pb2.Trajectory,
    whole: trajectory_pb2.Trajectory,
) -> None:
    del whole.senior_versions[:]
    whole.senior_versions.extend(turn.senior_versions)
    whole.senior_versions[-1].count += said
    for run in next_turn.senior_versions:
        last = whole.senior_versions[-1]
        if last.weights == run.weights:
            last.count += run.count
        else:
            whole.senior_versions.append(run)
