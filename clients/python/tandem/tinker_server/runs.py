"""A run and its checkpoints, as the pages of training runs show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tandem.tinker_server.paths import TRAINING
from tandem.tinker_server.trained_model import Saved, TrainedModel


def checkpoints(model: TrainedModel) -> list[dict[str, Any]]:
    """Returns the checkpoints of a model, in their order."""
    return [_checkpoint(saved) for saved in model.saved.values()]


def run(model: TrainedModel, base_model: str) -> dict[str, Any]:
    """Returns the run of a model."""
    saved = checkpoints(model)

    def last(kind: str) -> dict[str, Any] | None:
        return next((one for one in reversed(saved) if one["checkpoint_type"] == kind), None)

    return {
        "training_run_id": model.id,
        "base_model": base_model,
        "model_owner": "tandem",
        **model.adapter,
        "last_request_time": _time(model.last_request),
        "last_checkpoint": last("training"),
        "last_sampler_checkpoint": last("sampler"),
        "user_metadata": {name: str(value) for name, value in model.metadata.items()},
    }


def cursor(found: Sequence[Any]) -> dict[str, int]:
    """Returns the place of an answer in its list: it has the whole list."""
    return {"offset": 0, "limit": len(found), "total_count": len(found)}


def _checkpoint(saved: Saved) -> dict[str, Any]:
    path = saved.path
    return {
        "checkpoint_id": f"{path.folder}/{path.name}",
        "checkpoint_type": "training" if path.folder == TRAINING else "sampler",
        "time": _time(saved.seconds),
        "tinker_path": str(path),
        "user_metadata": dict(saved.metadata),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
