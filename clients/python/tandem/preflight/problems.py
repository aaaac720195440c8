"""The problems of a run, collected so that a user sees all of them at once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tandem.errors import ConfigError, ProblemsError, TandemError

_log = logging.getLogger(__name__)

Part = TypeVar("Part")


class Problems:
    """Collects failures, so that a user sees all of them, and gives each warning once."""

    def __init__(self, models: Iterable[Path] = ()) -> None:
        """`models` are the directories of models that the settings name.

        One that is not there is one failure, however many settings name it.
        """
        self.errors: list[TandemError] = []
        self._warned: set[str] = set()
        self._models = list(dict.fromkeys(models))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps a TandemError that its body raises."""
        try:
            yield
        except ProblemsError as several:
            self.errors.extend(several.problems)
        except TandemError as error:
            self.errors.append(error)

    def whole(self, part: Part | None) -> Part:
        """Returns a part of a run that is None only with a problem, which is raised then."""
        self.raise_any()
        if part is None:
            raise AssertionError("a part of the run is missing without a problem")
        return part

    def warn(self, text: str) -> None:
        """Warns, unless the same text was a warning before."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text)

    def raise_any(self) -> None:
        """Raises the collected failures: one as it is, several as a ProblemsError."""
        errors = self.errors
        for model in self._models:
            errors = _merged(errors, model)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ProblemsError(errors)


def _merged(errors: Sequence[TandemError], model: Path) -> list[TandemError]:
    """Returns the failures, with those about one directory of a model that lacks files as one."""
    # The directory, or a file in it.
    named = re.compile(re.escape(str(model)) + r"(/[^/\s:]+)?(?=[\s:]|$)")
    about = [one for one in errors if named.search(one.message)]
    if len(about) < 2 or any((model / one).exists() for one in ("config.json", "tokenizer.json")):
        return list(errors)
    what = "has no model" if model.is_dir() else "does not exist"
    fields = [_field(one.message, model) for one in about]
    merged = ConfigError(f"{model} {what}: {', '.join(fields)}", hint=about[0].hint)
    return [merged if one is about[0] else one for one in errors if one not in about[1:]]


def _field(message: str, model: Path) -> str:
    """Returns the dotted path of the field that a message about a model begins with."""
    named = re.match(r"((?:[\w.]+: )+)", message.partition(str(model))[0])
    return named[1].strip(": ").replace(": ", ".") if named else message
