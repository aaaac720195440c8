"""A section of a settings file, and the kinds of its values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tandem.models.hub import ModelName
from tandem.settings.bounds import INT32_MAX
from tandem.settings.explain import kinds_in
from tandem.settings.paths import absolute
from tandem.stores.store import StoreUrl, is_url

_HOST_PORT = re.compile(r"\S+:\d+")


def not_empty(value: Any) -> Any:
    """Returns the value; raises ValueError for empty text."""
    if value == "":
        raise ValueError("must not be empty")
    return value


def several(value: Any) -> Any:
    """Returns the value as a list: a single text becomes its only entry."""
    return [value] if isinstance(value, str) else value


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _is_address(text: str) -> str:
    if not _HOST_PORT.fullmatch(text):
        raise ValueError(f"must be HOST:PORT, not {text!r}")
    return text


def _is_frozen_model(text: str) -> str:
    if text not in ("trainer", "junior") and not _HOST_PORT.fullmatch(text):
        raise ValueError(f"must be trainer, junior or HOST:PORT, not {text!r}")
    return text


Text = Annotated[str, Field(min_length=1)]
# Path("") would be the working directory.
NonEmptyPath = Annotated[Path, BeforeValidator(not_empty), Field(strict=False)]
Pattern = Annotated[Text, AfterValidator(_is_pattern)]
# A part of a key of metrics.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
Address = Annotated[str, AfterValidator(_is_address)]
# A model whose weights stay: the trainer's own copy, the junior, or a rollout server's.
FrozenModel = Annotated[str, AfterValidator(_is_frozen_model)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


class Settings(BaseModel):
    """A section of a file.

    An unknown key, a number that is not finite and a value of another type are errors: YAML has
    told numbers, flags and text apart already.
    """

    # A key that is a word of Python (`class`) is the alias of its field.
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, strict=True, serialize_by_alias=True
    )

    # Fields with paths of checkpoints, in whose place a URL may stand.
    fetched: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Makes the relative paths among the section's raw values absolute, as seen from `base`."""
        for name, field in cls.model_fields.items():
            value = values.get(name)
            kinds = list(kinds_in(field.annotation))
            if isinstance(value, ModelName):
                continue
            if isinstance(value, str) and name in cls.fetched and is_url(value):
                values[name] = StoreUrl(value)
                continue
            if isinstance(value, str) and value and Path in kinds and value not in kinds:
                values[name] = absolute(value, base)
            elif isinstance(value, dict):
                for kind in kinds:
                    if isinstance(kind, type) and issubclass(kind, Settings):
                        kind.anchor(value, base)

    @classmethod
    def require_kind(cls, path: Path, values: dict[str, Any]) -> None:
        """Raises ConfigError for a file of another kind, which `values` come from."""

    def given(self) -> dict[str, Any]:
        """Returns the fields that have a value, ready for a message of the contract."""
        fields = self.model_dump(exclude_none=True)
        return {key: value for key, value in fields.items() if value != []}
