"""A run and its checkpoints, as the pages of training runs show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tandem.openai_server.errors import RequestError
from tandem.tinker_server.checkpoints import Saved
from tandem.tinker_server.paths import TRAINING
from tandem.tinker_server.trained_model import TrainedModel


def checkpoints(saved: Sequence[Saved]) -> list[dict[str, Any]]:
    """Returns checkpoints as lists show them."""
    return [_checkpoint(one) for one in saved]


def run(model: TrainedModel, base_model: str, written: Sequence[Saved]) -> dict[str, Any]:
    """Returns the run of a model, which has written these checkpoints."""
    saved = checkpoints(written)

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


def page(
    name: str, found: Sequence[Any], query: Mapping[str, str]
) -> dict[str, list[Any] | dict[str, int]]:
    """Returns the part of a list that a query asks for, and its place in the list.

    A query without a limit asks for the whole list. Raises RequestError, which names the field.
    """
    offset, limit = _number("offset", query, 0), _number("limit", query, len(found))
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {name: list(found[offset : offset + limit]), "cursor": cursor}


def _number(field: str, query: Mapping[str, str], otherwise: int) -> int:
    text = query.get(field)
    if text is None:
        return otherwise
    # isdecimal is also true for digits of other scripts, and int() reads no long ones.
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise RequestError(f"{field}: {text[:50]!r} is not a number from 0", field)
    return int(text)


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
