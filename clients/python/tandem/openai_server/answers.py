"""The JSON objects of the two kinds of completion: whole answers and chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.models.tokenizer import TextCodec
from tandem.openai_server.choices import Choice, TokenScore


@dataclass
class Answer:
    """The fields that all answers to one request share.

    Attributes:
        model: name of the model.
        fingerprint: names the weights that the server held when the request came.
        whole, chunk: kinds of the objects.
    """

    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    whole: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"

    def object(self, kind: str, choices: Sequence[Any], **rest: Any) -> dict[str, Any]:
        """Returns the object of a kind with these choices."""
        return {
            "id": self._id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        } | rest

    def whole_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns a finished choice."""
        raise NotImplementedError

    def first_choice(self, choice: Choice) -> dict[str, Any] | None:
        """Returns what a stream says of a choice before its text, if anything."""
        raise NotImplementedError

    def chunk_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns the next text of a choice; its end if the choice has finished."""
        raise NotImplementedError

    def logprobs(self, choice: Choice, scores: Sequence[TokenScore], echo: bool) -> Any:
        """Returns the log-probabilities of a choice: of the response, and of the prompt if `echo`.

        `scores` are those of all these tokens, but the first one of a prompt.
        """
        raise NotImplementedError


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def whole_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns a finished choice."""
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def first_choice(self, choice: Choice) -> None:
        """Returns None: a stream begins with text."""

    def chunk_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns the next text of a choice; its end if the choice has finished."""
        end = {"finish_reason": choice.finish_reason or None}
        return self.whole_choice(choice, text, logprobs) | end

    def logprobs(self, choice: Choice, scores: Sequence[TokenScore], echo: bool) -> dict[str, Any]:
        """Returns a list for each kind of number."""
        ids, starts = choice.shown()
        codec = choice.codec
        known: list[TokenScore | None] = list(scores)
        tokens, offsets, shown = codec.token_texts(ids), starts, list(ids)
        if echo:
            prompt, begins = prompt_text(choice)
            tokens = codec.token_texts(choice.prompt) + tokens
            shown = [*choice.prompt, *shown]
            offsets = begins + [len(prompt) + start for start in starts]
            known.insert(0, None)
        known = known[: len(tokens)]
        top: list[dict[str, float] | None] | None = None
        if any(one is not None and one.top is not None for one in known):
            top = [
                # The likeliest of several tokens with one text.
                one and dict(_alternatives(codec, one, number, text)[::-1]) | {text: one.own}
                for number, text, one in zip(shown, tokens, known, strict=True)
            ]
        return {
            "tokens": tokens,
            "token_logprobs": [one and one.own for one in known],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns a finished choice."""
        return {
            "index": choice.index,
            "message": answer_message(choice, text),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def first_choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the chunk that names the author."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        """Returns the next text of a choice; its end if the choice has finished."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if choice.finish_reason and choice.tool_calls:
            calls = enumerate(choice.tool_calls)
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return self._chunk(choice, delta, logprobs, choice.finish_reason or None)

    def _chunk(
        self, choice: Choice, delta: Mapping[str, Any], logprobs: Any, end: str | None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": dict(delta),
            "logprobs": logprobs,
            "finish_reason": end,
        }

    def logprobs(self, choice: Choice, scores: Sequence[TokenScore], echo: bool) -> dict[str, Any]:
        """Returns an object for each token."""
        ids, _ = choice.shown()
        content = []
        texts = choice.codec.token_texts(ids)
        for number, text, one in zip(ids, texts, scores, strict=False):
            top = [_entry(*other) for other in _alternatives(choice.codec, one, number, text)]
            content.append(_entry(text, one.own) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def answer_message(choice: Choice, text: str) -> dict[str, Any]:
    """Returns the message of a finished choice of a chat."""
    message = {"role": "assistant", "content": text, "refusal": None}
    if not choice.tool_calls:
        return message
    return message | {"content": text or None, "tool_calls": choice.tool_calls}


def prompt_text(choice: Choice) -> tuple[str, list[int]]:
    """Returns the prompt as text without special tokens, and where each of its tokens begins."""
    growing = choice.codec.growing(special=False)
    text, starts = "", []
    for token in choice.prompt:
        starts.append(len(text))
        text += growing.add(token)
    return text + growing.rest(), starts


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, int]:
    """Returns the number of tokens of a request; each prompt counts once."""
    read, written = sum(map(len, prompts)), sum(len(choice.ids) for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _alternatives(
    codec: TextCodec, score: TokenScore, token_id: int, text: str
) -> list[tuple[str, float]]:
    """Returns the likeliest tokens at a place as texts, with their log-probabilities.

    `text` is that of the token that stands there: within a character, which the text of a token
    alone does not show.
    """
    return [
        (text if other == token_id else codec.token_texts([other])[0], logprob)
        for other, logprob in score.top or ()
    ]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
