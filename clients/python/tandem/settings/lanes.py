"""Settings of a rollout server's lanes, each of which has a nested and a flat name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

LANES = ("senior", "junior")

# Flat names by the nested ones: "senior_dtype" for "senior.dtype". `make format` writes them from
# the servers' table.
FLAT_NAMES: dict[str, str] = json.loads(
    resources.files("tandem.settings").joinpath("flat_names.json").read_text(encoding="utf-8")
)


def lane_setting(section: Mapping[str, Any], lane: str, key: str) -> Any:
    """Returns a lane's setting by either of its names; None if a server's section has neither.

    A trainer or critic has its max_model_len where a rollout server has that of the senior.
    """
    nested = section.get(lane)
    value = nested.get(key) if isinstance(nested, dict) else None
    return section.get(FLAT_NAMES[f"{lane}.{key}"]) if value is None else value
