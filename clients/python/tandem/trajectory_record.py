"""Trajectories as the lines of trajectory files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tandem.logprobs import LogProbs
from tandem.types.v1 import trajectory_pb2, vision_pb2
from tandem.wire import enum_name, from_tensor, short_floats, tandem_record


def json_value(value: Any) -> Any:
    """Returns a row's value for JSON; numbers that are not finite become None, other types text."""
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | bool | int | float | None) else str(value)


def trajectory_record(
    trajectory: trajectory_pb2.Trajectory,
    *,
    text: str,
    reward: float | None = None,
    scores: Mapping[str, float | None] | None = None,
    overlong_punishment: float = 0.0,
    group_id: str = "",
    place: str | None = None,
    row: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns one line of a trajectory file, with exactly the keys of docs/client.md."""
    mask = list(trajectory.authorship_mask)
    logprobs = LogProbs.of(trajectory)
    keep_mass = [0.0] * len(mask)
    if trajectory.HasField("log_keep_mass"):
        keep_mass = short_floats(from_tensor(trajectory.log_keep_mass))
    sampling = trajectory.sampling
    return {
        "prompt_token_ids": list(trajectory.prompt_token_ids),
        "vision_inputs": [_vision_record(one) for one in trajectory.vision_inputs],
        "response_token_ids": list(trajectory.response_token_ids),
        "authorship_mask": mask,
        "accepted_draft_mask": list(trajectory.accepted_draft_mask) or None,
        "senior_logprobs": _known(logprobs.senior),
        "junior_logprobs": _known(logprobs.junior) if trajectory.tandem.enabled else None,
        "log_keep_mass": keep_mass,
        "finish_reason": enum_name(trajectory, "finish_reason"),
        "text": text,
        "reward": reward,
        "scores": dict(scores or {}),
        "overlong_punishment": overlong_punishment,
        "group_id": group_id,
        "place": place,
        "row": None if row is None else json_value(row),
        "sample_index": trajectory.sample_index,
        "seed": trajectory.seed,
        "senior_versions": [
            [run.weights.version, run.count, run.weights.digest]
            for run in trajectory.senior_versions
        ],
        "junior_version": trajectory.junior_version or None,
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
        },
        "tandem": tandem_record(trajectory.tandem),
    }


def _vision_record(image: vision_pb2.VisionInput) -> dict[str, Any]:
    """Returns an image's record; the row says where its file is."""
    return {
        "kind": enum_name(image, "kind"),
        "digest": image.digest,
        "grid": [image.grid_t, image.grid_h, image.grid_w],
        "seconds_per_grid": image.seconds_per_grid,
    }


def _known(values: np.ndarray) -> list[float | None]:
    """Returns numbers for JSON: None where nothing was computed."""
    return [None if math.isnan(value) else value for value in short_floats(values)]
