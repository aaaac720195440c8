"""Packages that only some settings need, imported when such a setting is used."""

from __future__ import annotations

import importlib
from typing import Any

from tandem.errors import ConfigError


def optional_module(name: str, field: str, package: str | None = None) -> Any:
    """Imports and returns the module `name`.

    Raises ConfigError, which begins with `field` and has the pip command for `package` (the
    module's name by default) as its hint, if the package is not installed.
    """
    package = package or name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An installed package that lacks another module is another fault.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{field}: the package {package} is not installed", hint=f"pip install {package}"
        ) from None
