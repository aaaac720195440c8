"""Reading files of trajectories: Parquet, and the JSON lines of earlier releases."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from tandem.errors import RunDirectoryError
from tandem.settings.base import TokenId
from tandem.utils.atomic_files import placed_objects, read_text

# Folders of a run directory: the responses of its steps, the answers of its evaluations.
STEPS = "trajectories"
EVALUATIONS = "evaluations"
# A file of a step, or of an evaluation in a mode after that step.
_NAME = re.compile(r"step_(\d+)(?:\.([a-z_]+))?\.(?:parquet|jsonl)")


class _Record(BaseModel):
    """The keys of a record that are shown."""

    model_config = ConfigDict(strict=True)

    prompt_token_ids: list[TokenId]
    response_token_ids: list[TokenId]
    # 1 senior, 0 junior, 2 environment.
    authorship_mask: list[Literal[0, 1, 2]]
    # null: log-probabilities were not kept (trajectories.logprobs: false).
    senior_logprobs: list[FiniteFloat | None] | None
    junior_logprobs: list[FiniteFloat | None] | None
    finish_reason: str
    text: str
    reward: FiniteFloat | None
    group_id: str
    sample_index: int
    # Files of earlier releases lack the keys below.
    scores: dict[str, FiniteFloat | None] = {}
    place: str | None = None
    row: dict[str, Any] | None = None
    accepted_draft_mask: list[Literal[0, 1]] | None = None


# The keys whose lists have one entry per response token.
_PER_TOKEN = ("authorship_mask", "accepted_draft_mask", "senior_logprobs", "junior_logprobs")


@dataclass(frozen=True, order=True)
class TrajectoryFile:
    """A file of trajectories in a run directory.

    Attributes:
        step: the step that drew them, or after which they were evaluated (0: before the first).
        mode: of the evaluation; "" for the responses of a step.
    """

    step: int
    mode: str
    path: Path

    @classmethod
    def of(cls, path: Path) -> TrajectoryFile | None:
        """Returns the file at `path`; None if its name is none that a run gives."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), match[2] or "", path) if match else None


def step_file(run_dir: Path, step: int) -> Path:
    """Returns the file that a run writes for a step's responses."""
    return run_dir / STEPS / f"step_{step}.parquet"


def evaluation_file(run_dir: Path, step: int, mode: str) -> Path:
    """Returns the file that a run writes for the answers of an evaluation after a step."""
    return run_dir / EVALUATIONS / f"step_{step}.{mode}.parquet"


def trajectory_files(folder: Path) -> list[TrajectoryFile]:
    """Returns the files of a folder by step and mode.

    A step that was written both by an earlier release and by this one is there once, as Parquet.
    """
    found: dict[tuple[int, str], TrajectoryFile] = {}
    for path in sorted(folder.glob("step_*")):
        one = TrajectoryFile.of(path)
        if one is not None and path.is_file():
            found[one.step, one.mode] = one
    return sorted(found.values())


@dataclass(frozen=True)
class Head:
    """The fields that choose trajectories, without the tokens."""

    group_id: str
    reward: float | None
    text: str


class Records(ABC):
    """The records of a file.

    Attributes:
        heads: the head of each record, in the order of the file.
    """

    heads: list[Head]

    @abstractmethod
    def read(self, chosen: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records whose indices are chosen, in their order; by default all.

        Raises RunDirectoryError, which names the record and the key, for one that is damaged.
        """


def open_records(path: Path) -> Records:
    """Opens a file of trajectories; RunDirectoryError if it cannot be read."""
    return _Lines(path) if path.suffix == ".jsonl" else _Parquet(path)


class _Lines(Records):
    """JSON lines, of which all are read at once."""

    def __init__(self, path: Path) -> None:
        self._records = [
            _checked(place, record)
            for place, record in placed_objects(path, read_text(path).split("\n"))
        ]
        self.heads = [Head(r["group_id"], r["reward"], r["text"]) for r in self._records]

    def read(self, chosen: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
        for index, record in enumerate(self._records):
            if chosen is None or index in chosen:
                yield record


class _Parquet(Records):
    """A Parquet file, of which a row group at a time is read."""

    def __init__(self, path: Path) -> None:
        # Imported here: it takes a moment, and most commands do without.
        import pyarrow
        from pyarrow import parquet

        from tandem.run_directory.trajectories.columns import EARLIER_TYPES, SCHEMA

        self._path = path
        self._errors = (pyarrow.ArrowException, OSError)
        try:
            self._file = parquet.ParquetFile(path)
            schema = self._file.schema_arrow
            for field in SCHEMA:
                index = schema.get_field_index(field.name)
                if index < 0:
                    raise RunDirectoryError(f"{path}: {field.name}: the column is missing")
                if schema.field(index).type not in (field.type, EARLIER_TYPES.get(field.name)):
                    raise RunDirectoryError(
                        f"{path}: {field.name}: has type {schema.field(index).type}, not "
                        f"{field.type}"
                    )
            heads = self._file.read(["group_id", "reward", "text"]).to_pylist()
        except self._errors as error:
            raise self._damaged(error) from None
        self._names = SCHEMA.names
        for number, head in enumerate(heads, start=1):
            for name in ("group_id", "text"):
                if head[name] is None:
                    raise RunDirectoryError(f"{path}:{number}: {name}: is null")
        self.heads = [Head(one["group_id"], one["reward"], one["text"]) for one in heads]

    def read(self, chosen: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
        from tandem.run_directory.trajectories.columns import records_of

        begin = 0
        for number in range(self._file.num_row_groups):
            end = begin + self._file.metadata.row_group(number).num_rows
            inside = [i for i in range(begin, end) if chosen is None or i in chosen]
            if inside:
                try:
                    table = self._file.read_row_group(number, self._names)
                    table = table.take([index - begin for index in inside])
                except self._errors as error:
                    raise self._damaged(error) from None
                for index, record in zip(inside, records_of(table), strict=True):
                    yield _checked(f"{self._path}:{index + 1}", record)
            begin = end

    def _damaged(self, error: Exception) -> RunDirectoryError:
        return RunDirectoryError(f"{self._path}: {str(error).splitlines()[0]}")


def _checked(place: str, record: dict[str, Any]) -> dict[str, Any]:
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RunDirectoryError(f"{place}: {key}: {first['msg']}") from None
    length = len(record["response_token_ids"])
    for key in _PER_TOKEN:
        if record.get(key) is not None and len(record[key]) != length:
            raise RunDirectoryError(
                f"{place}: {key}: {len(record[key])} entries for {length} response tokens"
            )
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns all records of a file, of at most some gigabytes; RunDirectoryError for damage."""
    return list(open_records(path).read())
