"""Values of a configuration file before a schema sees them: YAML, overrides and dotted keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tandem.errors import ConfigError
from tandem.utils.text_files import read_text

# Numbers as in YAML 1.2, without a leading zero. PyYAML follows YAML 1.1, where 1e-3 is text, and
# 1:30 and 010 are the numbers 90 and 8.
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9]\d*)\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:\.\d+|\d+\.\d*)(?:[eE][-+]?\d+)?\Z|[-+]?\d+[eE][-+]?\d+\Z"
        r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
    ),
}
# Tags of YAML 1.1 that are not taken over: its numbers, and its dates, which stay text.
_NOT_OURS = {*_NUMBERS, "tag:yaml.org,2002:timestamp"}


class _Loader(yaml.SafeLoader):
    """Reads the scalars of YAML 1.2, and refuses a key that stands twice in a mapping."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_OURS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Composes a mapping. Raises MarkedYAMLError, which names the key, for a repeated key."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice, first in line "
                    f"{lines[key.value]}",
                    problem_mark=key.start_mark,
                )
            lines[key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes YAML, with quotes around text that either version of YAML takes for a number."""


for _tag, _pattern in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def read_mapping(path: Path, error: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises `error`, beginning with the path, for any other file.
    """
    text = read_text(path, str(path), error)
    try:
        values = read_yaml(text) or {}
    except ValueError as failure:
        raise error(f"{path}: not YAML: {failure}") from None
    if not isinstance(values, dict):
        raise error(f"{path}: the file must be a mapping")
    return values


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError, with line and column, if it has none."""
    try:
        # _Loader is a SafeLoader: it makes plain values alone.
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{error.problem or error.context}") from None
    # PyYAML leaves tagged scalars to Python: !!bool x is a KeyError, !!float x a ValueError.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(error) from None


def dump_values(values: dict[str, Any]) -> str:
    """Returns values as YAML, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value`; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as dotted.key=value")
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from None
    *sections, last = key.split(".")
    node: Any = values
    for section in sections:
        node = _section(node, section, override)
    node[_place(node, last, override)] = value


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """Returns nested values by dotted key. A list of mappings has the indices as keys."""
    if isinstance(values, dict):
        items: Any = values.items()
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        items = enumerate(values)
    else:
        return {key: values}
    nested = (flat(value, f"{key}.{name}" if key else str(name)) for name, value in items)
    return {place: value for leaves in nested for place, value in leaves.items()}


def _section(node: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """Returns the mapping or list at `part`; an empty mapping takes the place of anything else."""
    place: Any = _place(node, part, override)
    inner = node.get(place) if isinstance(node, dict) else node[place]
    if not isinstance(inner, dict | list):
        inner = node[place] = {}
    return inner


def _place(node: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """Returns `part` as a key of a mapping, or as an index of a list."""
    if isinstance(node, dict):
        return part
    if part not in map(str, range(len(node))):
        raise ConfigError(f"override {override!r}: no item {part} in a list of {len(node)}")
    return int(part)
