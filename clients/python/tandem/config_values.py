"""Values of a configuration file before a schema sees them: YAML, overrides and dotted keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError
from tandem.text_files import read_text


def read_mapping(path: Path, error: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """What a YAML file holds; raises `error`, which begins with the path, if that is no mapping."""
    text = read_text(path, str(path), error)
    try:
        values = _read_yaml(text) or {}
    except ValueError as failure:
        raise error(f"{path}: not YAML: {failure}") from None
    if not isinstance(values, dict):
        raise error(f"{path}: the file must be a mapping")
    return values


def dump_values(values: dict[str, Any]) -> str:
    """Values as YAML, in their order."""
    return yaml.safe_dump(values, sort_keys=False, width=100)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value`; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as dotted.key=value")
    try:
        value = _read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from None
    if isinstance(value, str):
        value = _number(value)
    *sections, last = key.split(".")
    node: Any = values
    for section in sections:
        node = _section(node, section, override)
    node[_place(node, last, override)] = value


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """Nested values by dotted key; a list of mappings by index."""
    if isinstance(values, dict):
        items: Any = values.items()
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        items = enumerate(values)
    else:
        return {key: values}
    nested = (flat(value, f"{key}.{name}" if key else str(name)) for name, value in items)
    return {place: value for part in nested for place, value in part.items()}


def _number(text: str) -> Any:
    # YAML 1.1 reads "1e-5" as a string.
    try:
        return float(text)
    except ValueError:
        return text


def _read_yaml(text: str) -> Any:
    """The value of a YAML text; ValueError if it has none."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{error.problem or error.context}") from None
    # PyYAML leaves what a scalar says to Python: 2024-13-45 is a ValueError of datetime.date, and a
    # wrong tag (!!bool x) a KeyError.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(error) from None


def _section(node: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """The mapping or list at `part`; an empty mapping takes the place of anything else."""
    place: Any = _place(node, part, override)
    inner = node.get(place) if isinstance(node, dict) else node[place]
    if not isinstance(inner, dict | list):
        inner = node[place] = {}
    return inner


def _place(node: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """`part` as a key of a mapping, or as an index of a list."""
    if isinstance(node, dict):
        return part
    if part not in map(str, range(len(node))):
        raise ConfigError(f"override {override!r}: no item {part} in a list of {len(node)}")
    return int(part)
