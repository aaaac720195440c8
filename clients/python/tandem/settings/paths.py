"""Relative paths and names of models among the raw values of a settings file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.models.hub import ModelName, local_model
from tandem.settings.lanes import LANES, lane_setting
from tandem.stores.store import StoreUrl
from tandem.stores.transfers import fetch_checkpoint

# Settings of a server that name a model, but for those in a lane's own section.
_MODELS = ("senior_model", "model", "junior_model", "reference_model")


def model_settings(section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields the settings of a server's section that name models.

    Each is the field, the map that holds it, and its key there.
    """
    for lane in LANES:
        if isinstance(section.get(lane), dict) and "model" in section[lane]:
            yield f"{lane}.model", section[lane], "model"
    for key in _MODELS:
        if key in section:
            yield key, section, key


def absolute(path: str, base: Path) -> str:
    """Returns a path as seen from `base`."""
    return os.path.normpath(base / path)


def anchor_path(section: dict[str, Any], key: str, base: Path) -> None:
    """Makes a relative path in a section absolute, as seen from `base`."""
    path = section.get(key)
    if isinstance(path, str) and path:
        section[key] = absolute(path, base)


def name_model(section: dict[str, Any], key: str, base: Path) -> None:
    """Makes the value of a key that names a model a ModelName."""
    if isinstance(section.get(key), str) and section[key]:
        section[key] = ModelName(section[key], base)


def anchor_server(section: dict[str, Any], base: Path) -> None:
    """Makes the relative paths in a server's section absolute, as seen from `base`."""
    for _, holder, key in model_settings(section):
        name_model(holder, key, base)
    # A speculator is a directory: names of the Hub stand for models alone.
    anchor_path(section, "senior_speculator", base)
    if isinstance(section.get("senior"), dict):
        anchor_path(section["senior"], "speculator", base)
    if isinstance(section.get("speculator"), dict):
        anchor_path(section["speculator"], "path", base)
    anchor_path(section, "shutdown_checkpoint_directory", base)
    server = section.get("server")
    if not isinstance(server, dict):
        return
    for name in ("tls", "tokens"):
        files = server.get(name)
        for key in files if isinstance(files, dict) else ():
            if key.endswith("_file"):
                anchor_path(files, key, base)
    roots = server.get("path_roots")
    if isinstance(roots, list) and all(isinstance(root, str) and root for root in roots):
        server["path_roots"] = [absolute(root, base) for root in roots]


def find_models(values: Any, field: str, *, weights: bool) -> None:
    """Puts a directory in the place of every ModelName and StoreUrl; fetches what is elsewhere.

    `field` is where the values stand, with a dot at its end.
    """
    several = isinstance(values, list)
    for key, value in list(enumerate(values) if several else values.items()):
        place = field if several and len(values) == 1 else f"{field}{key}."
        if isinstance(value, ModelName):
            revision = values.get(f"{key}_revision")
            values[key] = str(
                local_model(
                    value,
                    value.base,
                    place.removesuffix("."),
                    weights=weights and key != "tokenizer",
                    # The server refuses what is no commit.
                    revision=revision if isinstance(revision, str) and revision else None,
                )
            )
        elif isinstance(value, StoreUrl):
            values[key] = str(fetch_checkpoint(value, place.removesuffix(".")))
        elif isinstance(value, dict | list):
            find_models(value, place, weights=weights)


def senior_of(cluster: Any) -> str | None:
    """Returns the directory of the senior in the raw values of a cluster, where they name one."""
    if not isinstance(cluster, dict):
        return None
    rollouts = cluster.get("rollout")
    first = rollouts[0] if isinstance(rollouts, list) and rollouts else rollouts
    trainer = cluster.get("trainer")
    named = [
        lane_setting(first, "senior", "model") if isinstance(first, dict) else None,
        cluster.get("model"),
        trainer.get("model") if isinstance(trainer, dict) else None,
    ]
    return next((one for one in named if isinstance(one, str | Path)), None)
