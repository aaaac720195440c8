"""The reference of run files, and their JSON schema for editors, from the schema's own comments."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from tandem.settings import asynchronous, cluster, environment, run
from tandem.settings.explain import kinds_in, sections_in
from tandem.settings.run import RunSettings

# The cluster's server sections have a page of their own.
_SERVERS = "[settings of the server](configuration.md)"

_WORDS = {
    "Path": "path",
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "bool",
    "dict": "mapping",
    "NoneType": "",
}

Comment = Callable[[type[BaseModel], str], str]


def comments() -> Comment:
    """Returns the function that gives the comment above a field of a section."""
    found: dict[tuple[str, str], str] = {}
    for module in (asynchronous, cluster, environment, run):
        found |= _comments_of(inspect.getsource(module))

    def comment(section: type[BaseModel], name: str) -> str:
        for base in section.__mro__:
            if text := found.get((base.__name__, name)):
                return text
        return ""

    return comment


def _comments_of(source: str) -> dict[tuple[str, str], str]:
    lines = source.splitlines()
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            first = field.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            text = " ".join(
                line.strip().removeprefix("#").strip() for line in lines[first : field.lineno - 1]
            )
            found[node.name, field.target.id] = text
    return found


# The sections whose fields are those of a message of the contract, with its name.
_MESSAGES = {"ObjectiveSettings": "PolicyObjective", "DistillationSettings": "Distillation"}


def run_file_page(comment: Comment, contract: Callable[[str, str], str]) -> str:
    """Returns the text of docs/reference/run-file.md, before its lines are wrapped.

    `contract` gives the comment of a message's field.
    """
    lines = [
        "# The run file",
        "",
        "Generated from the comments of `clients/python/tandem/settings` by `make format`;"
        " change them there.",
        "",
        "A run file (YAML) holds the settings of `tandem train`, `tandem sft` and `tandem eval`. An"
        " override `dotted.key=value` on the command line comes after it, and the later one wins;"
        " an unknown key is an error with a suggestion, and a name of TRL, verl or prime-rl is"
        " answered with ours. `--dry-run` prints every setting in force. A relative path starts at"
        " the file's folder, one in an override at the working directory."
        " [runs.md](../guides/runs.md) says how the settings act together.",
        "",
        "[run-file.schema.json](run-file.schema.json) is the JSON schema of the file, for an editor"
        " that completes and checks YAML: with the YAML language server, put"
        " `# yaml-language-server: $schema=PATH/run-file.schema.json` into the file's first line.",
    ]
    for path, section in _sections("", RunSettings):
        meaning = (inspect.getdoc(section) or "").partition("\n\n")[0].replace("\n", " ")
        title = f"`{path}`" if path else "Top level"
        lines += ["", f"## {title}"]
        if path:
            lines += ["", meaning]
        lines += ["", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            message = _MESSAGES.get(section.__name__)
            text = contract(message, name) if message else comment(section, name)
            row = (
                f"`{_joined(path, field.alias or name)}`",
                _kind(path, name, field),
                _default(field),
                text,
            )
            lines.append("| " + " | ".join(one.replace("|", "\\|") for one in row) + " |")
    return "\n".join(lines) + "\n"


def json_schema(comment: Comment, contract: Callable[[str, str], str]) -> str:
    """Returns the text of docs/reference/run-file.schema.json."""
    schema = RunSettings.model_json_schema()
    classes = {section.__name__: section for _, section in _sections("", RunSettings)}
    for name, body in [("RunSettings", schema), *schema.get("$defs", {}).items()]:
        for key, field in body.get("properties", {}).items():
            field.pop("title", None)
            section = classes.get(name)
            text = contract(_MESSAGES[name], key) if name in _MESSAGES else ""
            if section is not None and not text:
                fields = section.model_fields
                text = comment(section, key if key in fields else f"{key}_")
            if text:
                field["description"] = text
            # Folders of the machine that writes this file.
            if _is_of_a_machine(field.get("default")):
                del field["default"]
            elif isinstance(field.get("default"), dict):
                whole = field["default"].items()
                field["default"] = {k: v for k, v in whole if not _is_of_a_machine(v)}
    # A cluster may be the name of a file, and follows the servers' own schema. A single rollout
    # server, and a single address of one, need no list.
    schema["properties"]["cluster"]["anyOf"].append({"type": "string"})
    definitions = schema["$defs"]
    rollout = definitions["ClusterSettings"]["properties"]["rollout"]
    definitions["ClusterSettings"]["properties"]["rollout"] = {
        "anyOf": [{"type": "object"}, {key: rollout[key] for key in ("type", "items")}],
        "description": "Settings of the rollout server, or of each of several.",
    }
    for choices in (definitions["ServersSettings"]["properties"]["rollout"],):
        choices["anyOf"].append({"type": "string"})
    schema["required"] = [name for name in schema["required"] if name != "tokenizer"]
    schema["title"] = "A run of tandem train, tandem sft or tandem eval"
    return json.dumps(schema, indent=2) + "\n"


def _is_of_a_machine(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _sections(path: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields a section and those below it, with their dotted paths; lists of sections with N."""
    yield path, section
    for name, field in section.model_fields.items():
        inner = next(sections_in(field.annotation), None)
        if inner is None or (path, name) == ("eval", "data") or path.endswith("data"):
            # eval.data has the settings of data; sources of data are small.
            if inner is not None and path == "data":
                yield from _sections(_joined(path, name), inner)
            continue
        several = typing.get_origin(field.annotation) is list
        key = field.alias or name
        yield from _sections(_joined(path, f"{key}.N" if several else key), inner)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind(path: str, name: str, field: FieldInfo) -> str:
    """Returns the type of a field in words."""
    if path == "cluster" and name in ("rollout", "trainer", "critic"):
        return _SERVERS
    kinds, literals = [], []
    is_list = "list" in str(field.annotation)
    for kind in kinds_in(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kinds.append("as `data`" if (path, name) == ("eval", "data") else "section")
        elif isinstance(kind, type) or typing.get_origin(kind):
            word = _WORDS[getattr(typing.get_origin(kind) or kind, "__name__", "")]
            kinds += [word] if word else []
        else:
            literals.append(f"`{kind}`")
    words = " or ".join(dict.fromkeys([*literals, *kinds]))
    return f"list of {words}" if is_list else words


def _default(field: FieldInfo) -> str:
    """Returns the default of a field, for a table."""
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined or field.default is None:
        return ""
    if isinstance(field.default, BaseModel):
        return ""
    value: Any = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{json.dumps(value) if isinstance(value, list | dict | str) else format(value, 'g')}`"
