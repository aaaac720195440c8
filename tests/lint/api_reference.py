"""The API reference of the Python client, written from its signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "clients/python"

# The names that scripts use, by module; None: the module's __all__. Settings are not among them:
# settings.py describes them.
SECTIONS: dict[str, tuple[str, ...] | None] = {
    "tandem": None,
    "tandem.errors": (
        "ConfigError",
        "ProblemsError",
        "CredentialsError",
        "RunDirectoryError",
        "UnsavedUpdatesError",
        "ServerStartError",
        "RpcError",
        "InvalidArgumentError",
        "NotFoundError",
        "AlreadyExistsError",
        "FailedPreconditionError",
        "OutOfRangeError",
        "ResourceExhaustedError",
        "UnavailableError",
        "DeadlineError",
        "CancelledError",
        "DataLossError",
        "NotImplementedByServerError",
        "PermissionDeniedError",
        "UnauthenticatedError",
        "ServerError",
    ),
    "tandem.session.opening": ("open_session", "check_run", "CheckedRun"),
    "tandem.session.session": ("Session",),
    "tandem.pool.rollout_pool": ("RolloutPool",),
    "tandem.pool.replicas": ("Replica", "PoolCounts"),
    "tandem.run_directory.directory": ("RunDirectory",),
    "tandem.training.loop": ("train", "train_supervised", "Loop"),
    "tandem.evaluation": ("evaluate", "Evaluation"),
    "tandem.run_directory.export": ("export_checkpoint",),
    "tandem.tracing": ("span", "use"),
}

_MEMBERS = (property, functools.cached_property, staticmethod, classmethod, types.FunctionType)

_COLUMNS = 120

_HEAD = """# The Python API

Generated from the docstrings of `clients/python/tandem` by `make format`; change them there.
[your-own-loop.md](../guides/your-own-loop.md) shows how the parts are used together.
"""


def api_page() -> str:
    """The text of docs/reference/api.md, before its lines are wrapped."""
    if str(PACKAGE) not in sys.path:
        sys.path.insert(0, str(PACKAGE))
    return "\n".join([_HEAD, *(_section(module, names) for module, names in SECTIONS.items())])


def _section(name: str, names: tuple[str, ...] | None) -> str:
    module = importlib.import_module(name)
    chosen = module.__all__ if names is None else names
    entries = (_entry(one, getattr(module, one)) for one in chosen)
    return "\n".join([f"## `{name}`\n", *entries])


def _entry(name: str, thing: Any) -> str:
    """The heading of a class or function, its docstring, and a class's methods."""
    lines = [f"### `{name}`\n"]
    if not inspect.isclass(thing):
        return "\n".join([*lines, _block(name, thing), _text(thing)])
    if _has_own_constructor(thing):
        lines.append(_block(name, thing))
    lines.append(_text(thing))
    if name.startswith("Async"):
        plain = name.removeprefix("Async")
        return "\n".join([*lines, f"Its methods are those of `{plain}`, awaited.\n"])
    members = [_member(one, member) for one, member in _members(thing)]
    if members:
        lines += ["Methods and properties:\n", *members]
    return "\n".join(lines) + "\n"


def _block(name: str, function: Any) -> str:
    """The signature in a block; a long one has a line for each parameter."""
    parameters, arrow = _parts(function)
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) > _COLUMNS:
        line = "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){arrow}"])
    return f"```text\n{line}\n```\n"


def _member(name: str, member: Any) -> str:
    if isinstance(member, property | functools.cached_property):
        return f"- `{name}`: {_inline(member)}"
    function = getattr(member, "__func__", member)
    return f"- `{name}{_signature(function, bound=True)}`: {_inline(function)}"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class and of its bases in the package, in their order."""
    seen: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("tandem.") and not _is_settings(kind):
            seen |= {
                name: member
                for name, member in vars(base).items()
                if not name.startswith("_") and isinstance(member, _MEMBERS)
            }
    yield from seen.items()


def _is_settings(kind: type) -> bool:
    return hasattr(kind, "model_fields")


def _has_own_constructor(kind: type) -> bool:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("tandem.")]
    own = dataclasses.is_dataclass(kind) or any("__init__" in vars(base) for base in bases)
    return own and not issubclass(kind, Exception) and not _is_settings(kind)


def _signature(function: Any, *, bound: bool = False) -> str:
    parameters, arrow = _parts(function, bound=bound)
    return f"({', '.join(parameters)}){arrow}"


def _parts(function: Any, *, bound: bool = False) -> tuple[list[str], str]:
    """The parameters as they are written, with defaults but without self or cls; the result."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    shown, starred = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        starred = starred or one.kind is one.VAR_POSITIONAL
        if one.annotation is not one.empty:
            text += f": {_annotation(one.annotation)}"
        if one.default is not one.empty:
            text += f" = {_default(one.default)}"
        shown.append(text)
    returned = signature.return_annotation
    arrow = "" if returned in (signature.empty, None, "None") else f" -> {_annotation(returned)}"
    return shown, arrow


def _annotation(annotation: Any) -> str:
    # Annotations are strings: the package imports annotations from __future__.
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    # The default factory of a dataclass field has no value to show.
    return "…" if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else repr(value)


def _text(thing: Any) -> str:
    """A docstring as Markdown: its sections of names become lists."""
    text = inspect.getdoc(thing) or ""
    blocks = []
    for block in text.split("\n\n"):
        head, _, rest = block.partition("\n")
        if head in ("Attributes:", "Raises:", "Args:"):
            items = re.sub(r"\n {8,}", " ", f"\n{rest}")
            listed = re.sub(r"\n {4}(\w+): ", r"\n- `\1`: ", items)
            blocks.append(f"{head}\n{listed}")
        elif block.startswith("    "):
            blocks.append(f"```python\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _inline(function: Any) -> str:
    """A docstring as the text of a list item."""
    return _text(function).rstrip().replace("\n", "\n  ")
