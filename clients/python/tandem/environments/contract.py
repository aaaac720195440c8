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
from typing import Any

import xxhash

from tandem.data.dataset import Example
from tandem.environments.tool_calls import ToolCall, typed_arguments
from tandem.errors import ConfigError
from tandem.rewards.loading import file_of, load_function
from tandem.settings.environment import EnvironmentSettings

# Public methods that are not tools.
_NOT_TOOLS = ("reset", "get_reward", "close")


# Tells messages to the junior, and returns what it answers.
AskJunior = Callable[..., str]


@dataclass(frozen=True)
class EnvironmentClass:
    """An environment, loaded and checked: a user's class, or what stands for a server.

    Attributes:
        name: as the settings have it.
        field: the setting that names it.
        make: returns a new environment.
        reset: the signature of its reset(), without `self`.
        tools: the JSON schema of each tool, by name, as chat templates take them.
        takes_junior: whether reset() gets the function `junior`.
        has_reward: whether it has get_reward().
        digest: of what defines it, a class's file; None where Python does not know the file.
        find: returns a tool of an environment by its name.
        text_argument: the tool, and its argument, that get the whole text of a turn; None where
            the models call tools.
    """

    name: str
    field: str
    make: Callable[[], Any]
    reset: inspect.Signature
    tools: Mapping[str, Mapping[str, Any]]
    has_reward: bool
    digest: str | None
    takes_junior: bool = False
    find: Callable[[Any, str], Callable[..., Any]] = getattr
    text_argument: tuple[str, str] | None = None

    @property
    def takes_seed(self) -> bool:
        """Whether reset() has a parameter `seed`."""
        return "seed" in self.reset.parameters

    @property
    def shown_tools(self) -> list[Mapping[str, Any]]:
        """The schemas of the tools that prompts show: none where text is the action."""
        return [] if self.text_argument else list(self.tools.values())

    @classmethod
    def load(cls, settings: EnvironmentSettings) -> EnvironmentClass:
        """Loads the class; raises ConfigError, which names the field, for one that does not fit."""
        field = "environment.class"
        assert settings.class_ is not None
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
        file = file_of(made)
        return cls(
            settings.class_,
            field,
            made,
            signature_without_self(made.reset),
            tools,
            "get_reward" in methods,
            xxhash.xxh3_128_hexdigest(file.read_bytes()) if file else None,
            takes_junior=settings.junior,
        )

    def arguments(
        self, row: Mapping[str, Any], seed: int, junior: AskJunior | None = None
    ) -> dict[str, Any]:
        """Returns the arguments of reset() for a row, with `seed` and `junior` if it takes them."""
        given: dict[str, Any] = {"seed": seed} if self.takes_seed else {}
        if self.takes_junior:
            given["junior"] = junior
        return {**row, **given}

    def typed(self, call: ToolCall) -> Mapping[str, Any]:
        """Returns the arguments of a call, as typed_arguments() does by the tool's schema.

        A text that is not a value of its type stays as it is, and the tool says so.
        """
        return typed_arguments(call, self.tools[call.name]["function"]["parameters"])

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ConfigError, which names the row, for one that reset() cannot be called with.

        Also for rows that are not conversations.
        """
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
            columns = frozenset(example.row)
            if columns in seen:
                continue
            seen.add(columns)
            for name in sorted(columns.intersection(self.arguments({}, 0))):
                raise ConfigError(
                    f"{self.field}: {self.name}: reset() has a parameter {name!r}, which the "
                    f"run fills, and {example.place} has a column of that name",
                    hint=f"data.columns: {{OTHER: {name}}} renames the column",
                )
            try:
                self.reset.bind(**self.arguments(example.row, 0))
            except TypeError as error:
                raise ConfigError(
                    f"{self.field}: {self.name}: reset() cannot be called for "
                    f"{example.place}, whose columns are {', '.join(example.row)}: {error}",
                    hint="`def reset(self, answer, **row)` takes the columns that it does not "
                    "name; environment.junior: true gives it the parameter `junior`",
                ) from None


def signature_without_self(method: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a bound method."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


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
