"""The choices in a peer's code, so that a release of the peer with new ones fails a test."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def compared_with(function: Callable[..., Any], name: str) -> set[str]:
    """The strings that the code of `function` compares the variable or attribute `name` with."""
    found: set[str] = set()
    for node in _nodes(function):
        if isinstance(node, ast.Compare) and name in (
            getattr(node.left, "attr", None),
            getattr(node.left, "id", None),
        ):
            parts = ast.walk(ast.Tuple(elts=node.comparators))
            constants = (part.value for part in parts if isinstance(part, ast.Constant))
            found |= {value for value in constants if isinstance(value, str)}
    return found


def attributes_read(function: Callable[..., Any]) -> set[str]:
    """The names of all attributes in the code of `function`."""
    return {node.attr for node in _nodes(function) if isinstance(node, ast.Attribute)}


def _nodes(function: Callable[..., Any]) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
