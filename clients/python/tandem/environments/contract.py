"""The class that a run's `environment` names: TRL's contract of `environment_factory`.

A class without required arguments, with `reset(self, **row)`, whose text is appended to the last
user message. Every other public method is a tool, sync or async, described by the types of its
arguments and its docstring. `get_reward(self)`, `close(self)` and the attribute `done`, which ends
the episode once it is true, are optional.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.data.dataset import Example
from tandem.environments.tool_calls import ToolCall, typed_arguments
from tandem.errors import ConfigError
from tandem.rewards.loading import file_of, load_function
from tandem.settings.environment import EnvironmentSettings

# Public methods that are not tools.
_NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class EnvironmentClass:
    """A user's environment class, loaded and checked.

    Attributes:
        make: returns a new environment.
        tools: the JSON schema of each tool, by name, as chat templates take them.
        takes_seed: whether reset() has a parameter `seed`.
        has_reward: whether it has get_reward().
        file: the file of the class; None where Python does not know it.
    """

    name: str
    make: Callable[[], Any]
    tools: Mapping[str, Mapping[str, Any]]
    takes_seed: bool
    has_reward: bool
    file: Path | None

    @classmethod
    def load(cls, settings: EnvironmentSettings) -> EnvironmentClass:
        """Loads the class; raises ConfigError, which names the field, for one that does not fit."""
        field = "environment.class"
        made = load_function(settings.class_, settings.python_path, field)
        place = f"{field}: {settings.class_}"
        if not inspect.isclass(made):
            raise ConfigError(f"{place} is not a class")
        try:
            inspect.signature(made).bind()
        except TypeError as error:
            raise ConfigError(
                f"{place}: an environment is made without arguments: {error}",
                hint="what an episode needs comes from its row: reset(self, **row)",
            ) from None
        if not inspect.isfunction(getattr(made, "reset", None)):
            raise ConfigError(f"{place} has no method reset(self, **row)")
        methods = dict(inspect.getmembers(made, inspect.isfunction))
        tools = {
            name: _schema(method, f"{place}.{name}")
            for name, method in methods.items()
            if name not in _NOT_TOOLS and not name.startswith("_")
        }
        if not tools:
            raise ConfigError(
                f"{place} has no tool",
                hint="every public method but reset, get_reward and close is one",
            )
        return cls(
            settings.class_,
            made,
            tools,
            "seed" in inspect.signature(made.reset).parameters,
            "get_reward" in methods,
            file_of(made),
        )

    def arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns the arguments of reset() for a row, and the episode's seed if it takes one."""
        return {**row, "seed": seed} if self.takes_seed else dict(row)

    def typed(self, call: ToolCall) -> Mapping[str, Any]:
        """Returns the arguments of a call, as typed_arguments() does by the tool's schema.

        A text that is not a value of its type stays as it is, and the tool says so.
        """
        return typed_arguments(call, self.tools[call.name]["function"]["parameters"])

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError, which names the row, for one that reset() cannot be called with.

        Also for rows that are not conversations, and for rows with images.
        """
        signature = inspect.signature(self.make.reset)  # type: ignore[attr-defined]
        seen: set[frozenset[str]] = set()
        for example in examples:
            if not example.messages:
                raise ConfigError(
                    f"environment: {example.place}: the prompt is not a conversation",
                    hint="data.template: chat writes a `prompt` as one; rows with `messages` are",
                )
            if example.messages[-1].get("role") != "user":
                raise ConfigError(
                    f"environment: {example.place}: the last message is not the user's"
                )
            if example.vision_inputs:
                raise ConfigError(f"environment: {example.place}: images are not supported")
            columns = frozenset(example.row)
            if columns in seen:
                continue
            seen.add(columns)
            if self.takes_seed and "seed" in columns:
                raise ConfigError(
                    f"environment.class: {self.name}: reset() has a parameter 'seed', which the "
                    f"run fills, and {example.place} has a column of that name",
                    hint="data.columns: {OTHER: seed} renames the column",
                )
            try:
                signature.bind(None, **self.arguments(example.row, 0))
            except TypeError as error:
                raise ConfigError(
                    f"environment.class: {self.name}: reset() cannot be called for "
                    f"{example.place}, whose columns are {', '.join(example.row)}: {error}",
                    hint="`def reset(self, answer, **row)` takes the columns that it does not name",
                ) from None


def _schema(method: Callable[..., Any], place: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool; raises ConfigError for one that is not described."""
    # The import takes a second.
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        schema: dict[str, Any] = get_json_schema(method)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"{place}: the tool is not described: {error}",
            hint="a tool has types for its arguments, and a docstring with a sentence and a "
            "section `Args:` that describes each",
        ) from None
    # Its result is text to the model, whatever its type.
    schema["function"].pop("return", None)
    return schema
