"""Tokens and text: a Hugging Face tokenizer directory, and the chat template in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.exceptions
import jinja2.sandbox
from tokenizers import Tokenizer

from tandem.errors import ConfigError


class TextCodec:
    """Encodes prompts and decodes responses. The servers see ids alone."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"tokenizer: {file} does not exist",
                hint="it is a Hugging Face directory; `tandem model import` writes one",
            )
        self.directory = directory
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _read_json(directory / "tokenizer_config.json")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a response, from tokenizer_config.json."""
        token = self._config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(token) if token else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; `special` adds what the tokenizer puts around every text."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds to those before it; together they are the decoded whole."""
        pieces, done = [], ""
        for end in range(1, len(ids) + 1):
            text = self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
            # Bytes of a character that is not complete show as U+FFFD: wait for the rest.
            if text.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(text[len(done) :])
            done = text
        return pieces

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation through the directory's chat template, ready for the answer."""
        try:
            text = self._chat_template().render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._special("bos_token"),
                eos_token=self._special("eos_token"),
            )
        except jinja2.exceptions.TemplateError as error:
            raise ConfigError(f"chat template of {self.directory}: {error}") from None
        return self.encode(text, special=False)

    def _special(self, name: str) -> str:
        token = self._config.get(name) or ""
        return token.get("content", "") if isinstance(token, dict) else token

    def _chat_template(self) -> jinja2.Template:
        file = self.directory / "chat_template.jinja"
        source = file.read_text() if file.exists() else self._config.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(
                f"tokenizer: {self.directory} has no chat template", hint="use template: raw"
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        return environment.from_string(source)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
