"""Tokens and text: the tokenizer of a Hugging Face directory, and its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tandem.errors import ConfigError
from tandem.rpc.images import ImageProcessor, VisionInput, accepts_images, images_of
from tandem.utils.text_files import json_object, read_text, require_no_lfs_pointer

# The rollout server's bounds (kMaxStopTexts, kMaxStopTextBytes).
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
# The file that the servers read, too.
TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# Keys of tokenizer_config.json, and of special_tokens_map.json, that name special tokens.
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# Flags of an added token.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts around every text, before it and after it."""

    before: Sequence[int]
    after: Sequence[int]


# A text that every tokenizer has tokens for.
_PROBE = "a"


class NoChatTemplateError(ConfigError):
    """The tokenizer has no chat template, so it writes no conversation at all."""


class TextCodec:
    """Encodes prompts and decodes responses; the servers see only ids.

    Every method raises ConfigError, which names the directory, for a file that is damaged.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / TOKENIZER
        if not file.exists():
            raise ConfigError(
                f"tokenizer: {file} does not exist",
                hint="it is a Hugging Face directory; `tandem model import` writes one",
            )
        self.directory = directory
        self._tokenizer = _read_tokenizer(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _read_config(directory / _CONFIG)
        special = special_tokens(directory, self._config)
        if unread := _unread(special, self._tokenizer):
            raise ConfigError(
                f"tokenizer: {directory}: tokenizer.json, the only file that is read, lacks "
                f"{', '.join(map(repr, unread))}, which its other files name",
                hint=f"`tandem model import {directory} DIR` writes them into one tokenizer.json",
            )
        # As transformers does: these are whole wherever a text has them.
        known = self._tokenizer.get_added_tokens_decoder().values()
        contents = {token.content for token in known}
        self._tokenizer.add_tokens(
            [
                token
                for text, token in special.items()
                if text not in contents and self._tokenizer.token_to_id(text) is not None
            ]
        )

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token that tokenizer_config.json names; None without one."""
        token = _content(self._config.get("eos_token"))
        if not isinstance(token, str):
            raise ConfigError(f"tokenizer: {self.directory}: eos_token is not a string")
        return self._tokenizer.token_to_id(token) if token else None

    @property
    def vocabulary_size(self) -> int:
        """Number of ids that a model needs to read every token: the highest id plus 1."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    @cached_property
    def vocabulary_digest(self) -> str:
        """Digest of the vocabulary, as in tandem.types.v1.ModelInfo."""
        import xxhash

        digest = xxhash.xxh3_128()
        for token, number in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{number} {token}\n".encode())
        return digest.hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the ids of a text; `special` adds the tokens that frame every text."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:
            # A Python string may hold a lone surrogate, which no tokenizer takes.
            raise ConfigError(
                f"tokenizer: {self.directory}: {text!r} is not Unicode text"
            ) from None

    @cached_property
    def frame(self) -> Frame:
        """The special tokens that encode() puts around a text."""
        encoded = self._tokenizer.encode(_PROBE)
        mask = encoded.special_tokens_mask
        if 0 not in mask:
            return Frame((), ())
        first, last = mask.index(0), len(mask) - mask[::-1].index(0)
        return Frame(encoded.ids[:first], encoded.ids[last:])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each id adds, special tokens too; joined it is the whole text."""
        growing = self.growing()
        texts = [growing.add(token) for token in ids]
        if texts:
            texts[-1] += growing.rest()
        return texts

    def growing(self, *, special: bool = True) -> GrowingText:
        """Returns a text that grows by ids that come one by one; `special` shows special tokens."""
        return GrowingText(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=not special))

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of the special token with this name; None if there is none."""
        try:
            token = self._tokenizer.token_to_id(text)
        except UnicodeEncodeError:  # A lone surrogate names no token.
            return None
        added = self._tokenizer.get_added_tokens_decoder().get(token) if token is not None else None
        return token if added is not None and added.special else None

    def stops(self, texts: Sequence[str], field: str) -> dict[str, list[Any]]:
        """Returns the fields of SamplingParams by which these texts end a response.

        The name of a special token is that token, which is no part of the text; a server finds
        every other text, over however many tokens it stretches. Raises ConfigError, which begins
        with `field`, for texts beyond the server's bounds.
        """
        ids = {text: self.special_token_id(text) for text in texts}
        stop = [text for text, token in ids.items() if token is None]
        if len(stop) > MAX_STOP_TEXTS:
            raise ConfigError(
                f"{field}: has {len(stop)} texts; a server accepts at most {MAX_STOP_TEXTS}"
            )
        for text in stop:
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise ConfigError(f"{field}: {text!r} is not Unicode text") from None
            if not 0 < size <= MAX_STOP_TEXT_BYTES:
                raise ConfigError(
                    f"{field}: {text[:40]!r} has {size} bytes; a server accepts 1 to "
                    f"{MAX_STOP_TEXT_BYTES}"
                )
        named = sorted(token for token in ids.values() if token is not None)
        return {"stop_token_ids": named, "stop": stop}

    def ids_ending_with(self, text: str) -> list[int]:
        """Returns the ids of the tokens whose own text ends with `text`; never special tokens."""
        ids = range(self.vocabulary_size)
        own = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=True)
        return [token for token, its in zip(ids, own, strict=True) if its.endswith(text)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation in the chat template, up to where the answer begins.

        A last message of the assistant's is the beginning of the answer, which goes on there.
        `template_kwargs` are variables of the template. Raises NoChatTemplateError without one.
        """
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        text = self.rendered(
            messages, template_kwargs, prompt=not continues, continue_final_message=continues
        )
        return self.encode(text, special=False)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        """Returns a conversation in the chat template, as text; `prompt` begins an answer.

        Raises what chat() raises.
        """
        try:
            text: str = self._renderer.apply_chat_template(
                list(messages),
                add_generation_prompt=prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except ConfigError:
            raise
        # Rendering a model's template may raise anything, a TypeError for example.
        except Exception as error:
            raise ConfigError(
                f"tokenizer: chat template of {self.directory}: {type(error).__name__}: {error}"
            ) from None
        return text

    @property
    def chat_template(self) -> str:
        """The text of the chat template; raises NoChatTemplateError without one."""
        return str(self._renderer.chat_template)

    @cached_property
    def images(self) -> ImageProcessor:
        """The image processor of the directory; raises ConfigError for a model without one."""
        return ImageProcessor(self.directory)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model of the directory accepts images; False without a config.json."""
        return accepts_images(self.directory)

    def chat_with_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        folder: str | Path = "",
        template_kwargs: Mapping[str, Any] | None = None,
        longest: int | None = None,
    ) -> tuple[list[int], list[VisionInput]]:
        """Returns the ids of a conversation, as chat() does, and the images of its contents.

        A content may be a list of parts: {"type": "text", "text": ...} and {"type": "image",
        "image": ...}, with an image as ImageProcessor.image() takes it. Every image has as many
        tokens as it has rows. Relative paths begin at `folder`. Images that would make the prompt
        longer than `longest` are refused before their pixels are read.
        """
        ids = self.chat(messages, template_kwargs)
        return self.with_images(ids, images_of(messages), folder, longest)

    def with_images(
        self,
        ids: list[int],
        images: Sequence[Any],
        folder: str | Path = "",
        longest: int | None = None,
    ) -> tuple[list[int], list[VisionInput]]:
        """Returns the ids of a prompt with one token for each image, expanded, and its images.

        Images, `folder` and `longest` as in chat_with_images().
        """
        if not images:
            return ids, []
        room = None if longest is None else longest - (len(ids) - len(images))
        inputs = self.images.images(images, folder, room)
        return self.images.expand(ids, inputs), inputs

    @cached_property
    def _renderer(self) -> Any:
        """The tokenizer of transformers, for whose rendering chat templates are written."""
        # The import takes a second, and raw prompts do not need it.
        from transformers import PreTrainedTokenizerFast

        renderer = PreTrainedTokenizerFast.from_pretrained(self.directory, local_files_only=True)
        if renderer.chat_template is None:
            raise NoChatTemplateError(
                f"tokenizer: {self.directory} has no chat template, which `messages` and "
                "`template: chat` need",
                hint="choose a model that has one (instruction-tuned models do), or give rows a "
                "`prompt` and use `template: raw`",
            )
        return renderer


class GrowingText:
    """A text that is decoded id by id."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Ids whose text was told last, and ids that wait for the rest of their character.
        self._ids: list[int] = []
        self._told_ids = self._told = 0

    def add(self, token: int) -> str:
        """Returns the text that the id adds; "" while a character lacks bytes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # An incomplete character decodes as U+FFFD: wait for its other bytes.
        return "" if text.endswith("\ufffd") else self._tell(text)

    def rest(self) -> str:
        """Returns the text of the ids that still wait."""
        return self._tell(self._decode(self._ids))

    def _tell(self, text: str) -> str:
        added = text[self._told :]
        # Only the last ids are decoded again, so that a token of a long text costs no more.
        self._ids = self._ids[self._told_ids :]
        self._told_ids, self._told = len(self._ids), len(self._decode(self._ids))
        return added


def unread_tokens(directory: Path) -> list[str]:
    """Returns the tokens that a directory's files name, and tokenizer.json does not have.

    transformers adds them to the vocabulary; the servers know only the tokens of tokenizer.json.
    """
    special = special_tokens(directory, _read_config(directory / _CONFIG))
    return _unread(special, _read_tokenizer(directory / TOKENIZER))


def special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Returns the added tokens that the files beside tokenizer.json name, by their texts.

    `config` is tokenizer_config.json.
    """
    named = [config.get(key) for key in _NAMED_TOKENS]
    listed = [config.get(key) for key in _LISTED_TOKENS]
    numbered = config.get("added_tokens_decoder")
    plain: Iterable[str] = ()
    if not isinstance(numbered, dict):
        # transformers reads these files of earlier versions in its place.
        numbered = {}
        older = _read_config(directory / "special_tokens_map.json")
        named += [older.get(key) for key in _NAMED_TOKENS]
        listed += [older.get(key) for key in _LISTED_TOKENS]
        plain = _read_config(directory / "added_tokens.json")
    for several in listed:
        named += several.values() if isinstance(several, dict) else several or []
    found: dict[str, AddedToken] = {}
    for one in named:
        if isinstance(text := _content(one), str) and text:
            found[text] = AddedToken(text, special=True, normalized=False)
    for one in numbered.values():
        if isinstance(one, dict) and isinstance(text := _content(one), str) and text:
            flags = {key: bool(one[key]) for key in _FLAGS if key in one}
            found[text] = AddedToken(text, **flags | ({"special": True} if text in found else {}))
    for text in plain:
        found.setdefault(text, AddedToken(text, special=False, normalized=True))
    return found


def _unread(special: Mapping[str, AddedToken], tokenizer: Tokenizer) -> list[str]:
    return [text for text in special if tokenizer.token_to_id(text) is None]


def _content(token: Any) -> Any:
    """Returns the text of a token in tokenizer_config.json: text, or an object with `content`."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _read_tokenizer(file: Path) -> Tokenizer:
    require_no_lfs_pointer(file, f"tokenizer: {file}")
    try:
        return Tokenizer.from_file(str(file))
    # The library raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"tokenizer: {file}: {error}") from None


def _read_config(file: Path) -> dict[str, Any]:
    place = f"tokenizer: {file}"
    return json_object(read_text(file, place), place) if file.exists() else {}
