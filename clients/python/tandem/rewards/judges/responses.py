"""Responses, as rewards get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem._proto.types.v1 import trajectory_pb2
from tandem.rewards.judges.cases import Outcome
from tandem.rpc.wire import enum_name


@dataclass(frozen=True)
class Response:
    """A response to judge.

    Attributes:
        text: what every function gets.
        trajectory: where the details come from that a function may ask for (DETAILS).
        step: the step that draws the response, None in an evaluation.
        length: number of its tokens that are judged; None: all.
        environment: what get_reward() of its environment gave, or why the environment failed, which
            leaves the response without a reward; None without an environment, or a get_reward().
    """

    text: str
    trajectory: trajectory_pb2.Trajectory | None = None
    step: int | None = None
    length: int | None = None
    environment: Outcome | None = None

    def detail(self, name: str) -> Any:
        """Returns one of DETAILS; None where there is no trajectory."""
        if self.trajectory is None:
            return None
        if name == "step":
            return self.step
        if name == "prompt_token_ids":
            return list(self.trajectory.prompt_token_ids)
        if name == "finish_reason":
            return enum_name(self.trajectory, "finish_reason")
        return list(getattr(self.trajectory, name)[: self.length])
