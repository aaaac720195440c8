"""Reads, checks and writes run files and cluster files.

A relative path in a file starts at that file's folder, one in an override at the working directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.settings.base import Settings
from tandem.settings.cluster import ClusterSettings
from tandem.settings.explain import validated
from tandem.settings.paths import find_models
from tandem.settings.values import apply_override, dump_values, read_mapping

Schema = TypeVar("Schema", bound=Settings)


def load(
    schema: type[Schema], path: Path, overrides: Sequence[str] = (), *, weights: bool = True
) -> Schema:
    """Reads a YAML file, applies `dotted.key=value` overrides (later wins) and checks it.

    Without `weights` no weights of models are fetched from the Hub, as for a dry run.

    Raises ConfigError, with the dotted path of every problem.
    """
    values = read_mapping(path)
    schema.require_kind(path, values)
    schema.anchor(values, path.absolute().parent)
    for override in overrides:
        apply_override(values, override)
        schema.anchor(values, Path.cwd())
    return validate(schema, values, str(path), overrides, weights=weights)


def validate(
    schema: type[Schema],
    values: dict[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    *,
    weights: bool = True,
) -> Schema:
    """Checks values against the schema, and finds the models that they name.

    Relative paths among the values start at the working directory. `weights` as in load().

    Raises ConfigError, which names every problem with its dotted path and where the value was
    given: in one of the `overrides`, else in `source`.
    """
    schema.anchor(values, Path.cwd())
    find_models(values, "cluster." if schema is ClusterSettings else "", weights=weights)
    return validated(schema, values, source, overrides)


def dump(settings: Settings) -> str:
    """Returns the settings as YAML that load() reads back."""
    return dump_values(settings.model_dump(mode="json"))
