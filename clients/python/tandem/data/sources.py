"""Where rows come from: JSON lines, Parquet, the Hugging Face Hub, a reasoning-gym task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.data.hub import hub_rows
from tandem.errors import ConfigError
from tandem.settings.run import DataSettings, HubDataSettings, ReasoningGymSettings
from tandem.utils.optional import optional_module
from tandem.utils.text_files import decoded, json_object, read_bytes, require_no_lfs_pointer

# The place of a row (FILE:LINE for JSON lines, FILE[INDEX], DATA SET[INDEX] or TASK[INDEX]) with
# the row, or with the error of a line that holds none: other lines can be read all the same.
PlacedRow = tuple[str, dict[str, Any] | ConfigError]

# Returns a row in the form that is read, given the row and its place. Raises ConfigError, which
# names the place.
PrepareRow = Callable[[dict[str, Any], str], dict[str, Any]]


def read_rows(
    settings: DataSettings,
    field: str,
    needs_no_prompt: Callable[[Mapping[str, Any]], bool] | None = None,
    prepare: PrepareRow | None = None,
) -> tuple[Any, Iterable[PlacedRow]]:
    """Returns the source's rows, and the reasoning-gym data set that judges them or None.

    Columns have the names that `columns` gives them. `field` is where the settings stand in the
    file ("data", "eval.data"), and `needs_no_prompt` tells rows that need none. `prepare` changes
    rows before their prompts are looked for. Raises ConfigError, also while the rows are read, for
    a source that cannot be read.
    """
    if settings.reasoning_gym is not None:
        return _reasoning_gym(settings.reasoning_gym, f"{field}.reasoning_gym")
    source, rows = _raw_rows(settings, field)
    columns = settings.columns

    def usable(row: dict[str, Any] | ConfigError, place: str) -> dict[str, Any] | ConfigError:
        """Returns the row with its new names, or the error that it is refused with."""
        try:
            if isinstance(row, ConfigError):
                return row
            row = _renamed(row, columns, place)
            if prepare is not None:
                row = prepare(row, place)
            return row if needs_no_prompt and needs_no_prompt(row) else _checked(row, place)
        except ConfigError as error:
            return error

    return None, ((place, usable(row, f"{source}: {place}")) for place, row in rows)


def first_row(settings: DataSettings, field: str) -> dict[str, Any]:
    """Returns the first row of a source as it is, whether or not it has a prompt.

    Raises ConfigError as read_rows() does, and where there is no row.
    """
    source, rows = _raw_rows(settings, field)
    for _, row in rows:
        if isinstance(row, ConfigError):
            raise row
        return row
    raise ConfigError(f"{source}: no rows")


def _raw_rows(settings: DataSettings, field: str) -> tuple[str, Iterator[PlacedRow]]:
    """Returns the field of a source that holds rows, and these rows as they are."""
    if settings.hub is not None:
        return f"{field}.hub", _hub_rows(settings.hub, f"{field}.hub")
    if settings.parquet is not None:
        return f"{field}.parquet", _parquet_rows(settings.parquet, f"{field}.parquet")
    assert settings.jsonl is not None
    return f"{field}.jsonl", _json_lines(settings.jsonl, f"{field}.jsonl")


def _renamed(row: dict[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """Returns the row with the column `columns[name]` renamed to `name`."""
    for source in columns.values():
        if source not in row:
            raise ConfigError(
                f"{place}: `columns` names {source!r}, which is not a column; the columns are "
                f"{', '.join(row)}",
                hint="eval.data inherits data.columns; eval.data.columns: {} turns the renaming off"
                if place.startswith("eval.")
                else None,
            )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    return kept | {name: row[source] for name, source in columns.items()}


def _checked(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the row; raises ConfigError unless it has a prompt.

    A conversation in `prompt`, as TRL and verl have it, or in `conversations` becomes `messages`.
    """
    for other in ("prompt", "conversations"):
        if "messages" not in row and isinstance(row.get(other), list):
            row = {"messages" if key == other else key: value for key, value in row.items()}
    if isinstance(row.get("messages"), list):
        row = row | {"messages": [as_message(one) for one in row["messages"]]}
    if not ("prompt" in row or "messages" in row):
        raise ConfigError(
            f"{place}: a row needs `prompt` or `messages`",
            hint=f"`columns: {{prompt: {next(iter(row))}}}` names another column" if row else None,
        )
    if "messages" not in row and not isinstance(row["prompt"], str):
        raise ConfigError(f"{place}: `prompt` must be a string, or a list of messages")
    if "messages" in row and not _is_conversation(row["messages"]):
        raise ConfigError(
            f"{place}: `messages` must be a list of objects whose `content` is a string "
            "or a list of parts"
        )
    return row


def as_message(message: Any) -> Any:
    """Returns a message of ShareGPT's form, {"from", "value"}, with the names of all others."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    roles = {"human": "user", "gpt": "assistant"}
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {
        "role": roles.get(message["from"], message["from"]),
        "content": message["value"],
        **rest,
    }


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        # A turn that calls a tool may have no content.
        isinstance(message, dict) and isinstance(message.get("content"), str | list | None)
        for message in messages
    )


def _json_lines(path: Path, field: str) -> Iterator[PlacedRow]:
    data = read_bytes(path, f"{field}: {path}")
    # Lines end at line feeds alone: JSON strings may hold the other separators of splitlines().
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                row: dict[str, Any] | ConfigError = _json_row(line, f"{field}: {path}:{number}")
            except ConfigError as error:
                row = error
            yield f"{path}:{number}", row


def _json_row(line: bytes, place: str) -> dict[str, Any]:
    row = json_object(decoded(line, place), place)
    try:
        # An escape may spell a lone surrogate ("\ud800"), which is not text.
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ConfigError(f"{place}: not Unicode text: {half!r} is half a surrogate pair") from None
    return row


def _parquet_rows(path: Path, field: str) -> Iterator[PlacedRow]:
    """Yields the rows of a file, or of the *.parquet files of a folder in the order of their names.

    The import takes a third of a second.
    """
    import pyarrow
    from pyarrow import parquet

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{field}: {path} has no *.parquet file")
    for file in files:
        require_no_lfs_pointer(file, f"{field}: {file}")
        try:
            with parquet.ParquetFile(file) as opened:
                index = 0
                for batch in opened.iter_batches():
                    for row in batch.to_pylist():
                        yield f"{file}[{index}]", row
                        index += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{field}: {file}: {error}") from None


def _hub_rows(spec: HubDataSettings, field: str) -> Iterator[PlacedRow]:
    for index, row in enumerate(hub_rows(spec, field)):
        yield f"{spec.name}[{index}]", row


def _reasoning_gym(spec: ReasoningGymSettings, field: str) -> tuple[Any, Iterable[PlacedRow]]:
    reasoning_gym = optional_module("reasoning_gym", field, "reasoning-gym")
    try:
        task = reasoning_gym.create_dataset(
            spec.name, size=spec.size, seed=spec.seed, **spec.config
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"{field}: {error}") from None

    def row(index: int) -> PlacedRow:
        entry = task[index]
        return f"{spec.name}[{index}]", {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry.get("metadata", {}),
            "entry": entry,
        }

    return task, map(row, range(spec.size))
