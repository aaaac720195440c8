"""Tokens and text: a Hugging Face tokenizer directory, and the chat template in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.errors import ConfigError
from tandem.text_files import json_object, read_text


class TextCodec:
    """Encodes prompts and decodes responses. The servers see ids alone.

    Every method raises ConfigError, which names the directory, for a file that is damaged.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"tokenizer: {file} does not exist",
                hint="it is a Hugging Face directory; `tandem model import` writes one",
            )
        self.directory = directory
        self._tokenizer = _read_tokenizer(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _read_config(directory / "tokenizer_config.json")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a response, from tokenizer_config.json."""
        token = self._config.get("eos_token") or ""
        token = token.get("content", "") if isinstance(token, dict) else token
        if not isinstance(token, str):
            raise ConfigError(f"tokenizer: {self.directory}: eos_token is not a string")
        return self._tokenizer.token_to_id(token) if token else None

    @property
    def vocabulary_size(self) -> int:
        """Ids that a model needs to read every token: one more than the highest."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    @cached_property
    def vocabulary_digest(self) -> str:
        """What tells vocabularies apart: see tandem.types.v1.ModelInfo."""
        import xxhash

        digest = xxhash.xxh3_128()
        for piece, number in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{number} {piece}\n".encode())
        return digest.hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; `special` adds what the tokenizer puts around every text."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:
            # A string of Python may hold half a character, which no tokenizer takes.
            raise ConfigError(
                f"tokenizer: {self.directory}: {text!r} is not Unicode text"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds to those before it; together they are the decoded whole."""
        growing = self.growing()
        pieces = [growing.add(token) for token in ids]
        if pieces:
            pieces[-1] += growing.rest()
        return pieces

    def growing(self) -> GrowingText:
        """The text, special tokens too, of ids that come one by one."""
        return GrowingText(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_id(self, text: str) -> int | None:
        """The id of a text that is one token; None for any other."""
        ids = self.encode(text, special=False)
        return ids[0] if len(ids) == 1 else None

    def ids_ending_with(self, text: str) -> list[int]:
        """Ids of the tokens whose own text ends with this one; special tokens have none."""
        ids = range(self.vocabulary_size)
        own = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=True)
        return [token for token, its in zip(ids, own, strict=True) if its.endswith(text)]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation through the directory's chat template, ready for the answer."""
        try:
            text = self._renderer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except ConfigError:
            raise
        # The template is the model's: rendering it may raise anything, a TypeError for example.
        except Exception as error:
            raise ConfigError(
                f"tokenizer: chat template of {self.directory}: {type(error).__name__}: {error}"
            ) from None
        return self.encode(text, special=False)

    @cached_property
    def _renderer(self) -> Any:
        """The tokenizer of transformers, whose rendering chat templates are written for."""
        # It takes a second to import, and raw prompts do without.
        from transformers import PreTrainedTokenizerFast

        renderer = PreTrainedTokenizerFast.from_pretrained(self.directory, local_files_only=True)
        if renderer.chat_template is None:
            raise ConfigError(
                f"tokenizer: {self.directory} has no chat template", hint="use template: raw"
            )
        return renderer


class GrowingText:
    """What each of a sequence of ids adds to the text."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The ids of the last piece, and those that wait for the rest of their character.
        self._ids: list[int] = []
        self._told_ids = self._told = 0

    def add(self, token: int) -> str:
        """The text that the id adds; "" while a character lacks bytes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # Bytes of a character that is not complete show as U+FFFD: wait for the rest.
        return "" if text.endswith("\ufffd") else self._tell(text)

    def rest(self) -> str:
        """What was waited for and did not come."""
        return self._tell(self._decode(self._ids))

    def _tell(self, text: str) -> str:
        piece = text[self._told :]
        # A piece depends on no id before the last one's: a long text costs no more by the token.
        self._ids = self._ids[self._told_ids :]
        self._told_ids, self._told = len(self._ids), len(self._decode(self._ids))
        return piece


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    # It raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"tokenizer: {file}: {error}") from None


def _read_config(file: Path) -> dict[str, Any]:
    place = f"tokenizer: {file}"
    return json_object(read_text(file, place), place) if file.exists() else {}
