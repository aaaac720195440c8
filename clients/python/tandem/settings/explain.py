"""Errors about the values of a settings file: source, dotted path, problem."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tandem._proto.config.v1 import server_config_pb2
from tandem.errors import ConfigError
from tandem.rpc import renamed
from tandem.settings import foreign_names
from tandem.settings.lanes import FLAT_NAMES
from tandem.settings.values import flat

Model = TypeVar("Model", bound=BaseModel)

# The phrase for each type of pydantic's problems, made of the problem's context. The value follows
# unless the type is in _VALUELESS.
_PHRASES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda _: "is required",
    "int_type": lambda _: "must be an integer",
    "float_type": lambda _: "must be a number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "string_too_short": lambda _: "must not be empty",
    "path_type": lambda _: "must be a path",
    "list_type": lambda _: "must be a list",
    "too_short": lambda context: f"must have at least {context['min_length']} entry",
    "dict_type": lambda _: "must be a mapping",
    "model_type": lambda _: "must be a mapping",
    "finite_number": lambda _: "must be finite",
    "greater_than": lambda context: f"must be greater than {_short(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_short(context['ge'])}",
    "less_than": lambda context: f"must be less than {_short(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_short(context['le'])}",
    "literal_error": lambda context: f"must be {context['expected']}".replace("'", ""),
    "value_error": lambda context: str(context["error"]),
}
_VALUELESS = {"missing", "string_too_short", "too_short", "value_error"}

# Sections of a cluster with the messages of their servers' settings.
_SERVERS = {
    "trainer": server_config_pb2.TrainerServerConfig,
    "rollout": server_config_pb2.RolloutServerConfig,
    "critic": server_config_pb2.CriticServerConfig,
}


def explain(
    schema: type[BaseModel], problems: Sequence[Any], source: str, overrides: Sequence[str]
) -> str:
    """Returns the message of one error for all problems of pydantic, a line each.

    A line begins with the override that set the value, else with `source`. The known keys of a
    section are listed once.
    """
    lines: list[str] = []
    listed: set[Any] = set()
    for problem in problems:
        path = ".".join(map(str, problem["loc"]))
        place = f"{_source(path, source, overrides)}: {path}".removesuffix(": ")
        lines.append(f"{place}: {_message(schema, problem, listed)}")
    if len(lines) > 1:
        return "\n".join([f"{len(lines)} problems:", *(f"  - {line}" for line in lines)])
    return lines[0]


def _message(schema: type[BaseModel], problem: Any, listed: set[Any]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        *section, key = problem["loc"]
        # An old name may stand in sections that are unknown, too.
        inner_names = [name.rpartition(".")[2] for name in flat(value, str(key))]
        names = [str(key), *inner_names]
        if old := next((name for name in names if name in renamed.NEW_NAMES), None):
            return f"unknown key{_renamed(schema, old)}"
        if foreign := list(filter(None, map(foreign_advice, dict.fromkeys(names)))):
            return f"unknown key; {'; '.join(foreign)}"
        return f"unknown key{_advice(schema, section, str(key), listed)}"
    if kind not in _PHRASES:
        return problem["msg"]
    phrase = _PHRASES[kind](problem.get("ctx", {}))
    if kind == "literal_error":
        return f"{phrase}, not {value!r}{_foreign_value(problem['loc'], value)}"
    if kind == "string_type" and isinstance(value, dict):
        # data.format={question}, for example.
        return f"{phrase}; YAML reads braces as a mapping; quote them: '\"{{...}}\"'"
    return phrase if kind in _VALUELESS else f"{phrase}, not {value!r}"


def _renamed(schema: type[BaseModel], old: str) -> str:
    """The new name of `old`, with its sections where the schema has it in one place."""
    new = renamed.NEW_NAMES[old]
    places = list(_keys_named(schema, new))
    return f"; {old} is now {places[0] if len(places) == 1 else new}"


def foreign_advice(key: str) -> str:
    """Returns "KEY is OURS here" for a setting of another trainer; "" for any other name."""
    ours = foreign_names.KEYS.get(key)
    return f"{key} is {ours} here" if ours else ""


def _foreign_value(path: Sequence[Any], value: Any) -> str:
    """Returns "; VALUE is OURS here" for a choice of another trainer; "" for any other value."""
    names = [str(part) for part in path]
    choices = next((one for name in names if (one := foreign_names.VALUES.get(name))), {})
    ours = choices.get(str(value).lower())
    return f"; {value} is {ours} here" if ours else ""


def _advice(schema: type[BaseModel], section: Sequence[Any], key: str, listed: set[Any]) -> str:
    known = fields_at(schema, section)
    servers = [
        role
        for role, kind in _SERVERS.items()
        if key in kind.DESCRIPTOR.fields_by_name
        or (role == "rollout" and key in FLAT_NAMES.values())
    ]
    if servers and not section and "cluster" in schema.model_fields:
        return f"; it is a setting of servers: {' or '.join(f'cluster.{r}.{key}' for r in servers)}"
    if close := difflib.get_close_matches(key, known, n=1):
        return f"; did you mean {close[0]!r}?"
    if elsewhere := list(_keys_named(schema, key)):
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    if tuple(section) in listed:
        return ""
    listed.add(tuple(section))
    return f"; known: {', '.join(known)}"


def _keys_named(schema: type[BaseModel], key: str, section: str = "") -> Iterator[str]:
    """The dotted keys that end with `key`, but for those of lists of sections."""
    for name, field in _fields(schema).items():
        if name == key:
            yield section + name
        if typing.get_origin(field.annotation) is list:
            continue
        for inner in sections_in(field.annotation):
            yield from _keys_named(inner, key, f"{section}{name}.")


def _short(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _source(path: str, source: str, overrides: Sequence[str]) -> str:
    """Returns the last override of `path`, of a section around it or of a key below it.

    Returns `source` if there is none.
    """
    for override in reversed(overrides):
        key = override.partition("=")[0]
        if f"{path}.".startswith(f"{key}.") or (path and key.startswith(f"{path}.")):
            return f"override {override!r}"
    return source


def fields_at(schema: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Returns the keys of the section at `path`; empty if there is no section."""
    for part in path:
        if isinstance(part, int):
            continue
        field = _fields(schema).get(str(part))
        inner = next(sections_in(field.annotation), None) if field else None
        if inner is None:
            return []
        schema = inner
    return list(_fields(schema))


def _fields(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of a section by their keys in a file."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the schemas that a field's annotation names."""
    for kind in kinds_in(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def kinds_in(annotation: Any) -> Iterator[Any]:
    """Yields the types, and the literal values, that a field may have."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from kinds_in(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType, list):
        for argument in typing.get_args(annotation):
            yield from kinds_in(argument)
    elif origin is Literal:
        yield from typing.get_args(annotation)
    else:
        yield annotation


def validated(
    schema: type[Model], values: dict[str, Any], source: str, overrides: Sequence[str] = ()
) -> Model:
    """Returns the values as a section; raises ConfigError as loading.validate() does."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(schema, error.errors(), source, overrides)) from None
