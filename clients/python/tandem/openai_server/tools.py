"""Tools of a request, and the calls in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from tandem.environments.tool_calls import (
    PARSERS,
    BadCall,
    ToolCall,
    format_of,
    text_before_calls,
    typed_arguments,
)
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server import limits
from tandem.openai_server.choices import Choice
from tandem.openai_server.errors import RequestError
from tandem.settings.environment import ToolCallFormat

# OpenAI's rule.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


def check_tools(fields: Mapping[str, Any]) -> None:
    """Raises RequestError for tools, or a choice of them, that the server cannot follow."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise RequestError("tools: must be a list", "tools")
    if len(tools) > limits.MAX_TOOLS:
        raise RequestError(f"tools: has {len(tools)} tools, at most {limits.MAX_TOOLS}", "tools")
    names = [_name_of(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"tools[{index}].function.name"
            raise RequestError(f"{place}: {name!r} is the name of another tool, too", place)
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unsupported(
            "tool_choice",
            "only auto and none are supported: a rollout server does not force a call",
        )
    if tools and fields.get("parallel_tool_calls") is False:
        raise _unsupported(
            "parallel_tool_calls",
            "false is not supported: a rollout server does not bound the calls of an answer",
        )


def _name_of(tool: Any, place: str) -> str:
    """Returns the name of a tool, checked."""
    if not isinstance(tool, Mapping):
        raise RequestError(f"{place}: must be an object", place)
    if tool.get("type") != "function":
        raise _unsupported(f"{place}.type", "only tools of the type function are supported")
    if unknown := set(tool) - {"type", "function"}:
        raise _unsupported(f"{place}.{min(unknown)}", "not a field of a tool")
    function, place = tool.get("function"), f"{place}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{place}: must be an object", place)
    if unknown := set(function) - _FUNCTION_FIELDS:
        raise _unsupported(f"{place}.{min(unknown)}", "not a field of a function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        place = f"{place}.name"
        raise RequestError(f"{place}: must be 1 to 64 letters, digits, _ and -", place)
    for key, kind, says in (("parameters", Mapping, "an object"), ("description", str, "text")):
        if not isinstance(function.get(key), kind | None):
            raise RequestError(f"{place}.{key}: must be {says}", f"{place}.{key}")
    return name


def _unsupported(field: str, why: str) -> RequestError:
    return RequestError(f"{field}: {why}", field, code="unsupported_parameter")


@dataclass(frozen=True)
class ToolCalls:
    """Finds the calls of tools in answers, in the format that the model writes.

    Attributes:
        parameters: the JSON schema of the parameters of each tool.
    """

    format: ToolCallFormat
    parameters: Mapping[str, Any]

    @classmethod
    def of(
        cls, codec: TextCodec, given: ToolCallFormat | None, tools: Sequence[Mapping[str, Any]]
    ) -> ToolCalls:
        """Returns that of a model and tools; `given` replaces the format of its template.

        Raises RequestError for a template that names none.
        """
        functions = [tool["function"] for tool in tools]
        parameters = {one["name"]: one.get("parameters") for one in functions}
        try:
            return cls(given or format_of(codec.chat_template), parameters)
        except ConfigError as error:
            message = error.message.removeprefix("environment.tool_calls: ")
            raise RequestError(
                f"tools: {message}; --tool-calls of `tandem serve-openai` names it",
                "tools",
                code="unsupported_parameter",
            ) from None

    def find(self, choice: Choice) -> None:
        """Moves the calls of a finished choice out of its text; a text with a bad one stays."""
        ids = list(choice.ids)
        [last] = choice.codec.token_texts(ids[-1:]) or [""]
        if last and choice.codec.special_token_id(last) == ids[-1]:
            ids.pop()
        text = "".join(choice.codec.token_texts(ids))
        found = PARSERS[self.format](text)
        calls = [one for one in found if isinstance(one, ToolCall)]
        if not calls or any(isinstance(one, BadCall) for one in found):
            return
        choice.tool_calls = [
            _record(choice, index, call, typed_arguments(call, self.parameters.get(call.name)))
            for index, call in enumerate(calls)
        ]
        choice.text = text_before_calls(self.format, text)
        if choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"


def _record(
    choice: Choice, index: int, call: ToolCall, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a call as OpenAI's API shows it.

    Its id follows from the tokens, so that a request that is repeated gives it again; it has nine
    letters and digits, which is what Mistral's templates want.
    """
    written = json.dumps([*choice.prompt, *choice.ids, index])
    name = call.id or xxhash.xxh3_64_hexdigest(written.encode())[:9]
    arguments = json.dumps(values, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}
