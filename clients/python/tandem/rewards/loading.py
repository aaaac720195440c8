"""Loads the reward function that the settings name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError


def load_function(name: str, folder: Path, field: str) -> Callable[..., Any]:
    """Returns the function that "module:function" or "path/file.py:function" names.

    Imports find what is installed, then what lies in `folder` and beside the file. Raises
    ConfigError, which begins with `field`, for a function that is not there.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{field}: {name!r} is not one of exact_match, reasoning_gym, none, "
            "module:function, path/file.py:function"
        )
    file = folder / source if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{field}: {file} does not exist")
    folders = [folder] if file is None else [folder, file.parent]
    # The folders come last, so that nothing in them hides an installed module.
    sys.path += [path for path in map(str, map(Path.resolve, folders)) if path not in sys.path]
    try:
        module = importlib.import_module(source) if file is None else _run(file)
        function = getattr(module, attribute, None)
    # Importing a user's file may raise anything, a SyntaxError for example.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{field}: {name}: {type(error).__name__}: {error}",
            hint=None
            if file
            else f"modules are looked up among the installed ones and in {folder}",
        ) from error
    if not callable(function):
        raise ConfigError(f"{field}: {source} has no function {attribute!r}")
    return function


def file_of(function: Callable[..., Any]) -> Path | None:
    """Returns the file that defines a function, or the type of a callable object.

    None where Python does not know the file.
    """
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        module = sys.modules.get(type(function).__module__)
        source = getattr(module, "__file__", None)
    return Path(source) if source else None


class _Source(SourceFileLoader):
    """Compiles a file anew each time.

    Python takes compiled code for that of a file with the same size and the same second of change:
    of two versions written within a second it would run the first.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Has no answer, so that compiled code is neither read nor written."""
        raise OSError


def _run(file: Path) -> ModuleType:
    """Imports a file as a module."""
    name = _module_name(file)
    spec = importlib.util.spec_from_file_location(name, file, loader=_Source(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle, for example, look a class's module up by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _module_name(file: Path) -> str:
    """Returns a name for the file's module that no import statement can mean."""
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()
    return f"reward file {digest}"
