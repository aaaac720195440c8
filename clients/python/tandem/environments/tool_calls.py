"""The calls of tools in a model's text, in the formats that models are trained to write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ConfigError
from tandem.settings.environment import ToolCallFormat


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for.

    Attributes:
        id: what the model named the call; "" without a name.
        in_text: whether the arguments are texts, as XML has them, whose types the tool knows.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    in_text: bool = False


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read; `why` is told to the model."""

    why: str


Found = ToolCall | BadCall

# <tool_call> up to its end, or to the next one or the end of the text where nothing closes it.
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# The inside of a call in XML, and an argument.
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LLAMA3 = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"
# A call of Mistral's newer models, behind the mark.
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", re.DOTALL)


def hermes(text: str) -> list[Found]:
    """Returns the calls of Hermes and Qwen: <tool_call>{"name", "arguments"}</tool_call>, each."""
    return [
        _call(body, ("arguments",)) if end else BadCall("<tool_call> is not closed")
        for body, end in _HERMES.findall(text)
    ]


def qwen_xml(text: str) -> list[Found]:
    """Returns the calls of Qwen3.5 and Nemotron 3: <function=NAME> in the marks of Hermes, each.

    Its arguments are <parameter=NAME>VALUE</parameter>.
    """
    calls: list[Found] = []
    for body, end in _HERMES.findall(text):
        function = _FUNCTION.fullmatch(body)
        if not end:
            calls.append(BadCall("<tool_call> is not closed"))
        elif function is None:
            calls.append(BadCall("the call is not <function=NAME>…</function>"))
        else:
            name, inside = function.groups()
            calls.append(ToolCall(name, dict(_PARAMETER.findall(inside)), in_text=True))
    return calls


def llama3(text: str) -> list[Found]:
    """Returns the calls of Llama 3: {"name", "parameters"}, with <|python_tag|> or without."""
    _, tag, body = text.rpartition(_LLAMA3)
    body = body.strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return []
    return [_call(one, ("parameters", "arguments")) for one in _separate(body)]


def mistral(text: str) -> list[Found]:
    """Returns the calls of Mistral: [TOOL_CALLS] [{"name", "arguments", "id"}, …].

    Its newer models write [TOOL_CALLS]NAME[ARGS]{…}, each, or NAME[CALL_ID]ID[ARGS]{…}.
    """
    _, tag, body = text.partition(_MISTRAL)
    if not tag:
        return []
    if not body.lstrip().startswith(("[", "{")):
        return [_named(one) for one in body.split(_MISTRAL)]
    try:
        calls = json.loads(body)
    except ValueError as error:
        return [BadCall(f"what follows {_MISTRAL} is not JSON: {error}")]
    if not isinstance(calls, list):
        return [BadCall(f"what follows {_MISTRAL} is not a list")]
    return [_read(one, ("arguments",)) for one in calls]


def _named(text: str) -> Found:
    """Returns the call of a name and arguments."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return BadCall(f"what follows {_MISTRAL} is neither a list nor NAME[ARGS]{{…}}")
    name, call_id, arguments = found.groups()
    try:
        given = json.loads(arguments)
    except ValueError as error:
        return BadCall(f"the arguments of {name} are not JSON: {error}")
    return _read({"name": name, "arguments": given, "id": call_id}, ("arguments",))


PARSERS: Mapping[ToolCallFormat, Callable[[str], list[Found]]] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama3": llama3,
    "mistral": mistral,
}
# Marks of each format in chat templates. XML comes first: its templates have Hermes' mark, too.
_SIGNS: Mapping[ToolCallFormat, str] = {
    "qwen_xml": "<function=",
    "hermes": "<tool_call>",
    "mistral": _MISTRAL,
    "llama3": _LLAMA3,
}


# A mark of GLM-4.5's template, whose calls are other XML between the marks of Hermes.
_GLM = "<arg_key>"


def typed_arguments(call: ToolCall, parameters: Any) -> Mapping[str, Any]:
    """Returns the arguments of a call; texts of XML become values of the types in a JSON schema.

    A text that is not such a value, or of a type that is not known, stays as it is.
    """
    if not call.in_text:
        return call.arguments
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    return {
        name: text if _is_text(schemas.get(name)) else _value(text)
        for name, text in call.arguments.items()
    }


def _is_text(schema: Any) -> bool:
    """Whether an argument is text, or of a type that is not known."""
    types = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    return "string" in ([types] if isinstance(types, str) else types)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def text_before_calls(name: ToolCallFormat, text: str) -> str:
    """Returns what a model wrote before its calls; nothing where the calls are all of the text."""
    # A call in XML stands between the marks of Hermes.
    before, sign, _ = text.partition(_SIGNS["hermes" if name == "qwen_xml" else name])
    return before.rstrip() if sign else ""


def format_of(template: str) -> ToolCallFormat:
    """Returns the format that a chat template names; raises ConfigError if it names none."""
    if _GLM in template:
        raise ConfigError(
            "environment.tool_calls: the chat template has calls as GLM writes them, which are not "
            "read"
        )
    for name, sign in _SIGNS.items():
        if sign in template:
            return name
    # Llama 3's template has calls as bare JSON.
    if '"parameters"' in template and "ipython" in template:
        return "llama3"
    raise ConfigError(
        "environment.tool_calls: the chat template names no format of tool calls that is known",
        hint=f"set it to the one that the model writes: {', '.join(PARSERS)}",
    )


def _separate(body: str) -> list[str]:
    """Returns the JSON objects of a text that stand one behind the other, between them ";".

    The last entry is what cannot be read, if there is such a rest.
    """
    decoder, parts, place = json.JSONDecoder(), [], 0
    while place < len(body):
        try:
            _, end = decoder.raw_decode(body, place)
        except ValueError:
            return [*parts, body[place:]]
        parts.append(body[place:end])
        place = end + len(body[end:]) - len(body[end:].lstrip("; \n\t"))
    return parts or [body]


def _call(text: str, keys: tuple[str, ...]) -> Found:
    try:
        return _read(json.loads(text), keys)
    except ValueError as error:
        return BadCall(f"the call is not JSON: {error}")


def _read(value: Any, keys: tuple[str, ...]) -> Found:
    """Returns the call in a JSON value; its arguments have one of `keys`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('the call is not an object with a "name"')
    arguments = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return BadCall(f'"{keys[0]}" is not an object')
    name = value.get("id")
    return ToolCall(value["name"], arguments, name if isinstance(name, str) else "")
