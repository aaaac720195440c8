"""Examples to train on: the prompts made of a source's rows (data_sources), and their batches."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from string import Formatter
from typing import Any, Protocol

import xxhash

from tandem.data.sources import PrepareRow, read_rows
from tandem.errors import ConfigError, ProblemsError
from tandem.models.tokenizer import NoChatTemplateError, TextCodec
from tandem.rpc.images import VisionInput, content_of, images_of
from tandem.settings.run import DataSettings

_log = logging.getLogger(__name__)


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
        response_ids: of the text to learn, for supervised training (supervised.with_responses), or
            of the chosen response of a pair (preferences.with_pairs).
        rejected_ids: of the rejected response of a pair.
        vision_inputs: the images of the prompt, in the order of their tokens.
        messages: the conversation that the chat template wrote; none for a raw prompt.
    """

    row: dict[str, Any]
    text: str
    token_ids: list[int]
    place: str = ""
    scorer: Any = None
    content: str = ""
    response_ids: Sequence[int] = ()
    rejected_ids: Sequence[int] = ()
    vision_inputs: Sequence[VisionInput] = ()
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def shown_row(self) -> dict[str, Any]:
        """The columns to record with the prompt; the images of a conversation as `images`.

        Without `entry`, which is the copy of the others that a reasoning-gym task wants.
        """
        hidden = ("prompt", "messages", "entry")
        row = {name: value for name, value in self.row.items() if name not in hidden}
        messages = self.row.get("messages")
        if self.vision_inputs and isinstance(messages, list) and "images" not in row:
            row["images"] = [_shown(image) for image in images_of(messages)]
        return row

    @property
    def shown_place(self) -> str:
        """The place without its folder: a run is the same wherever its files lie."""
        return PurePath(self.place).name

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
        """Returns `size` examples after the first `first`: a function only of (seed, first, size).

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
            raise ConfigError("data: every prompt also occurs in the evaluation data")
        return self.with_examples(left)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:

            def place(row: int) -> bytes:
                text = f"{self._seed}/{epoch}/{row}"
                return hashlib.blake2b(text.encode(), digest_size=16).digest()

            self._orders[epoch] = sorted(range(len(self.examples)), key=place)
        return self._orders[epoch]


class LearntRows(Protocol):
    """The text to learn, where a column beside the prompt does not hold it."""

    def ends_in_answer(self, row: Mapping[str, Any]) -> bool:
        """Whether the last turn of `messages`, the assistant's, is the answer.

        The prompt ends before it, and it is the row's `answer`.
        """
        ...

    def is_text(self, row: Mapping[str, Any]) -> bool:
        """Whether `text` is learnt whole: the prompt is its first token."""
        ...


def load_dataset(
    settings: DataSettings,
    codec: TextCodec,
    seed: int = 0,
    field: str = "data",
    learnt: LearntRows | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    prepare: PrepareRow | None = None,
) -> Dataset:
    """Reads the rows and writes their prompts; logs how many were too long, if any.

    `field` is where the settings stand in the file ("data", "eval.data"), and `learnt` is for
    supervised training. Conversations show the `tools`, schemas of an environment. `prepare`
    changes rows before their prompts are written.

    Raises ConfigError, which names the field, for a source that cannot be read, a bad row, a prompt
    that cannot be written or has no tokens, and with `too_long: fail` a prompt that is too long;
    ProblemsError for several, up to SHOWN_PROBLEMS, each once with the number of rows that have it.
    """
    scorer, rows = read_rows(settings, field, learnt and learnt.is_text, prepare)
    writer = _Writer(settings, codec, scorer, field, learnt, tools)
    examples: list[Example] = []
    seen: set[tuple[str, ...]] = set()
    too_long = 0
    problems = RowProblems()
    for place, row in rows:
        full = settings.limit is not None and len(examples) >= settings.limit
        if full or problems.full:
            break
        try:
            if isinstance(row, ConfigError):
                raise row
            example = writer.example(row, place)
        except NoChatTemplateError as error:
            # Every other conversation would fail in the same way.
            problems.add(ConfigError(f"{field}: {error.message}", hint=error.hint), "")
            break
        except ConfigError as error:
            problems.add(error, place)
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
                error = _too_long(example, limit, f"{field}.max_prompt_tokens", field)
                problems.add(error, place)
                continue
            if settings.too_long == "drop":
                continue
            example = replace(example, token_ids=example.token_ids[-limit:])
        examples.append(example)
    problems.raise_any()
    if too_long:
        done = {"drop": "left out", "truncate_left": "cut at the left"}[settings.too_long]
        whole = len(examples) + (too_long if settings.too_long == "drop" else 0)
        _log.info(
            f"{field}: {too_long:,} of {whole:,} prompts have more than "
            f"{settings.max_prompt_tokens:,} tokens: {done}"
        )
    if not examples:
        raise ConfigError(f"{field}: no rows" + (" that are short enough" if too_long else ""))
    writer.note_frame()
    return Dataset(examples, seed)


class RowProblems:
    """Problems of rows: each is kept once, of the first row that has it, and counted."""

    def __init__(self) -> None:
        self._errors: dict[str, ConfigError] = {}
        self._counts: dict[str, int] = {}

    def add(self, error: ConfigError, place: str) -> None:
        """Adds the error of the row at `place`."""
        key = error.message.replace(place, "") if place else error.message
        self._errors.setdefault(key, error)
        self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def full(self) -> bool:
        """Whether there are as many problems as are shown."""
        return len(self._errors) == SHOWN_PROBLEMS

    def raise_any(self) -> None:
        """Raises the problems, if there are any."""
        problems = []
        for key, error in self._errors.items():
            others = self._counts[key] - 1
            # A mistake in the settings names no row.
            if others and key != error.message:
                rows = "row" if others == 1 else "rows"
                error = ConfigError(
                    f"{error.message} (and {others:,} more {rows})", hint=error.hint
                )
            problems.append(error)
        if problems:
            raise problems[0] if len(problems) == 1 else ProblemsError(problems)


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
        f"{field}: {example.place}: the prompt has {len(example.token_ids):,} tokens, but {whose} "
        f"allows {limit:,}",
        hint=f"{field}.max_prompt_tokens with {field}.too_long: drop leaves such rows out, "
        "with truncate_left it keeps the end of their prompts",
    )


class _Writer:
    """Writes the prompts of rows."""

    def __init__(
        self,
        settings: DataSettings,
        codec: TextCodec,
        scorer: Any,
        field: str,
        learnt: LearntRows | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self._template_kwargs = settings.chat_template_kwargs | (
            {"tools": list(tools)} if tools else {}
        )
        self._settings = settings
        self._codec = codec
        self._scorer = scorer
        self._field = field
        self._learnt = learnt
        # Raw prompts, and the first of those that begin with the tokens that the tokenizer adds.
        self._framed = 0
        self._begun_twice: list[str] = []

    def example(self, row: dict[str, Any], place: str) -> Example:
        """Returns a row with its prompt; raises ConfigError, which names the row or a setting."""
        if self._learnt is not None and self._learnt.is_text(row):
            example = self._text(row, place)
        else:
            write = self._conversation if "messages" in row else self._prompt
            example = write(row, place)
        if not example.token_ids:
            raise ConfigError(
                f"{self._field}: {place}: the prompt has no tokens",
                hint="every row needs a prompt: fill it in, or remove the row",
            )
        return example

    def note_frame(self) -> None:
        """Notes what the tokenizer adds to raw prompts, where a model may not expect it."""
        if not self._framed:
            return
        hint = f"{self._field}.add_special_tokens: false leaves the prompts as they are"
        if after := self._codec.frame.after:
            texts = "".join(self._codec.token_texts(after))
            _log.warning(
                f"{self._field}: the tokenizer ends every prompt with {texts!r}, after which a "
                f"model may write nothing; {hint}"
            )
        if twice := self._begun_twice:
            texts = "".join(self._codec.token_texts(self._codec.frame.before))
            _log.warning(
                f"{self._field}: {len(twice):,} of {self._framed:,} prompts already begin with "
                f"{texts!r}, which the tokenizer adds again (the first: {twice[0]}); {hint}"
            )

    def _text(self, row: dict[str, Any], place: str) -> Example:
        """Returns a text to learn whole: every token but the first, which nothing predicts."""
        text = row["text"]
        with _named_by_row(place, self._field):
            ids = self._codec.encode(text, special=self._settings.add_special_tokens)
        return Example(row, text, ids[:1], place, self._scorer, text, response_ids=ids[1:])

    def _conversation(self, row: dict[str, Any], place: str) -> Example:
        _require_prompt(self._settings, place, self._field)
        messages = row["messages"]
        answered = bool(messages) and messages[-1].get("role") == "assistant"
        if answered and self._learnt is not None and self._learnt.ends_in_answer(row):
            row = {"answer": text_of(messages[-1].get("content"))} | row
            messages = messages[:-1]
        text = json.dumps(messages, ensure_ascii=False, default=_shown)
        content = json.dumps(messages, sort_keys=True, default=_shown)
        messages = _with_system(self._settings, messages)
        ids, inputs = self._chat(messages, place)
        if inputs:
            row = row | {"messages": json.loads(json.dumps(row["messages"], default=_shown))}
        return Example(
            row, text, ids, place, self._scorer, content, vision_inputs=inputs, messages=messages
        )

    def _prompt(self, row: dict[str, Any], place: str) -> Example:
        settings, field = self._settings, self._field
        if settings.extract is not None:
            row = row | {"prompt": _extract(settings.extract, row["prompt"], f"{field}.extract")}
        text = _fill(settings.format, row, f"{field}.format")
        content = _content(settings.format, row)
        images = _images(settings, row, f"{field}.images: {place}")
        messages: list[dict[str, Any]] = []
        if settings.template == "raw":
            if settings.system is not None:
                raise ConfigError(
                    f"{field}.system: does not apply to rows with a `prompt` under "
                    f"{field}.template: raw",
                    hint=f"{field}.template: chat applies the chat template to the prompt",
                )
            with _named_by_row(place, field):
                ids = self._encoded(text, place)
                ids, inputs = self._codec.with_images(ids, images, _folder(settings))
        else:
            asked = [{"role": "user", "content": content_of(images, text)}]
            messages = _with_system(settings, asked)
            ids, inputs = self._chat(messages, place)
        if inputs:
            row = row | {settings.images: [_shown(image) for image in images]}
        return Example(
            row, text, ids, place, self._scorer, content, vision_inputs=inputs, messages=messages
        )

    def _chat(
        self, messages: list[dict[str, Any]], place: str
    ) -> tuple[list[int], Sequence[VisionInput]]:
        with _named_by_row(place, self._field):
            return self._codec.chat_with_images(
                messages, _folder(self._settings), self._template_kwargs
            )

    def _encoded(self, text: str, place: str) -> list[int]:
        plain = self._codec.encode(text, special=False)
        # Special tokens alone are no prompt.
        if not plain or not self._settings.add_special_tokens:
            return plain
        before = list(self._codec.frame.before)
        self._framed += 1
        if before and plain[: len(before)] == before:
            self._begun_twice.append(place)
        return self._codec.encode(text)


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
                f"{field}.{name}: {place}: only applies to a `prompt`; the row has `messages`, to "
                "which the chat template is applied unchanged"
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


def text_of(content: Any) -> Any:
    """Returns the content of a message; parts that are all text as one text."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


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
