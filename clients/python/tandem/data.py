"""Examples to train on: the prompts made of a source's rows (data_sources), and their batches."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

import xxhash

from tandem.data_sources import read_rows
from tandem.errors import ConfigError, ProblemsError
from tandem.images import VisionInput, content_of
from tandem.settings import DataSettings
from tandem.text import NoChatTemplateError, TextCodec

# Bad rows that one error names.
SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Example:
    """One row with its prompt.

    Attributes:
        row: every column of the row; `prompt` is the text after `extract`.
        text: the prompt as written by `format`.
        token_ids: the ids of the prompt that the model reads.
        place: where the row stands (data_sources.PlacedRow).
        scorer: the reasoning-gym data set that judges `row["entry"]`; None for other sources.
        content: the columns that `format` shows, as JSON; "" if they are not known.
        response_ids: of the text to learn, for supervised training (supervised.with_responses).
        vision_inputs: the images of the prompt, in the order of their tokens.
    """

    row: dict[str, Any]
    text: str
    token_ids: list[int]
    place: str = ""
    scorer: Any = None
    content: str = ""
    response_ids: Sequence[int] = ()
    vision_inputs: Sequence[VisionInput] = ()

    @property
    def shown_columns(self) -> list[str]:
        """The columns to record beside the prompt.

        Without `entry`, which is the copy of the others that a reasoning-gym task wants.
        """
        return [name for name in self.row if name not in ("prompt", "messages", "entry")]

    @property
    def keys(self) -> frozenset[str]:
        """The prompt before and after `format`, with its images; who shares a key asks the same."""
        images = "".join(one.digest for one in self.vision_inputs)
        return frozenset(text + images for text in (self.content, self.text) if text)

    @property
    def identity(self) -> tuple[str, ...]:
        """The prompt as the model reads it: its text and the digests of its images."""
        return (self.text, *(one.digest for one in self.vision_inputs))


class Dataset:
    """Examples in a fixed order, at least one, and batches of them in a shuffled one."""

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        self.examples = list(examples)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, first: int, size: int) -> list[Example]:
        """Returns `size` examples after the first `first`: a function of (seed, first, size) alone.

        Every epoch is a permutation of its own: rows sorted by BLAKE2b of "<seed>/<epoch>/<row>".
        """
        places = (divmod(first + i, len(self.examples)) for i in range(size))
        return [self.examples[self._order(epoch)[place]] for epoch, place in places]

    def require_prompts_below(self, tokens: int, field: str = "data") -> None:
        """Raises ConfigError, which names the row, for a prompt of `tokens` tokens or more."""
        for example in self.examples:
            if len(example.token_ids) >= tokens:
                raise _too_long(example, tokens - 1, "the servers' max_model_len", field)

    def with_examples(self, examples: Sequence[Example]) -> Dataset:
        """Returns a data set of other examples whose batches are drawn in the same way."""
        return Dataset(examples, self._seed)

    def digest(self) -> str:
        """Returns the XXH3-128 of all rows and prompts in their order, 32 hexadecimal digits."""
        digest = xxhash.xxh3_128()
        for example in self.examples:
            parts = [example.row, example.token_ids]
            if example.vision_inputs:
                parts.append([one.digest for one in example.vision_inputs])
            line = json.dumps(parts, sort_keys=True, default=str)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def without(self, keys: Collection[str]) -> Dataset:
        """Returns the data set without the examples that have a key among `keys`.

        Raises ConfigError where none is left.
        """
        left = [example for example in self.examples if example.keys.isdisjoint(keys)]
        if not left:
            raise ConfigError("data: every prompt occurs in the evaluation data as well")
        return self.with_examples(left)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:

            def place(row: int) -> bytes:
                text = f"{self._seed}/{epoch}/{row}"
                return hashlib.blake2b(text.encode(), digest_size=16).digest()

            self._orders[epoch] = sorted(range(len(self.examples)), key=place)
        return self._orders[epoch]


def load_dataset(
    settings: DataSettings,
    codec: TextCodec,
    seed: int = 0,
    field: str = "data",
    note: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Reads the rows and writes their prompts; tells `note` how many were too long, if any.

    `field` is where the settings stand in the file ("data", "eval.data"). Raises ConfigError, which
    names the field, for a source that cannot be read, a bad row, a prompt that cannot be written,
    and with `too_long: fail` a prompt that is too long; ProblemsError for several rows, up to
    SHOWN_PROBLEMS.
    """
    scorer, rows = read_rows(settings, field)
    examples: list[Example] = []
    seen: set[tuple[str, ...]] = set()
    too_long = 0
    problems: list[ConfigError] = []
    for place, row in rows:
        full = settings.limit is not None and len(examples) >= settings.limit
        if full or len(problems) == SHOWN_PROBLEMS:
            break
        try:
            if isinstance(row, ConfigError):
                raise row
            example = _example(row, place, settings, codec, scorer, field)
        except NoChatTemplateError as error:
            # Every other conversation would fail in the same way.
            problems.append(ConfigError(f"{field}: {error.message}", hint=error.hint))
            break
        except ConfigError as error:
            # A mistake in the settings is the same for every row.
            if error.message not in {problem.message for problem in problems}:
                problems.append(error)
            continue
        if settings.unique and example.identity in seen:
            continue
        seen.add(example.identity)
        limit = settings.max_prompt_tokens
        if limit is not None and len(example.token_ids) > limit:
            too_long += 1
            # The end of a prompt may begin inside an image.
            if settings.too_long == "fail" or (
                settings.too_long == "truncate_left" and example.vision_inputs
            ):
                problems.append(_too_long(example, limit, f"{field}.max_prompt_tokens", field))
                continue
            if settings.too_long == "drop":
                continue
            example = replace(example, token_ids=example.token_ids[-limit:])
        examples.append(example)
    if problems:
        raise problems[0] if len(problems) == 1 else ProblemsError(problems)
    if too_long:
        done = {"drop": "left out", "truncate_left": "cut at the left"}[settings.too_long]
        whole = len(examples) + (too_long if settings.too_long == "drop" else 0)
        note(
            f"{field}: {too_long:,} of {whole:,} prompts have more than "
            f"{settings.max_prompt_tokens:,} tokens: {done}"
        )
    if not examples:
        raise ConfigError(f"{field}: no rows" + (" that are short enough" if too_long else ""))
    return Dataset(examples, seed)


def _fill(template: str, row: Mapping[str, Any], field: str) -> str:
    """Returns `template` with the row's columns in its braces.

    Raises ConfigError, which begins with `field`, where a column is missing or does not fit.
    """
    try:
        return template.format(**row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{field}: {template!r} does not fit a row with the columns {', '.join(row)}: {error!r}"
        ) from None


def _too_long(example: Example, limit: int, whose: str, field: str) -> ConfigError:
    return ConfigError(
        f"{field}: {example.place}: the prompt has {len(example.token_ids):,} tokens, "
        f"{whose} allows {limit:,}",
        hint=f"{field}.max_prompt_tokens with {field}.too_long: drop leaves such rows out, "
        "with truncate_left it keeps the end of their prompts",
    )


def _example(
    row: dict[str, Any],
    place: str,
    settings: DataSettings,
    codec: TextCodec,
    scorer: Any,
    field: str,
) -> Example:
    if "messages" in row:
        _require_prompt(settings, place, field)
        text = json.dumps(row["messages"], ensure_ascii=False, default=_shown)
        content = json.dumps(row["messages"], sort_keys=True, default=_shown)
        messages = _with_system(settings, row["messages"])
        with _named_by_row(place, field):
            ids, inputs = codec.chat_with_images(messages, _folder(settings))
        if inputs:
            row = row | {"messages": json.loads(text)}
        return Example(row, text, ids, place, scorer, content, vision_inputs=inputs)
    if settings.extract is not None:
        row = row | {"prompt": _extract(settings.extract, row["prompt"], f"{field}.extract")}
    text = _fill(settings.format, row, f"{field}.format")
    content = _content(settings.format, row)
    images = _images(settings, row, f"{field}.images: {place}")
    if settings.template == "raw":
        if settings.system is not None:
            raise ConfigError(
                f"{field}.system: rows with a `prompt` take none with {field}.template: raw",
                hint=f"{field}.template: chat writes the prompt through the chat template",
            )
        with _named_by_row(place, field):
            ids, inputs = codec.with_images(codec.encode(text), images, _folder(settings))
    else:
        asked = [{"role": "user", "content": content_of(images, text)}]
        messages = _with_system(settings, asked)
        with _named_by_row(place, field):
            ids, inputs = codec.chat_with_images(messages, _folder(settings))
    if inputs:
        row = row | {settings.images: [_shown(image) for image in images]}
    return Example(row, text, ids, place, scorer, content, vision_inputs=inputs)


def _require_prompt(settings: DataSettings, place: str, field: str) -> None:
    """Raises ConfigError for a setting that writes prompts, given a row that has `messages`."""
    default = DataSettings.model_fields["format"].default
    for name, given in (
        ("extract", settings.extract is not None),
        ("format", settings.format != default),
        ("images", settings.images is not None),
    ):
        if given:
            raise ConfigError(
                f"{field}.{name}: {place}: the row has `messages`, which go through the chat "
                "template as they are, and not a `prompt`"
            )


def _with_system(settings: DataSettings, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the system message of the settings to a conversation that begins without its own."""
    if settings.system is None or (messages and messages[0].get("role") == "system"):
        return messages
    # An empty one keeps the template from adding its own.
    return [{"role": "system", "content": settings.system}, *messages]


@contextmanager
def _named_by_row(place: str, field: str) -> Iterator[None]:
    """Names the setting and the row in the error of a prompt."""
    try:
        yield
    except NoChatTemplateError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{field}: {place}: {error.message}", hint=error.hint) from None


def _images(settings: DataSettings, row: Mapping[str, Any], place: str) -> list[Any]:
    """Returns the images of a row; none without `images`."""
    if settings.images is None:
        return []
    if settings.images not in row:
        raise ConfigError(f"{place}: the row has no {settings.images!r}; it has {', '.join(row)}")
    value = row[settings.images]
    return list(value) if isinstance(value, list | tuple) else [value]


def _folder(settings: DataSettings) -> Path:
    """Returns the folder at which paths of images begin: that of the rows."""
    source = settings.jsonl or settings.parquet
    if source is None:
        return Path()
    return Path(source) if Path(source).is_dir() else Path(source).parent


def _shown(image: Any) -> str:
    """Returns an image as records show it: its path, where it has one."""
    if isinstance(image, Mapping):
        image = image.get("path")
    return image if isinstance(image, str) else "image"


def _content(template: str, row: Mapping[str, Any]) -> str:
    """Returns the columns that the template shows, as JSON: only these tell prompts apart."""
    shown = (re.match(r"[^.\[]*", field) for _, field, _, _ in Formatter().parse(template) if field)
    fields = {match[0]: row[match[0]] for match in shown if match}
    return json.dumps(fields, sort_keys=True, default=str)


def _extract(pattern: str, prompt: str, field: str) -> str:
    match = re.search(pattern, prompt)
    found = match and match[match.re.groups and 1]
    if found is None:
        raise ConfigError(f"{field}: no match in the prompt {prompt!r}")
    return found
