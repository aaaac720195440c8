"""Rows to train on: JSON lines or a reasoning-gym task, and the prompts made of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

from tandem.errors import ConfigError
from tandem.settings import DataSettings, ReasoningGymSettings
from tandem.text import TextCodec
from tandem.text_files import decoded, json_object, read_bytes


@dataclass(frozen=True)
class Example:
    """One row with its prompt.

    Attributes:
        row: every field of the row; `prompt` is the text after `extract`.
        text: the prompt as written by `format`.
        token_ids: the prompt as the model reads it.
        place: where the row stands: FILE:LINE, or TASK[INDEX].
        scorer: the reasoning-gym data set that can judge `row["entry"]`, if there is one.
        content: what the prompt is made of, before `format`, as JSON; "" if that is not known.
    """

    row: dict[str, Any]
    text: str
    token_ids: list[int]
    place: str = ""
    scorer: Any = None
    content: str = ""

    @property
    def keys(self) -> frozenset[str]:
        """The prompt before and after `format`: examples that share either ask the same."""
        return frozenset({self.content, self.text} - {""})


class Dataset:
    """Examples in a fixed order, at least one, and batches of them in a shuffled one."""

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        self.examples = list(examples)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, first: int, size: int) -> list[Example]:
        """`size` examples after the first `first`: a function of (seed, first, size) alone.

        Every epoch is a permutation of its own: rows sorted by BLAKE2b of "<seed>/<epoch>/<row>".
        """
        places = (divmod(first + i, len(self.examples)) for i in range(size))
        return [self.examples[self._order(epoch)[place]] for epoch, place in places]

    def require_prompts_below(self, tokens: int, field: str = "data") -> None:
        """Raises ConfigError, which names the row, for a prompt of `tokens` tokens or more."""
        for example in self.examples:
            if len(example.token_ids) >= tokens:
                raise _too_long(example, tokens - 1, "the servers' max_model_len", field)

    def without(self, keys: Collection[str]) -> Dataset:
        """The data set without the examples that have a key among `keys`."""
        left = [example for example in self.examples if example.keys.isdisjoint(keys)]
        if not left:
            raise ConfigError("data: every prompt occurs in the evaluation data as well")
        return Dataset(left, self._seed)

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
    names the field, for a file that cannot be read, a bad row, a prompt that cannot be written, and
    one that is too long where the settings do not say what becomes of it.
    """
    scorer, rows = _rows(settings, field)
    examples: list[Example] = []
    seen: set[str] = set()
    too_long = 0
    for place, row in rows:
        if settings.limit is not None and len(examples) >= settings.limit:
            break
        example = _example(row, place, settings, codec, scorer, field)
        if settings.unique and example.text in seen:
            continue
        seen.add(example.text)
        limit = settings.max_prompt_tokens
        if limit is not None and len(example.token_ids) > limit:
            too_long += 1
            if settings.too_long == "fail":
                raise _too_long(example, limit, f"{field}.max_prompt_tokens", field)
            if settings.too_long == "drop":
                continue
            example = replace(example, token_ids=example.token_ids[-limit:])
        examples.append(example)
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


def fill(template: str, row: Mapping[str, Any], field: str) -> str:
    """`template` with the row's fields in its braces; ConfigError, naming `field`, if it cannot."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{field}: {template!r} does not fit a row with the fields {', '.join(row)}: {error!r}"
        ) from None


def _too_long(example: Example, limit: int, whose: str, field: str) -> ConfigError:
    return ConfigError(
        f"{field}: {example.place}: the prompt has {len(example.token_ids):,} tokens, "
        f"{whose} allows {limit:,}",
        hint=f"{field}.max_prompt_tokens with {field}.too_long: drop leaves such rows out, "
        "with truncate_left it keeps the end of their prompts",
    )


# A row and its place.
_Row = tuple[str, dict[str, Any]]


def _rows(settings: DataSettings, field: str) -> tuple[Any, Iterable[_Row]]:
    """The source's rows, and who judges them, if the source can."""
    if settings.reasoning_gym is not None:
        return _reasoning_gym(settings.reasoning_gym, f"{field}.reasoning_gym")
    assert settings.jsonl is not None
    return None, _json_lines(settings.jsonl, f"{field}.jsonl")


def _example(
    row: dict[str, Any],
    place: str,
    settings: DataSettings,
    codec: TextCodec,
    scorer: Any,
    field: str,
) -> Example:
    if "messages" in row:
        text = json.dumps(row["messages"], ensure_ascii=False)
        content = json.dumps(row["messages"], sort_keys=True)
        return Example(
            row, text, _chat(codec, row["messages"], place, field), place, scorer, content
        )
    if settings.extract is not None:
        row = row | {"prompt": _extract(settings.extract, row["prompt"], f"{field}.extract")}
    text = fill(settings.format, row, f"{field}.format")
    content = _content(settings.format, row)
    if settings.template == "raw":
        return Example(row, text, codec.encode(text), place, scorer, content)
    messages = [{"role": "user", "content": text}]
    if settings.system is not None:
        # An empty system message keeps the template from adding its own.
        messages.insert(0, {"role": "system", "content": settings.system})
    return Example(row, text, _chat(codec, messages, place, field), place, scorer, content)


def _chat(codec: TextCodec, messages: list[dict[str, Any]], place: str, field: str) -> list[int]:
    try:
        return codec.chat(messages)
    except ConfigError as error:
        raise ConfigError(f"{field}: {place}: {error.message}", hint=error.hint) from None


def _content(template: str, row: Mapping[str, Any]) -> str:
    """The fields of the row that the template shows; only these tell prompts apart."""
    shown = (re.match(r"[^.\[]*", field) for _, field, _, _ in Formatter().parse(template) if field)
    fields = {match[0]: row[match[0]] for match in shown if match}
    return json.dumps(fields, sort_keys=True, default=str)


def _extract(pattern: str, prompt: str, field: str) -> str:
    match = re.search(pattern, prompt)
    part = match and match[match.re.groups and 1]
    if part is None:
        raise ConfigError(f"{field}: no match in the prompt {prompt!r}")
    return part


def _json_lines(path: Path, field: str) -> Iterator[_Row]:
    data = read_bytes(path, f"{field}: {path}")
    # At line feeds alone: JSON strings may hold U+2028 and the other separators of splitlines().
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _json_row(line, f"{field}: {path}:{number}")


def _json_row(line: bytes, place: str) -> dict[str, Any]:
    row = json_object(decoded(line, place), place)
    try:
        # An escape may spell half a character ("\ud800"), which is no text.
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ConfigError(f"{place}: not Unicode text: {half!r} stands alone") from None
    if not ("prompt" in row or "messages" in row):
        raise ConfigError(f"{place}: a row needs `prompt` or `messages`")
    if "messages" not in row and not isinstance(row["prompt"], str):
        raise ConfigError(f"{place}: `prompt` must be a string")
    if "messages" in row and not _is_conversation(row["messages"]):
        raise ConfigError(
            f"{place}: `messages` must be a list of objects whose `content` is a string "
            "or a list of parts"
        )
    return row


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        # A turn that calls a tool may be without content.
        isinstance(message, dict) and isinstance(message.get("content"), str | list | None)
        for message in messages
    )


def _reasoning_gym(spec: ReasoningGymSettings, field: str) -> tuple[Any, Iterable[_Row]]:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(
            f"{field}: the package reasoning-gym is not installed",
            hint="pip install reasoning-gym",
        ) from None
    try:
        task = reasoning_gym.create_dataset(
            spec.name, size=spec.size, seed=spec.seed, **spec.config
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"{field}: {error}") from None

    def row(index: int) -> _Row:
        entry = task[index]
        return f"{spec.name}[{index}]", {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry.get("metadata", {}),
            "entry": entry,
        }

    return task, map(row, range(spec.size))
