"""The tokens between two turns of the models: what an environment said, in the chat template.

They are the difference of two renderings of a conversation, with the next messages and without,
behind the token that ends a turn. So nothing that a model wrote is decoded and encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tandem.environments.live import Content
from tandem.environments.tool_calls import ToolCall
from tandem.errors import ConfigError
from tandem.models.tokenizer import NoChatTemplateError, TextCodec

# Mistral's templates raise for ids that are not nine letters and digits, whatever a model wrote.
_ID = re.compile(r"[A-Za-z0-9]{9}")
_NO_ID = "call00000"


class Turns:
    """Writes what an environment says between two turns, with one tokenizer and template.

    Attributes:
        end_id: the token that ends a turn of the models.
    """

    def __init__(self, codec: TextCodec, template_kwargs: Mapping[str, Any]) -> None:
        """`template_kwargs` are variables of the chat template, the tools among them.

        Raises ConfigError for a template that cannot be continued turn by turn: where a rendering
        is not the beginning of the next, or no special token ends a turn.
        """
        self._codec = codec
        self._kwargs = dict(template_kwargs)
        try:
            self._use("said")
        except ConfigError:
            # Qwen3 shows an empty thought only in the last turn, and a real one in every turn.
            with suppress(ConfigError):
                self._use("<think>\nthought\n</think>\n\nsaid")
                return
            raise

    def _use(self, words: str) -> None:
        """Takes the differences from a conversation in which the model says these words."""
        call = ToolCall(next(iter(self._tool_names()), "tool"), {"what": "this"})
        self._before = self._conversation(words, call)
        asked = self._render(self._before[:1], prompt=True)
        base = self._render(self._before, prompt=False)
        self._require_begins("a prompt", asked, base)
        self.end_id, self._end = self._end_of_turn(base[len(asked) :])
        self._cut = base.rindex(self._end) + len(self._end)
        self._turn = base[: self._cut]
        self._check(call)

    def missing_end(self, last_id: int) -> list[int]:
        """Returns the token that ends a turn, unless it is the turn's last one.

        A stop text, or another stop token, may have ended the turn.
        """
        return [] if last_id == self.end_id else [self.end_id]

    def between(self, answers: Sequence[tuple[ToolCall, Content]]) -> list[int]:
        """Returns the ids behind the token that ends a turn, up to where the next turn begins.

        `answers` are the calls of that turn with what the environment said. An image has one token.
        """
        return self.after([_message(call, said) for call, said in answers])

    def after(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns what between() does, for messages of any role but the assistant's.

        Raises ConfigError where these messages change how the turn before them is rendered.
        """
        rendered = self._render([*self._before, *messages], prompt=True)
        self._require_begins("a turn of the model", self._turn, rendered)
        text = rendered[self._cut :]
        # Encoded behind the token that ends the turn, as it stands in the conversation.
        ids = self._codec.encode(self._end + text, special=False)
        if not ids or ids[0] != self.end_id:
            raise self._unusable(f"its tokenizer does not keep {self._end!r} whole")
        return ids[1:]

    def shows_tools(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template shows the tools in a conversation."""
        without = {name: value for name, value in self._kwargs.items() if name != "tools"}
        return self._codec.chat(messages, self._kwargs) != self._codec.chat(messages, without)

    def _tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self._kwargs.get("tools") or ()]

    def _conversation(self, words: str, call: ToolCall) -> list[dict[str, Any]]:
        """Returns a user's message and a turn of the model, a call where there are tools."""
        asked = [{"role": "user", "content": "ask"}]
        if not self._tool_names():
            return [*asked, {"role": "assistant", "content": words}]
        function = {"name": call.name, "arguments": dict(call.arguments)}
        calls = [{"id": _NO_ID, "type": "function", "function": function}]
        return [*asked, {"role": "assistant", "content": words, "tool_calls": calls}]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        try:
            return self._codec.rendered(messages, self._kwargs, prompt=prompt)
        except NoChatTemplateError:
            raise
        except ConfigError as error:
            raise self._unusable(error.message) from None

    def _end_of_turn(self, turn: str) -> tuple[int, str]:
        """Returns the last special token, with its text, of a turn of the model."""
        for token in reversed(self._codec.encode(turn, special=False)):
            [text] = self._codec.token_texts([token])
            if self._codec.special_token_id(text) == token and text in turn:
                return token, text
        raise self._unusable("no special token ends a turn of the model")

    def _check(self, call: ToolCall) -> None:
        """Raises ConfigError unless a conversation up to a turn begins what may follow it."""
        answer = _message(call, "answer")
        # A user's message continues a conversation without tools.
        if not self._tool_names():
            answer = {"role": "user", "content": "answer"}
        answered = self._render([*self._before, answer], prompt=True)
        self._require_begins("a turn of the model", self._turn, answered)
        again = self._render([*self._before, answer, *self._before[1:]], prompt=False)
        self._require_begins("an answer to it", answered, again)
        if "answer" not in answered[self._cut :]:
            raise self._unusable(f"it does not show messages of the role `{answer['role']}`")
        self.after([answer])
        # Behind a second turn, as behind the first.
        twice = self._render([*self._before, answer, *self._before[1:], answer], prompt=True)
        turn = again[: again.rindex(self._end) + len(self._end)]
        if twice != turn + answered[self._cut :]:
            raise self._unusable("an answer to a second turn is rendered otherwise")

    def _require_begins(self, what: str, one: str, following: str) -> None:
        """Raises ConfigError unless a rendering is the beginning of the one that follows it."""
        if not following.startswith(one):
            raise self._unusable(f"{what} is rendered otherwise once more messages follow")

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"environment: the chat template of {self._codec.directory} cannot be continued turn "
            f"by turn: {why}",
            hint="data.chat_template_kwargs sets variables of the template, enable_thinking for "
            "example; chat_template.jinja beside the tokenizer is the template",
        )


def _message(call: ToolCall, said: Content) -> dict[str, Any]:
    """Returns an environment's answer to a call as a message of the conversation."""
    call_id = call.id if _ID.fullmatch(call.id) else _NO_ID
    return {"role": "tool", "name": call.name, "content": said, "tool_call_id": call_id}
