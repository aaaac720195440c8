"""Writes the reference pages that come from the code, or checks that they are current.

    reference_docs.py update    writes them
    reference_docs.py check     fails when a page differs from what would be written

In docs/reference: configuration.md has every field of the three server configurations, with its
comment in the schema; run-file.md and run-file.schema.json every setting of a run file; errors.md
the reasons in common/base/errors/error_reasons.h; api.md the docstrings of the Python client. In
the client's package: remedies.json has the remedies of the reasons, and rpc/renamed_names.json the
table in common/config/renamed_names.h, and settings/flat_names.json that in flat_names.h.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mdformat
from api_reference import api_page
from google.protobuf import descriptor_pb2
from proto_contract import REPOSITORY, Contract
from run_file_reference import comments, json_schema, run_file_page

CONFIG_PROTO = "tandem/config/v1/server_config.proto"
SERVERS = ("Rollout", "Trainer", "Critic")
REASONS = REPOSITORY / "common/base/errors/error_reasons.h"
RENAMED = REPOSITORY / "common/config/renamed_names.h"
FLAT = REPOSITORY / "common/config/flat_names.h"

FieldProto = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    FieldProto.TYPE_BOOL: "bool",
    FieldProto.TYPE_STRING: "text",
    FieldProto.TYPE_DOUBLE: "number",
    FieldProto.TYPE_FLOAT: "number",
    FieldProto.TYPE_INT32: "integer",
    FieldProto.TYPE_INT64: "integer",
    FieldProto.TYPE_UINT64: "integer",
}
# "Default 30." or "Defaults 7701 rollout, 7702 trainer, 7703 critic.", up to the sentence's end.
_DEFAULT = re.compile(r"\bDefaults? (?P<value>.+?)(?:\.(?=\s|$)|;|, at most)")
# "The optimizer; its learning_rate is required.", where the inner message has a default.
_REQUIRED = re.compile(r"\bits (?P<field>\w+) is required\b")
# The value of a field that is not set and has no default of its own.
_ZERO = {"bool": "false", "integer": "0", "number": "0"}


@dataclass(frozen=True)
class Row:
    """A row of a table: one setting."""

    path: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """The settings below the path `title`, which is "" for those of a server itself."""

    title: str
    meaning: str
    rows: tuple[Row, ...]


def _required(row: Row, path: str, comment: str) -> Row:
    """Returns the row of a setting below `path`, whose comment may require it."""
    found = _REQUIRED.search(comment)
    if not found or row.path != f"{path}.{found['field']}":
        return row
    meaning = _DEFAULT.sub("", row.meaning).removesuffix(".").strip()
    return replace(row, default="required", meaning=meaning)


class Schema:
    """The messages and enums of the contract, by full name, with their comments."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        self.messages: dict[str, descriptor_pb2.DescriptorProto] = {}
        self.enums: dict[str, descriptor_pb2.EnumDescriptorProto] = {}
        self._comments: dict[str, str] = {}
        for file in files.file:
            comments = {
                tuple(location.path): " ".join(location.leading_comments.split())
                for location in file.source_code_info.location
            }
            for i, message in enumerate(file.message_type):
                name = f".{file.package}.{message.name}"
                self.messages[name] = message
                for j, field in enumerate(message.field):
                    self._comments[f"{name}.{field.name}"] = comments.get((4, i, 2, j), "")
            for i, enum in enumerate(file.enum_type):
                name = f".{file.package}.{enum.name}"
                self.enums[name] = enum
                for j, value in enumerate(enum.value):
                    self._comments[f"{name}.{value.name}"] = comments.get((5, i, 2, j), "")

    @classmethod
    def compile(cls) -> Schema:
        """The schema of the present protos."""
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "tandem.binpb"
            Contract().compile(image, source_info=True)
            return cls(descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()))

    def objective_comment(self, message: str, field: str) -> str:
        """The comment of a field of an objective's message."""
        return self._comments.get(f".tandem.trainer.v1.{message}.{field}", "")

    def groups(self, message: str, prefix: str = "") -> Iterator[Group]:
        """The settings of a message, then those of the messages inside it, in their order."""
        own, inner = [], []
        for field in self.messages[message].field:
            comment = self._comments[f"{message}.{field.name}"]
            path = prefix + field.name
            if field.type == FieldProto.TYPE_MESSAGE:
                first, *others = self.groups(field.type_name, f"{path}.")
                rows = tuple(_required(row, path, comment) for row in first.rows)
                inner += [Group(path, comment, rows), *others]
            else:
                own.append(self._row(path, field, comment))
        yield Group("", "", tuple(own))
        yield from inner

    def _row(self, path: str, field: FieldProto, comment: str) -> Row:
        kind, unset = self._type(field)
        found = _DEFAULT.search(comment)
        default = found["value"] if found else unset
        return Row(path, kind, "required" if "Required." in comment else default, comment)

    def _type(self, field: FieldProto) -> tuple[str, str]:
        """The type in words, and what the field holds when nothing sets it."""
        if field.type == FieldProto.TYPE_ENUM:
            return self._enum(field.type_name)
        kind = _SCALARS[field.type]
        if field.label == FieldProto.LABEL_REPEATED:
            return f"list of {kind}", "[]"
        return kind, "" if field.proto3_optional else _ZERO.get(kind, "")

    def _enum(self, name: str) -> tuple[str, str]:
        unset, *values = self.enums[name].value
        prefix = unset.name.removesuffix("UNSPECIFIED")
        names = [value.name.removeprefix(prefix).lower() for value in values]
        default = re.search(r"Not set: ([A-Z_]+)", self._comments[f"{name}.{unset.name}"])
        return " \\| ".join(f"`{n}`" for n in names), default[1].lower() if default else ""


def configuration_page(schema: Schema) -> str:
    """The text of docs/reference/configuration.md, before its lines are wrapped."""
    lines = [
        "# Configuration of the servers",
        "",
        "Generated from the comments of `proto/" + CONFIG_PROTO + "` by `make format`; change them"
        " there.",
        "",
        "A server takes each setting from the last of these places that has it:",
        "",
        "1. `--config FILE` (YAML); `TANDEM_CONFIG=FILE` in the environment says the same",
        "1. environment variables `TANDEM__DOTTED__KEY=value`: the key in upper case, with two"
        " underscores for each dot, for example `TANDEM__SERVER__HOST=0.0.0.0`",
        "1. arguments `dotted.key=value`, in order",
        "",
        "Variables and arguments hold YAML, for example `freeze=[model.embed_tokens.*]`. An unknown"
        " key or a value of the wrong type is an error that names the path, and the variable that"
        " it is from. Names from before the paper's terms, such as `frozen_model`, are unknown keys"
        " whose error says the new name. `--check-config` prints the resolved configuration and,"
        " as comments, the memory that it needs. `tandem up` hides `TANDEM__` variables from the"
        " servers that it starts: their cluster file has all settings.",
        "",
        "[ranks.md](../operations/ranks.md) explains servers of several processes (`ranks` in a"
        " cluster file): which layout to choose, and the environment variables that they read.",
    ]
    # One table for the servers that have the same settings.
    tables: dict[tuple[str, tuple[Row, ...]], dict[str, list[str]]] = {}
    for server in SERVERS:
        name = server.lower()
        for group in schema.groups(f".tandem.config.v1.{server}ServerConfig"):
            key = (group.title or f"tandem-{name}-server", group.rows)
            tables.setdefault(key, {}).setdefault(group.meaning, []).append(name)
    for title, rows in sorted(tables, key=lambda key: not key[0].startswith("tandem-")):
        lines += ["", f"## `{title}`"]
        for meaning, servers in tables[title, rows].items():
            if meaning:
                lines += [f"{', '.join(servers).capitalize()}: {meaning}"]
        lines += ["", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for row in rows:
            default = row.default if row.default in ("", "required") else f"`{row.default}`"
            meaning = row.meaning.replace("|", "\\|")
            lines.append(f"| `{row.path}` | {row.type} | {default} | {meaning} |")
    lines += [
        "",
        "## Flat names",
        "",
        "The paper's code has no sections for the two models. A rollout server also takes that"
        " code's flat names, in its file, in variables and in arguments. A file, or the"
        " environment, with both names of a setting is refused. An error of the start names the"
        " setting as it was written.",
        "",
        "| flat name | setting |",
        "|---|---|",
        *(f"| `{flat}` | `{nested}` |" for nested, flat in flat_names(FLAT.read_text()).items()),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Reason:
    """One entry of error_reasons.h."""

    name: str
    meaning: str
    remedy: str


def reasons(header: str) -> list[Reason]:
    """The reasons of the header, in its order."""
    found = []
    for body in re.findall(r"inline constexpr ErrorReason \w+\{(.*?)\};", header, re.S):
        texts = []
        for argument in re.findall(r'(?:"(?:[^"\\]|\\.)*"\s*)+', body):
            texts.append("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', argument)))
        found.append(Reason(*texts))
    return found


def errors_page(header: str) -> str:
    """The text of docs/reference/errors.md, before its lines are wrapped."""
    lines = [
        "# Reasons of errors",
        "",
        "Generated from `common/base/errors/error_reasons.h` by `make format`; change them there.",
        "",
        "An error carries a gRPC code, a message, and where they apply details of `google.rpc`: the"
        " dotted path of the field (`BadRequest`), a delay before the next attempt (`RetryInfo`),"
        " and one of these reasons (`ErrorInfo`), on which a program may branch. The Python client"
        " raises a `tandem.errors.RpcError` with `code`, `field`, `reason`, `hint` (the last"
        " column) and `retry_after_seconds`.",
        "",
        "| reason | meaning | what to do |",
        "|---|---|---|",
    ]
    lines += [f"| `{r.name}` | {r.meaning} | {r.remedy} |" for r in reasons(header)]
    return "\n".join(lines) + "\n"


def remedies(header: str) -> str:
    """The text of remedies.json, the hints that the Python client gives by reason."""
    return json.dumps({r.name: r.remedy for r in reasons(header)}, indent=2) + "\n"


def renamed_names(header: str) -> dict[str, str]:
    """The new name of every old one in the header, in its order."""
    table = header.partition("kRenamedNames[] = {")[2].partition("\n};")[0]
    return dict(re.findall(r'\{\s*"([^"]+)",\s*"([^"]+)"\s*\}', table))


def flat_names(header: str) -> dict[str, str]:
    """The flat name of every nested one in the header, in its order."""
    table = header.partition("kFlatNames[] = {")[2].partition("\n};")[0]
    rows = re.findall(r'\{"([^"]+)", "([^"]+)", "([^"]+)"\}', table)
    return {f"{section}.{field}": flat for flat, section, field in rows}


def wrapped(page: str) -> str:
    """The page with its lines wrapped by .mdformat.toml, as `make format` does to other pages."""
    settings = tomllib.loads((REPOSITORY / ".mdformat.toml").read_text())
    return mdformat.text(page, options=settings, extensions={"gfm", "tables"})


def pages() -> dict[Path, str]:
    """The text that each generated file should hold."""
    schema = Schema.compile()
    run_file = comments(), schema.objective_comment
    return {
        REPOSITORY / "docs/reference/configuration.md": wrapped(configuration_page(schema)),
        REPOSITORY / "docs/reference/run-file.md": wrapped(run_file_page(*run_file)),
        REPOSITORY / "docs/reference/run-file.schema.json": json_schema(*run_file),
        REPOSITORY / "docs/reference/errors.md": wrapped(errors_page(REASONS.read_text())),
        REPOSITORY / "docs/reference/api.md": wrapped(api_page()),
        REPOSITORY / "clients/python/tandem/remedies.json": remedies(REASONS.read_text()),
        REPOSITORY / "clients/python/tandem/rpc/renamed_names.json": json.dumps(
            renamed_names(RENAMED.read_text()), indent=2
        )
        + "\n",
        REPOSITORY / "clients/python/tandem/settings/flat_names.json": json.dumps(
            flat_names(FLAT.read_text()), indent=2
        )
        + "\n",
    }


def main(arguments: list[str]) -> int:
    """Runs one command of the module's docstring; returns the exit status."""
    if arguments == ["update"]:
        for path, text in pages().items():
            path.write_text(text)
        return 0
    if arguments != ["check"]:
        print(__doc__, file=sys.stderr)
        return 2
    stale = [
        path for path, text in pages().items() if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        print(f"{path.relative_to(REPOSITORY)} is stale: run `make format`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
