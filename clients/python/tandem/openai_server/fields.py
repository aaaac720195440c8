"""The fields of requests: those that are followed, ignored, and refused."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt
from pydantic_core import PydanticKnownError

from tandem import renamed
from tandem.openai_server.errors import RequestError

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

# Fields that a rollout server cannot follow, with the values that ask for nothing; null does too.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Fields):
    """How a stream is written."""

    include_usage: StrictBool | None = False
    # Padding against eavesdroppers; there is none on this server.
    include_obfuscation: Literal[False] | None = None


class Request(_Fields):
    """The fields that both kinds of completion have."""

    model: str
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    min_p: StrictFloat | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    # How the junior takes part: fields of TandemConfig.
    tandem: dict[str, Any] | None = None
    # As in vLLM's API, lower comes first. The bounds are those whose negative a prompt can hold.
    priority: Annotated[StrictInt, Field(gt=-(2**31), lt=2**31)] | None = None

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end a response."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]


class CompletionRequest(Request):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 needs echo: a response has a token", "max_tokens")
        _check_top(self.logprobs, "logprobs")
        return self


def _image_bytes(url: Any) -> bytes:
    """Returns the bytes in a data URL."""
    if not isinstance(url, str):
        raise PydanticKnownError("string_type")
    # Fetching what a caller names would let it reach whatever this machine reaches.
    start = re.match(r"data:image/[^,]*;base64,", url)
    if start is None:
        raise ValueError("an image is sent as data:image/...;base64,...; no URL is fetched")
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the image is not base64: {error}") from None


class ImageUrl(_Fields):
    """An image in a data URL, of which the bytes are kept."""

    url: Annotated[bytes, pydantic.BeforeValidator(_image_bytes)]
    # The model's image processor alone decides on the size.
    detail: Literal["auto"] | None = None


class Part(_Fields):
    """A part of a message: a text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        given = {"text": self.text, "image_url": self.image_url}
        if [name for name, value in given.items() if value is not None] != [self.type]:
            raise ValueError(f"a part of type {self.type} has the field {self.type}, and no other")
        return self

    def record(self) -> dict[str, Any]:
        """Returns the part as chat templates read it."""
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        # As ImageProcessor.image() takes it.
        return {"type": "image", "image": {"bytes": self.image_url.url}}


class ChatMessage(_Fields):
    """A message of a conversation."""

    role: str
    content: str | list[Part]
    name: str | None = None

    def record(self) -> dict[str, Any]:
        """Returns the message as chat templates read it."""
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self._content()} | name

    def _content(self) -> str | list[dict[str, Any]]:
        """Returns a text where there is no image: not every template reads parts."""
        if isinstance(self.content, str):
            return self.content
        if all(part.image_url is None for part in self.content):
            return "".join(part.text or "" for part in self.content)
        return [part.record() for part in self.content]


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError(
                "max_tokens: max_completion_tokens says the same; give one of them", "max_tokens"
            )
        _check_top(self.top_logprobs, "top_logprobs")
        return self


Kind = TypeVar("Kind", bound=Request)


def parse(kind: type[Kind], body: Any) -> Kind:
    """Returns the request in a JSON body; raises RequestError, which names the field at fault."""
    if not isinstance(body, Mapping):
        raise RequestError("the body is not a JSON object")
    fields = {name: value for name, value in body.items() if name not in IGNORED}
    for name in REFUSED.keys() & fields.keys():
        value = fields.pop(name)
        if value is not None and value not in REFUSED[name]:
            raise RequestError(
                f"{name}: a rollout server cannot do this", name, code="unsupported_parameter"
            )
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        # A union reports an error for each of its types; the deepest one fits furthest.
        first = max(error.errors(), key=lambda one: len(one["loc"]))
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise RequestError(
                f"unrecognized request argument: {param}{renamed.advice(str(first['loc'][-1]))}",
                param,
                code="unknown_parameter",
            ) from None
        where = f"{param}: " if param else ""
        raise RequestError(f"{where}{first['msg']}", param) from None


def _check_top(number: int | None, field: str) -> None:
    if number is not None and number > 1:
        raise RequestError(
            f"{field}: {number} is more than 1: a rollout server tells a token's log-probability "
            "and that of the likeliest token, no others",
            field,
            code="unsupported_parameter",
        )


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
