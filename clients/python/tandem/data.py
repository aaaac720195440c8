"""Rows to train on: JSON lines or a reasoning-gym task, and the prompts made of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError
from tandem.settings import DataSettings
from tandem.text import TextCodec


@dataclass(frozen=True)
class Example:
    """One row with its prompt.

    Attributes:
        row: every field of the row; `prompt` is the text after `extract`.
        text: the prompt as written by `format`.
        token_ids: the prompt as the model reads it.
        scorer: the reasoning-gym data set that can judge `row["entry"]`, if there is one.
    """

    row: dict[str, Any]
    text: str
    token_ids: list[int]
    scorer: Any = None


class Dataset:
    """Examples in a fixed order, and batches of them in a shuffled one."""

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        if not examples:
            raise ConfigError("data: no rows")
        self.examples = list(examples)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, step: int, size: int) -> list[Example]:
        """The examples of a step (from 1): a function of (seed, step, size) alone.

        Every epoch is a permutation of its own: rows sorted by BLAKE2b of "<seed>/<epoch>/<row>".
        """
        first = (step - 1) * size
        places = (divmod(first + i, len(self.examples)) for i in range(size))
        return [self.examples[self._order(epoch)[place]] for epoch, place in places]

    def without(self, texts: Collection[str]) -> Dataset:
        """The data set without the examples whose prompt is among `texts`."""
        return Dataset([e for e in self.examples if e.text not in texts], self._seed)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:

            def place(row: int) -> bytes:
                text = f"{self._seed}/{epoch}/{row}"
                return hashlib.blake2b(text.encode(), digest_size=16).digest()

            self._orders[epoch] = sorted(range(len(self.examples)), key=place)
        return self._orders[epoch]


def load_dataset(settings: DataSettings, codec: TextCodec, seed: int = 0) -> Dataset:
    """Reads the rows and writes their prompts."""
    scorer = None
    rows: Iterable[dict[str, Any]]
    if settings.reasoning_gym is not None:
        scorer, rows = _reasoning_gym(settings)
    else:
        rows = _json_lines(settings)
    examples: list[Example] = []
    seen: set[str] = set()
    for row in rows:
        if settings.limit is not None and len(examples) >= settings.limit:
            break
        example = _example(row, settings, codec, scorer)
        if not (settings.unique and example.text in seen):
            examples.append(example)
        seen.add(example.text)
    return Dataset(examples, seed)


def _example(row: dict[str, Any], settings: DataSettings, codec: TextCodec, scorer: Any) -> Example:
    if "messages" in row:
        text = json.dumps(row["messages"], ensure_ascii=False)
        return Example(row, text, codec.chat(row["messages"]), scorer)
    if settings.extract is not None:
        match = re.search(settings.extract, row["prompt"])
        if match is None:
            raise ConfigError(f"data.extract: no match in the prompt {row['prompt']!r}")
        row = row | {"prompt": match[match.re.groups and 1]}
    try:
        text = settings.format.format(**row)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"data.format: {settings.format!r}: {error!r}") from None
    if settings.template == "raw":
        return Example(row, text, codec.encode(text), scorer)
    messages = [{"role": "user", "content": text}]
    if settings.system is not None:
        # An empty system message keeps the template from adding its own.
        messages.insert(0, {"role": "system", "content": settings.system})
    return Example(row, text, codec.chat(messages), scorer)


def _json_lines(settings: DataSettings) -> Iterable[dict[str, Any]]:
    path = settings.jsonl
    assert path is not None
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"data.jsonl: {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg}") from None
        if not isinstance(row, dict) or not ("prompt" in row or "messages" in row):
            raise ConfigError(f"{path}:{number}: a row needs `prompt` or `messages`")
        yield row


def _reasoning_gym(settings: DataSettings) -> tuple[Any, Iterable[dict[str, Any]]]:
    spec = settings.reasoning_gym
    assert spec is not None
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(
            "data.reasoning_gym: the package reasoning-gym is not installed",
            hint="pip install reasoning-gym",
        ) from None
    try:
        task = reasoning_gym.create_dataset(
            spec.name, size=spec.size, seed=spec.seed, **spec.config
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"data.reasoning_gym: {error}") from None
    rows = (
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry.get("metadata", {}),
            "entry": entry,
        }
        for entry in (task[index] for index in range(spec.size))
    )
    return task, rows
