"""The fields of requests: those that are followed, ignored, and refused."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt
from pydantic_core import PydanticKnownError

from tandem.openai_server import limits
from tandem.openai_server.errors import RequestError
from tandem.openai_server.limits import MAX_TOP_LOGPROBS
from tandem.openai_server.tools import check_tools
from tandem.rpc import renamed

_log = logging.getLogger(__name__)

# Fields that do not bear on the response.
IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Fields that a rollout server cannot follow, with the values that ask for nothing. Null does, too,
# and so does an empty text or list.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Fields of chats only; /v1/completions refuses them as it does those of REFUSED.
_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "session_id": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
}

# Reasons and remedies that the error of a refused field adds.
_WHY = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "response_format": "a rollout server does not hold its answers to a grammar; ask for JSON in "
    "the messages, or give a tool with the wanted parameters",
}

# An id of a session, which is a part of paths.
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"

Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]


class Fields(BaseModel):
    """The fields of an object of a request; others are refused."""

    model_config = ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Null asks for nothing: OpenAI's clients send the nulls of answers back."""
        if not isinstance(value, Mapping):
            return value
        return {name: given for name, given in value.items() if given is not None}


def _prompt(value: Any) -> Any:
    """Checks the prompts of /v1/completions; names the first mistake alone, in whatever type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(
            "must be text, a list of texts, a list of token ids, or a list of such lists"
        )
    if not value or isinstance(value[0], int):
        _check_ids(value, "prompt")
        return value
    if len(value) > limits.MAX_CHOICES:
        raise RequestError(
            f"prompt: has {len(value)} prompts, at most {limits.MAX_CHOICES}", "prompt"
        )
    texts = isinstance(value[0], str)
    for index, one in enumerate(value):
        place = f"prompt[{index}]"
        if texts != isinstance(one, str) or not isinstance(one, str | list):
            kind = "text" if texts else "a list of token ids"
            raise RequestError(f"{place}: must be {kind}", place)
        if not texts:
            _check_ids(one, place)
    return value


def _check_ids(ids: list[Any], place: str) -> None:
    if len(ids) > limits.MAX_PROMPT_TOKENS:
        raise RequestError(
            f"{place}: has {len(ids)} ids, at most {limits.MAX_PROMPT_TOKENS}", place
        )
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            where = f"{place}[{index}]"
            raise RequestError(f"{where}: {_shown(token)} is not a token id", where)


def _stop(value: Any) -> Any:
    """Checks the texts of `stop`; names the first mistake alone."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError("must be text or a list of texts")
    if len(texts) > limits.MAX_STOPS:
        raise ValueError(f"has {len(texts)} texts, at most {limits.MAX_STOPS}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"[{index}]: {_shown(text)} is not text")
        if len(text) > limits.MAX_STOP_LENGTH:
            raise ValueError(
                f"[{index}]: has {len(text)} characters, at most {limits.MAX_STOP_LENGTH}"
            )
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _tandem(value: Any) -> Any:
    """Checks the sizes in `tandem`; its fields are those of TandemConfig."""
    for name, given in value.items() if isinstance(value, Mapping) else ():
        if isinstance(given, list) and len(given) > limits.MAX_TANDEM_LIST:
            raise ValueError(f"{name}: has {len(given)} elements, at most {limits.MAX_TANDEM_LIST}")
    return value


class StreamOptions(Fields):
    """How a stream is written."""

    include_usage: StrictBool | None = False
    # Padding against eavesdroppers; there is none on this server.
    include_obfuscation: Literal[False] | None = None


class Request(Fields):
    """The fields that both kinds of completion have."""

    model: str
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    min_p: StrictFloat | None = None
    seed: StrictInt | None = None
    stop: Annotated[Any, pydantic.BeforeValidator(_stop)] = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    # How the junior takes part: fields of TandemConfig.
    tandem: Annotated[dict[str, Any] | None, pydantic.BeforeValidator(_tandem)] = None
    # As in vLLM's API, lower comes first. The bounds are those whose negative a prompt can hold.
    priority: Annotated[StrictInt, Field(gt=-(2**31), lt=2**31)] | None = None

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end a response."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]


class CompletionRequest(Request):
    """A request to /v1/completions."""

    # A text, a list of texts, a list of token ids, or a list of such lists.
    prompt: Annotated[Any, pydantic.BeforeValidator(_prompt)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens: 0 needs echo: a response has at least one token", "max_tokens"
            )
        _check_top(self.logprobs, "logprobs")
        return self


def _image_bytes(url: Any) -> bytes:
    """Returns the bytes in a data URL."""
    if not isinstance(url, str):
        raise PydanticKnownError("string_type")
    # Fetching what a caller names would let it reach whatever this machine reaches.
    start = re.match(r"data:image/[^,]*;base64,", url)
    if start is None:
        raise ValueError("send an image as data:image/...;base64,...; URLs are not fetched")
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the image is not base64: {error}") from None


class ImageUrl(Fields):
    """An image in a data URL, of which the bytes are kept."""

    url: Annotated[bytes, pydantic.BeforeValidator(_image_bytes)]
    # The model's image processor alone decides on the size.
    detail: Literal["auto"] | None = None


# Fields of a message that chat templates know, beside role and content.
_TEMPLATE_FIELDS = frozenset(
    {"name", "reasoning_content", "reasoning", "tool_call_id", "tool_calls", "function_call"}
)
# Unknown fields of messages and parts that were warned of; a client can make up any number.
_warned: set[str] = set()
_MAX_WARNED = 64


def _warn_once(field: str, says: str) -> None:
    if field not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(field)
        _log.warning("%.100s: %s", field, says)


def _asks_for_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


class Part(Fields):
    """A part of a message: a text, a refusal, which is a text, or an image."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "refusal", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        given = {"text": self.text, "refusal": self.refusal, "image_url": self.image_url}
        if [name for name, value in given.items() if value is not None] != [self.type]:
            raise ValueError(f"a part of type {self.type} has the field {self.type}, and no other")
        for name, value in (self.model_extra or {}).items():
            if not _asks_for_nothing(value):
                _warn_once(f"messages[].content[].{name}", "is ignored")
        return self

    def record(self) -> dict[str, Any]:
        """Returns the part as chat templates read it."""
        if self.image_url is None:
            return {"type": "text", "text": self.text or self.refusal or ""}
        # As ImageProcessor.image() takes it.
        return {"type": "image", "image": {"bytes": self.image_url.url}}


def _checked_content(value: Any) -> Any:
    if isinstance(value, str | list):
        return value
    raise ValueError("must be text or a list of parts")


class ChatMessage(Fields):
    """A message of a conversation.

    Its other fields are handed to the chat template, which may know them (tool_calls) or not.
    """

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[str | list[Part] | None, pydantic.BeforeValidator(_checked_content)] = None

    def record(self) -> dict[str, Any]:
        """Returns the message as chat templates read it."""
        rest = {}
        for name, value in (self.model_extra or {}).items():
            if _asks_for_nothing(value):
                continue
            if name not in _TEMPLATE_FIELDS:
                says = "is handed to the chat template, which may ignore it"
                _warn_once(f"messages[].{name}", says)
            rest[name] = _with_arguments(value) if name == "tool_calls" else value
        return {"role": self.role, "content": self._content()} | rest

    def _content(self) -> str | list[dict[str, Any]]:
        """Returns a text where there is no image: not every template reads parts."""
        if isinstance(self.content, str):
            return self.content
        parts = self.content or []
        if all(part.image_url is None for part in parts):
            return "".join(part.record()["text"] for part in parts)
        return [part.record() for part in parts]


def _with_arguments(calls: Any) -> Any:
    """Returns calls of tools with their arguments as objects, which chat templates print.

    OpenAI's API has them as texts.
    """
    if not isinstance(calls, list):
        return calls
    return [_with_argument(call) for call in calls]


def _with_argument(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


# Arguments of the function that renders a template, which are no variables: a client must not bring
# a template of its own.
_NO_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)


def _template_variables(value: Any) -> Any:
    for name in value if isinstance(value, Mapping) else ():
        if name in _NO_VARIABLES:
            raise ValueError(f"{name}: is not a variable of a chat template")
    return value


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    # As in vLLM's API: variables of the chat template, such as enable_thinking.
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, pydantic.BeforeValidator(_template_variables)
    ] = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    # Checked by check_tools().
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: StrictBool | None = None
    # Also the header X-Session-Id.
    session_id: Annotated[str, Field(pattern=SESSION_ID)] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        shown = {"tools": self.offered_tools} if self.offered_tools else {}
        return {**(self.chat_template_kwargs or {}), **shown}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for index, message in enumerate(self.messages):
            # An answer may have had no text: a refusal, or calls of tools.
            if message.content is None and message.role != "assistant":
                place = f"messages[{index}].content"
                raise RequestError(f"{place}: is required", place)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError(
                "max_tokens: max_completion_tokens means the same; give one of them", "max_tokens"
            )
        _check_top(self.top_logprobs, "top_logprobs")
        return self


Kind = TypeVar("Kind", bound=Request)

# A JSON text with one of two surrogates; the C parser takes it alone, too.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(kind: type[Kind], body: bytes) -> Kind:
    """Returns the request in a body; raises RequestError as parse() does."""
    return parse(kind, json_of(body))


def json_of(body: bytes) -> Any:
    """Returns the value of a body; raises RequestError for one that is not Unicode JSON."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if _SURROGATE.search(body):
        _check_unicode(value)
    return value


def parse(kind: type[Kind], body: Any) -> Kind:
    """Returns the request in a JSON body; raises RequestError, which names the field at fault."""
    if not isinstance(body, Mapping):
        raise RequestError("the body is not a JSON object")
    fields = {name: value for name, value in body.items() if name not in IGNORED}
    refused = REFUSED if issubclass(kind, ChatRequest) else REFUSED | _OF_CHATS
    for name in refused.keys() & fields.keys():
        value = fields.pop(name)
        nothing = value is None or value in ("", [])
        if not nothing and value not in refused[name]:
            why = f": {_WHY[name]}" if name in _WHY else ""
            whose = "/v1/completions" if name in _OF_CHATS else "rollout servers"
            raise RequestError(
                f"{name}: not supported by {whose}{why}", name, code="unsupported_parameter"
            )
    _check_sizes(fields.get("messages"))
    if issubclass(kind, ChatRequest):
        check_tools(fields)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        # A union reports an error for each of its types; the deepest one fits furthest.
        first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise RequestError(
                f"unrecognized request argument: {param}{renamed.advice(str(first['loc'][-1]))}",
                param,
                code="unknown_parameter",
            ) from None
        where = f"{param}: " if param else ""
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{where}{message}", param) from None


def _check_sizes(messages: Any) -> None:
    """Checks the number of messages and parts, before each of them is looked at."""
    if not isinstance(messages, list):
        return
    if len(messages) > limits.MAX_MESSAGES:
        raise RequestError(
            f"messages: has {len(messages)} messages, at most {limits.MAX_MESSAGES}", "messages"
        )
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    parts = sum(len(one) for one in contents if isinstance(one, list))
    if parts > limits.MAX_PARTS:
        raise RequestError(
            f"messages: have {parts} parts of contents, at most {limits.MAX_PARTS}", "messages"
        )


def _check_unicode(value: Any) -> None:
    """Raises RequestError for a text with a lone surrogate, which is no Unicode text."""
    for where, text in texts(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            named = where or "the body"
            raise RequestError(f"{named}: is not Unicode text", where or None) from None


def texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields the texts in a JSON value, with their places."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from texts(one, f"{place}[{index}]")
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield place, name
            yield from texts(one, f"{place}.{name}" if place else name)


def _check_top(number: int | None, field: str) -> None:
    if number is not None and number > MAX_TOP_LOGPROBS:
        raise RequestError(f"{field}: {number} is more than {MAX_TOP_LOGPROBS}", field)


def _path(place: tuple[int | str, ...]) -> str | None:
    """Returns the place of a mistake, without the names of a union's types; None for the body."""
    if not place:
        return None
    head, *rest = place
    inner = [part for part in rest if isinstance(part, int) or str(part).isidentifier()]
    types = {"str", "int"}
    return str(head) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner if part not in types
    )
