"""A call of a session as a turn: what it has in common with others, and what was said before it."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import xxhash
from starlette.requests import Request as HttpRequest

from tandem.environments.template import Turns
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server.answers import answer_message
from tandem.openai_server.choices import Choice
from tandem.openai_server.conversation import message_digest
from tandem.openai_server.errors import RequestError
from tandem.openai_server.fields import SESSION_ID, ChatMessage, ChatRequest, Request
from tandem.openai_server.served import Served
from tandem.openai_server.sessions import Call

_log = logging.getLogger(__name__)

SESSION_KEY = "x-session-id"


def session_id(request: HttpRequest, asked: Request) -> str | None:
    """Returns the id of a request's session; None without one. Raises RequestError for a bad id."""
    header = request.headers.get(SESSION_KEY)
    if not isinstance(asked, ChatRequest):
        if header is not None:
            raise RequestError(
                f"{SESSION_KEY}: only calls of /v1/chat/completions have sessions",
                SESSION_KEY,
                code="unsupported_parameter",
            )
        return None
    if header is None:
        return asked.session_id
    if asked.session_id not in (None, header):
        raise RequestError(
            f"session_id: the header {SESSION_KEY} names another session", "session_id"
        )
    if not re.fullmatch(SESSION_ID, header):
        raise RequestError(
            f"{SESSION_KEY}: must be 1 to 128 letters, digits, '.', '_', ':' and '-', a letter or "
            "digit first",
            SESSION_KEY,
        )
    return header


def digest_of_settings(asked: ChatRequest, served: Served) -> str:
    """Returns a digest of what all turns of a trajectory have in common, beside the messages."""
    common = {
        "sampling": [asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.stop_texts],
        "seed": asked.seed,
        "tandem": asked.tandem,
        "template": asked.template_variables,
        "served": [served.vocabulary, served.junior, str(served.codec.directory)],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(common, sort_keys=True).encode())


def digests_of_answer(choice: Choice) -> set[str]:
    """Returns the digests that the message of an answer may have when it comes back.

    An agent may append the stop text that ended the answer, which the answer does not contain.
    """
    shown = {choice.text}
    if choice.trajectory is not None and not choice.tool_calls:
        shown.add(choice.codec.decode(choice.trajectory.response_token_ids))
    messages = [ChatMessage.model_validate(answer_message(choice, text)) for text in shown]
    return {message_digest(message.record()) for message in messages}


def turns_of(codec: TextCodec, variables: Mapping[str, Any]) -> Turns | None:
    """Returns the writer of what is said between turns; None where the template allows for none."""
    return _turns_of(codec, json.dumps(variables))


@functools.lru_cache(maxsize=16)
def _turns_of(codec: TextCodec, variables: str) -> Turns | None:
    try:
        return Turns(codec, json.loads(variables))
    except ConfigError as error:
        _log.warning("every call of a session begins a trajectory: %s", error.message)
        return None


def continued(call: Call, turns: Turns | None) -> bool:
    """Sets what was said since the last turn of a call's trajectory; whether the template can."""
    whole = call.trajectory.joined
    assert whole is not None
    if turns is None:
        return False
    messages = call.conversation.messages[len(call.trajectory.heard) + 1 :]
    try:
        said = turns.after(messages)
    except ConfigError:
        return False
    call.said = turns.missing_end(whole.response_token_ids[-1]) + said
    return True
