"""Pairs of a chosen and a rejected response to one prompt, made of the columns of the rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.data.dataset import Dataset, Example, RowProblems, text_of
from tandem.data.sources import as_message
from tandem.data.supervised import end_ids, with_end
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec

_log = logging.getLogger(__name__)

# The columns of a pair, as TRL names them.
COLUMNS = ("chosen", "rejected")
# The columns of a pair's log-probabilities under the reference policy, as TRL names them.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def with_prompt(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a row of TRL's forms with its prompt, and the texts of both responses.

    Texts stay as they are. Conversations, which hold the last message alone or the whole of the
    conversation, become the text of that message, an assistant's; the messages that both begin with
    are of the prompt.

    Raises ConfigError, which names the place and the column, for a row that lacks a response or
    has one that is neither, or whose responses have other prompts.
    """
    for name in COLUMNS:
        if row.get(name) is None:
            other = next(one for one in COLUMNS if one != name)
            raise ConfigError(
                f"{place}: the row has no {name!r}"
                + (f" beside its {other!r}" if row.get(other) is not None else ""),
                hint=f"`columns: {{{name}: OTHER}}` renames the column OTHER",
            )
    if all(isinstance(row[name], str) for name in COLUMNS):
        return row
    conversations = [_conversation(row, name, place) for name in COLUMNS]
    begin = _common_length(*conversations)
    texts = {
        name: _answer(messages[begin:], name, place)
        for name, messages in zip(COLUMNS, conversations, strict=True)
    }
    shared = conversations[0][:begin]
    asked = row.get("prompt")
    if isinstance(asked, list):
        shared = [*map(as_message, asked), *shared]
    if not shared:
        if not isinstance(asked, str) and "messages" not in row:
            raise ConfigError(
                f"{place}: the row has no prompt: it has no `prompt`, and `chosen` and `rejected` "
                "begin with different messages"
            )
        return row | texts
    rest = {name: value for name, value in row.items() if name != "prompt"}
    return rest | {"messages": shared} | texts


def _conversation(row: Mapping[str, Any], name: str, place: str) -> list[Any]:
    messages = row[name]
    if isinstance(messages, list) and messages:
        messages = [as_message(one) for one in messages]
        if all(isinstance(one, Mapping) for one in messages):
            return messages
    raise ConfigError(
        f"{place}: {name!r} must be a text or a list of messages, of the kind of the other response"
    )


def _common_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the number of messages that both begin with, without the last of either."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)


def _answer(messages: Sequence[Mapping[str, Any]], name: str, place: str) -> str:
    """Returns the text of the one message that a response is; raises ConfigError for any other."""
    text = text_of(messages[0].get("content")) if len(messages) == 1 else None
    if not isinstance(text, str) or messages[0].get("role") != "assistant":
        raise ConfigError(
            f"{place}: {name!r} must add one message of the assistant's, a text, to what it shares "
            "with the other response"
        )
    return text


def with_pairs(
    data: Dataset, codec: TextCodec, section: str, *, append_eos: bool, reference: bool = False
) -> Dataset:
    """Returns the data set with the `response_ids` and `rejected_ids` of every example.

    `section` is that of the settings of the run, `append_eos` among them. With `reference` the rows
    need the log-probabilities of the reference policy.

    Raises ConfigError for a row with an empty response, or without numbers that it needs, and for a
    tokenizer without an end-of-sequence token where it is to be appended; ProblemsError for several
    problems, each once.
    """
    end = end_ids(codec, append_eos=append_eos, field=f"{section}.append_eos")
    examples: list[Example] = []
    problems = RowProblems()
    for example in data.examples:
        try:
            chosen, rejected = (_ids(example, name, codec, end) for name in COLUMNS)
            if reference:
                _require_reference(example)
            if section == "reward_model":
                margin_of(example)
            examples.append(replace(example, response_ids=chosen, rejected_ids=rejected))
        except ConfigError as error:
            problems.add(error, example.place)
            if problems.full:
                break
    problems.raise_any()
    if same := sum(one.response_ids == one.rejected_ids for one in examples):
        _log.warning(
            f"data: {same:,} of {len(examples):,} pairs teach nothing: chosen and rejected are the "
            "same text"
        )
    return data.with_examples(examples)


def _ids(example: Example, name: str, codec: TextCodec, end: list[int]) -> list[int]:
    text = example.row.get(name)
    if not isinstance(text, str):  # Rows of a reasoning-gym task are not prepared.
        raise ConfigError(f"data: {example.place}: the row has no {name!r}")
    try:
        ids = with_end(codec.encode(text, special=False), end)
    except ConfigError as error:
        raise ConfigError(
            f"data: {example.place}: {name!r}: {error.message}", hint=error.hint
        ) from None
    if not ids:
        raise ConfigError(f"data: {example.place}: {name!r} is empty")
    return ids


def _require_reference(example: Example) -> None:
    for name in REFERENCE_COLUMNS:
        value = example.row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value > 0:
            raise ConfigError(
                f"dpo.reference_logprobs: rows: {example.place}: {name!r} must be a number of at "
                f"most 0, the log-probability of the response, not {value!r}"
            )


def margin_of(example: Example) -> float:
    """Returns the `margin` of a pair, by how much the chosen response is better; 0 without one.

    Raises ConfigError, which names the row, for one that is not a finite number.
    """
    value = example.row.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"data: {example.place}: 'margin' must be a number, not {value!r}")
    return float(value)
