"""The bodies of requests: JSON, messages, and compressed messages."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any, TypeVar

import pydantic
import zstandard
from google.protobuf.message import Message

from tandem.openai_server import limits
from tandem.openai_server.errors import RequestError

# The window that every decoder of zstd should support (RFC 8878).
_WINDOW_BYTES = 8 << 20

Asked = TypeVar("Asked", bound=pydantic.BaseModel)


def parsed(kind: type[Asked], body: Any) -> Asked:
    """Returns the request in a JSON body; raises RequestError, which names the field at fault."""
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(f"{field}: {first['msg']}", field) from None


def decompressed(encoding: str, body: bytes) -> bytes:
    """Returns a body as it was before `encoding`; raises RequestError for one that is too large."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding: {encoding[:50]!r} is not zstd", "content-encoding")
    most = limits.MAX_BODY_BYTES
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        with decoder.stream_reader(io.BytesIO(body)) as it:
            plain = it.read(most + 1)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}", "content-encoding") from None
    if len(plain) > most:
        raise RequestError(f"the body has more than {most} bytes once it is decompressed")
    return plain


def digest(asked: pydantic.BaseModel | Message) -> str:
    """Returns the digest of a request: that of two that ask for the same is the same."""
    if isinstance(asked, Message):
        content = asked.SerializeToString(deterministic=True)
    else:
        content = json.dumps(asked.model_dump(mode="json"), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()
