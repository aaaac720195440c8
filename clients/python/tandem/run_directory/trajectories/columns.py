"""The columns of a Parquet file of trajectories, as docs/guides/run-directory.md lists them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tandem.rpc.wire import enum_name, from_tensor, tandem_record
from tandem.run_directory.trajectories.record import (
    Response,
    json_value,
    known_floats,
    sampling_record,
    vision_record,
)

_VISION = pa.struct(
    {
        "kind": pa.string(),
        "digest": pa.string(),
        "grid": pa.list_(pa.int32()),
        "seconds_per_grid": pa.float64(),
        "first_token": pa.int32(),
    }
)
# In files written before images could stand in an environment's turn.
_VISION_OF_PROMPTS = pa.struct([field for field in _VISION if field.name != "first_token"])
_VERSION = pa.struct({"version": pa.int64(), "count": pa.int32(), "digest": pa.string()})
_SAMPLING = pa.struct(
    {
        "temperature": pa.float64(),
        "top_k": pa.int32(),
        "top_p": pa.float64(),
        "min_p": pa.float64(),
        "max_tokens": pa.int32(),
    }
)
_TANDEM = pa.struct(
    {
        "enabled": pa.bool_(),
        "selection_strategy": pa.string(),
        "prob_senior": pa.float64(),
        "chunk_size": pa.int32(),
        "max_gap_tokens": pa.int32(),
        "boundary_token_ids": pa.list_(pa.int32()),
    }
)

SCHEMA = pa.schema(
    {
        "prompt_token_ids": pa.list_(pa.int32()),
        "vision_inputs": pa.list_(_VISION),
        "response_token_ids": pa.list_(pa.int32()),
        "authorship_mask": pa.list_(pa.uint8()),
        "accepted_draft_mask": pa.list_(pa.uint8()),
        "senior_logprobs": pa.list_(pa.float32()),
        "junior_logprobs": pa.list_(pa.float32()),
        "log_keep_mass": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "text": pa.string(),
        "reward": pa.float64(),
        "scores": pa.map_(pa.string(), pa.float64()),
        "overlong_punishment": pa.float64(),
        "group_id": pa.string(),
        "place": pa.string(),
        # JSON: every data set has columns of its own.
        "row": pa.string(),
        "sample_index": pa.uint64(),
        "seed": pa.uint64(),
        "senior_versions": pa.list_(_VERSION),
        "junior_version": pa.string(),
        "sampling": _SAMPLING,
        "tandem": _TANDEM,
    }
)
# Other types that a column has in files of earlier releases.
EARLIER_TYPES = {"vision_inputs": pa.list_(_VISION_OF_PROMPTS)}
# Floats of a token: their bytes are stored by place, because no two are alike but their exponents.
_FLOATS = ("senior_logprobs", "junior_logprobs", "log_keep_mass")
# Marks and texts that repeat, which a dictionary stores once.
_REPEATED = ("authorship_mask", "accepted_draft_mask")
_REPEATED_TEXTS = ("finish_reason", "group_id", "place", "row", "junior_version")


def write_options() -> dict[str, Any]:
    """Returns how a ParquetWriter encodes and compresses the columns."""
    return {
        "compression": "zstd",
        "use_byte_stream_split": [f"{name}.list.element" for name in _FLOATS],
        "use_dictionary": [f"{name}.list.element" for name in _REPEATED] + [*_REPEATED_TEXTS],
        "write_statistics": ["reward", "group_id", "sample_index"],
    }


def table_of(responses: Sequence[Response], *, logprobs: bool = True) -> pa.Table:
    """Returns the rows of responses; without `logprobs` those columns are null."""
    trajectories = [one.trajectory for one in responses]
    nothing: list[None] = [None] * len(responses)
    senior: Sequence[np.ndarray | None] = nothing
    junior: Sequence[np.ndarray | None] = nothing
    keep_mass: Sequence[np.ndarray | None] = nothing
    if logprobs:
        senior, junior = zip(*(one.logprobs_by_model() for one in responses), strict=True)
        keep_mass = [
            from_tensor(one.log_keep_mass) if one.HasField("log_keep_mass") else None
            for one in trajectories
        ]
    columns: dict[str, Any] = {
        "prompt_token_ids": _lists([_int32(one.prompt_token_ids) for one in trajectories]),
        "vision_inputs": [[vision_record(i) for i in one.vision_inputs] for one in trajectories],
        "response_token_ids": _lists([_int32(one.response_token_ids) for one in trajectories]),
        "authorship_mask": _lists([_marks(one.authorship_mask) for one in trajectories]),
        "accepted_draft_mask": _lists(
            [
                _marks(one.accepted_draft_mask) if one.accepted_draft_mask else None
                for one in trajectories
            ],
            np.uint8,
        ),
        "senior_logprobs": _lists(senior),
        "junior_logprobs": _lists(junior),
        "log_keep_mass": _lists(keep_mass),
        "finish_reason": [enum_name(one, "finish_reason") for one in trajectories],
        "text": [_text(one.text) for one in responses],
        "reward": [one.reward for one in responses],
        "scores": [
            [(_text(name), score) for name, score in one.scores.items()] for one in responses
        ],
        "overlong_punishment": [one.overlong_punishment for one in responses],
        "group_id": [_text(one.group_id) for one in responses],
        "place": [None if one.place is None else _text(one.place) for one in responses],
        "row": [None if one.row is None else json.dumps(json_value(one.row)) for one in responses],
        "sample_index": [one.sample_index for one in trajectories],
        "seed": [one.seed for one in trajectories],
        "senior_versions": [
            [
                {"version": r.weights.version, "count": r.count, "digest": r.weights.digest}
                for r in one.senior_versions
            ]
            for one in trajectories
        ],
        "junior_version": [one.junior_version or None for one in trajectories],
        "sampling": [sampling_record(one) for one in trajectories],
        "tandem": [tandem_record(one.tandem) for one in trajectories],
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, SCHEMA.field(name).type)
        for name, values in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def records_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table as records, equal to those of trajectory_record()."""
    readers = [(name, _reader(table[name].combine_chunks(), name)) for name in table.column_names]
    for index in range(len(table)):
        record = {name: read(index) for name, read in readers}
        if record["log_keep_mass"] is None and record["senior_logprobs"] is not None:
            record["log_keep_mass"] = [0.0] * len(record["response_token_ids"])
        yield record


def _reader(column: pa.Array, name: str) -> Callable[[int], Any]:
    """Returns what reads a row of a column for its record."""

    def numbers(index: int) -> Any:
        values = column[index].values
        return None if values is None else values.to_numpy(zero_copy_only=False).tolist()

    def floats(index: int) -> Any:
        values = column[index].values
        return None if values is None else known_floats(values.to_numpy(zero_copy_only=False))

    def text_of_json(index: int) -> Any:
        text = column[index].as_py()
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return text  # It is no row, which the reader's check says.

    def versions(index: int) -> Any:
        return [[one["version"], one["count"], one["digest"]] for one in column[index].as_py()]

    special = {
        "prompt_token_ids": numbers,
        "response_token_ids": numbers,
        "authorship_mask": numbers,
        "accepted_draft_mask": numbers,
        "row": text_of_json,
        "scores": lambda index: dict(column[index].as_py()),
        "senior_versions": versions,
    } | dict.fromkeys(_FLOATS, floats)
    return special.get(name, lambda index: column[index].as_py())


def _lists(parts: Sequence[np.ndarray | None], dtype: Any = np.float32) -> pa.Array:
    """Returns the arrays, of one dtype, as the rows of a list column; None becomes null."""
    there = [part for part in parts if part is not None]
    values = np.concatenate(there) if there else np.zeros(0, dtype)
    ends = np.cumsum([0 if part is None else len(part) for part in parts], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
    missing = pa.array([part is None for part in parts], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)


def _marks(mask: bytes) -> np.ndarray:
    return np.frombuffer(mask, np.uint8)


def _text(text: str) -> str:
    """Returns a text that UTF-8 can hold: halves of a surrogate pair become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
