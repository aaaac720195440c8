"""A response with its judgement, and the keys of its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem._proto.types.v1 import trajectory_pb2, vision_pb2
from tandem.rpc.logprobs import LogProbs
from tandem.rpc.wire import enum_name, from_tensor, short_floats, tandem_record


@dataclass(frozen=True)
class Response:
    """A response that a run keeps.

    Attributes:
        trajectory: the response as the rollout server wrote it.
        text: its text.
        reward: its reward; None where it failed, or nobody judges.
        scores: by name what each reward function gave.
        overlong_punishment: at most 0, apart from the reward.
        group_id: the same for all responses to a prompt.
        place: where the row stands.
        row: the columns of the row that are shown.
        junior_logprobs: under the junior, float32 [T], where the trajectory has none.
    """

    trajectory: trajectory_pb2.Trajectory
    text: str
    reward: float | None = None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    overlong_punishment: float = 0.0
    group_id: str = ""
    place: str | None = None
    row: Mapping[str, Any] | None = None
    junior_logprobs: np.ndarray | None = None

    def logprobs_by_model(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the log-probs under senior and junior, float32 [T]; NaN: not computed.

        The junior's are None with tandem off.
        """
        both = LogProbs.of(self.trajectory)
        if self.junior_logprobs is not None:
            return both.senior, self.junior_logprobs
        return both.senior, both.junior if self.trajectory.tandem.enabled else None


def json_value(value: Any) -> Any:
    """Returns a row's value for JSON; numbers that are not finite become None, other types text."""
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | bool | int | float | None) else str(value)


def trajectory_record(response: Response) -> dict[str, Any]:
    """Returns a response as JSON, with exactly the keys of docs/guides/run-directory.md."""
    trajectory = response.trajectory
    mask = list(trajectory.authorship_mask)
    senior, junior = response.logprobs_by_model()
    keep_mass = [0.0] * len(mask)
    if trajectory.HasField("log_keep_mass"):
        keep_mass = short_floats(from_tensor(trajectory.log_keep_mass))
    return {
        "prompt_token_ids": list(trajectory.prompt_token_ids),
        "vision_inputs": [vision_record(one) for one in trajectory.vision_inputs],
        "response_token_ids": list(trajectory.response_token_ids),
        "authorship_mask": mask,
        "accepted_draft_mask": list(trajectory.accepted_draft_mask) or None,
        "senior_logprobs": known_floats(senior),
        "junior_logprobs": None if junior is None else known_floats(junior),
        "log_keep_mass": keep_mass,
        "finish_reason": enum_name(trajectory, "finish_reason"),
        "text": response.text,
        "reward": response.reward,
        "scores": dict(response.scores),
        "overlong_punishment": response.overlong_punishment,
        "group_id": response.group_id,
        "place": response.place,
        "row": None if response.row is None else json_value(response.row),
        "sample_index": trajectory.sample_index,
        "seed": trajectory.seed,
        "senior_versions": [
            [run.weights.version, run.count, run.weights.digest]
            for run in trajectory.senior_versions
        ],
        "junior_version": trajectory.junior_version or None,
        "sampling": sampling_record(trajectory),
        "tandem": tandem_record(trajectory.tandem),
    }


def vision_record(image: vision_pb2.VisionInput) -> dict[str, Any]:
    """Returns an image's record; the row says where its file is."""
    return {
        "kind": enum_name(image, "kind"),
        "digest": image.digest,
        "grid": [image.grid_t, image.grid_h, image.grid_w],
        "seconds_per_grid": image.seconds_per_grid,
        "first_token": image.first_token if image.HasField("first_token") else None,
    }


def sampling_record(trajectory: trajectory_pb2.Trajectory) -> dict[str, Any]:
    """Returns the sampling parameters of a response."""
    sampling = trajectory.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
    }


def known_floats(values: np.ndarray) -> list[float | None]:
    """Returns numbers for JSON: None where nothing was computed."""
    return [None if math.isnan(value) else value for value in short_floats(values)]
