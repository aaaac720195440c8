"""The responses of supervised training: the texts to learn, made of the columns of the rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

from tandem.data.dataset import Dataset, Example, RowProblems
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.settings.run import SftSettings

# The default of `sft.response`.
_ANSWER = "{answer}"


class LearntRows:
    """What of the rows of supervised training is learnt, as data.LearntRows says."""

    def __init__(self, settings: SftSettings) -> None:
        self._default = settings.response == _ANSWER
        self._names_messages = "messages" in _columns(settings.response)

    def ends_in_answer(self, row: Mapping[str, Any]) -> bool:
        """Whether `sft.response` names `messages` or, by default, the row has no other answer."""
        if self._default:
            return "answer" not in row and "completion" not in row
        return self._names_messages

    def is_text(self, row: Mapping[str, Any]) -> bool:
        """Whether, by default, the row has a `text` and neither a prompt nor an answer."""
        others = ("prompt", "messages", "answer", "completion")
        whole = self._default and isinstance(row.get("text"), str)
        return whole and not any(name in row for name in others)


def with_responses(data: Dataset, settings: SftSettings, codec: TextCodec) -> Dataset:
    """Returns the data set with the `response_ids` of every example.

    By default the text to learn is the row's `answer`, else its `completion`, as TRL names it.

    Raises ConfigError for a row without a text to learn, or a tokenizer without the
    end-of-sequence token that `settings` want; ProblemsError for several problems, each once.
    """
    try:
        names = [name for _, name, _, _ in Formatter().parse(settings.response) if name is not None]
    except ValueError as error:
        raise ConfigError(f"sft.response: {settings.response!r}: {error}") from None
    end = end_ids(codec, append_eos=settings.append_eos, field="sft.append_eos")
    examples: list[Example] = []
    problems = RowProblems()
    for example in data.examples:
        try:
            where = f"sft.response: {example.place}"
            ids = with_end(_ids(example, settings, names, codec, where), end)
            if not ids:
                raise ConfigError(f"{where}: the text to learn is empty")
            examples.append(replace(example, response_ids=ids))
        except ConfigError as error:
            problems.add(error, example.place)
            if problems.full:
                break
    problems.raise_any()
    return data.with_examples(examples)


def _ids(
    example: Example, settings: SftSettings, names: Sequence[str], codec: TextCodec, where: str
) -> list[int]:
    """Returns the ids of the text to learn, in which `sft.response` names the columns `names`."""
    if LearntRows(settings).is_text(example.row):
        return list(example.response_ids)  # A text that is learnt whole.
    row = _with_answer(example.row) if settings.response == _ANSWER else example.row
    for name in names:
        _require_text(name, row, where)
    return _encoded(settings.response, row, codec, where)


def _columns(template: str) -> set[str]:
    """Returns the columns that a template names; none if it is malformed."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError:
        return set()
    return {re.split(r"[.\[]", name)[0] for name in fields}


def _with_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row with its `completion` as its `answer`, if it has no other."""
    if "answer" in row or "completion" not in row:
        return row
    answer = row["completion"]
    if isinstance(answer, list) and answer and isinstance(answer[-1], dict):
        answer = answer[-1].get("content")
    return {**row, "answer": answer}


def require_lengths(data: Dataset, max_model_len: int) -> None:
    """Raises ConfigError, which names the row, for a prompt and response that are too long."""
    for example in data.examples:
        longest = max(len(example.response_ids), len(example.rejected_ids))
        length = len(example.token_ids) + longest
        # Prompts that are too long by themselves are Dataset.require_prompts_below's to name.
        if len(example.token_ids) < max_model_len < length:
            raise ConfigError(
                f"{_learnt_column(example)}: {example.place}: prompt and response have {length:,} "
                f"tokens, but the servers' max_model_len allows {max_model_len:,}"
            )


def _learnt_column(example: Example) -> str:
    """Returns the setting, or the column of a pair, that the longest response comes from."""
    if not example.rejected_ids:
        return "sft.response"
    longer = len(example.response_ids) >= len(example.rejected_ids)
    return "data: chosen" if longer else "data: rejected"


def end_ids(codec: TextCodec, *, append_eos: bool, field: str) -> list[int]:
    """Returns the token ids after every text to learn.

    Raises ConfigError, which begins with `field`, where the tokenizer does not name the token.
    """
    if not append_eos:
        return []
    if codec.eos_token_id is None:
        raise ConfigError(
            f"{field}: {codec.directory} does not name an end-of-sequence token",
            hint=f"set eos_token in tokenizer_config.json, or {field}=false to do without",
        )
    return [codec.eos_token_id]


def with_end(ids: list[int], end: list[int]) -> list[int]:
    """Returns the ids of a text with `end` behind them, unless the text ends so itself."""
    return ids if ids[-len(end) :] == end else ids + end


def _encoded(template: str, row: Mapping[str, Any], codec: TextCodec, where: str) -> list[int]:
    try:
        return codec.encode(template.format(**row), special=False)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {template!r} does not fit the row: {error!r}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None


def _require_text(name: str, row: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError where {name} of the template is not a text or number of the row."""
    try:
        value, _ = Formatter().get_field(name, (), row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{where}: the row has no {name!r}; its columns are {', '.join(row)}",
            hint="sft.response: '{COLUMN}' names the column with the text to learn",
        ) from None
    if value is None or isinstance(value, dict | list):
        kind = "null" if value is None else f"a {'list' if isinstance(value, list) else 'mapping'}"
        raise ConfigError(f"{where}: {name!r} is {kind}, not a text to learn")
