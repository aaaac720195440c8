"""The trajectories of a run directory: reading, checking and choosing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from tandem.errors import ConfigError, RunDirectoryError
from tandem.run_files import kind_of_run, number_of, placed_objects, read_text, trajectory_file
from tandem.settings import TokenId


class _Record(BaseModel):
    """The keys of a line of trajectories/step_N.jsonl that are shown."""

    model_config = ConfigDict(strict=True)

    prompt_token_ids: list[TokenId]
    response_token_ids: list[TokenId]
    authorship_mask: list[Literal[0, 1]]
    senior_logprobs: list[FiniteFloat | None]
    junior_logprobs: list[FiniteFloat | None] | None
    finish_reason: str
    text: str
    reward: FiniteFloat | None
    group_id: str
    sample_index: int
    # Files of earlier versions lack the keys below.
    scores: dict[str, FiniteFloat | None] = {}
    place: str | None = None
    row: dict[str, Any] | None = None
    accepted_draft_mask: list[Literal[0, 1]] | None = None


# The keys whose lists have one entry per response token.
_PER_TOKEN = ("authorship_mask", "accepted_draft_mask", "senior_logprobs", "junior_logprobs")


@dataclass(frozen=True)
class Trajectory:
    """A response of a step.

    Attributes:
        step: the step.
        record: the line of the file, with the keys of docs/client.md.
        advantage: the reward minus the mean reward of the responses to the same prompt: the
            group-relative advantage before any scaling. None where the reward failed.
    """

    step: int
    record: Mapping[str, Any]
    advantage: float | None

    @property
    def scores(self) -> dict[str, float | None]:
        """By name what each of several reward functions gave; empty for a single one."""
        scores = self.record.get("scores") or {}
        return scores if len(scores) > 1 else {}

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns of the row beside its prompt, as text."""
        row = self.record.get("row") or {}
        return [
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in row.items()
        ]

    @property
    def accepted_drafts(self) -> list[int] | None:
        """By token whether it is an accepted draft (1); None where no drafts were asked for."""
        return self.record.get("accepted_draft_mask")

    @property
    def gaps(self) -> list[float | None]:
        """Senior's minus junior's log-probability of each token; None where one is unknown."""
        senior = self.record["senior_logprobs"]
        junior = self.record["junior_logprobs"] or [None] * len(senior)
        return [
            None if s is None or j is None else s - j for s, j in zip(senior, junior, strict=True)
        ]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Reads "3", "3:7", "3:" or ":7"; raises ConfigError, which begins with `name`."""
        low, colon, high = text.partition(":")
        try:
            one = (
                cls(float(low or "-inf"), float(high or "inf"))
                if colon
                else cls(float(text), float(text))
            )
        except ValueError:
            raise ConfigError(
                f"{name}: {text!r} is neither a number nor a range LOW:HIGH"
            ) from None
        if not one.low <= one.high:
            raise ConfigError(f"{name}: there is no number in {text!r}")
        return one

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


@dataclass(frozen=True)
class Filter:
    """A choice of trajectories by reward (None: any, failed ones too) and by text."""

    reward: Range | None = None
    text: str = ""

    def admits(self, trajectory: Trajectory) -> bool:
        """Whether the response has such a reward and contains the text, in upper or lower case."""
        reward, text = trajectory.record["reward"], trajectory.record["text"]
        return (
            self.reward is None or (reward is not None and reward in self.reward)
        ) and self.text.casefold() in text.casefold()


def recorded_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose trajectories a run directory holds, at least one.

    Raises RunDirectoryError for a directory that is no run directory or holds no trajectories.
    """
    kind = kind_of_run(run_dir)
    if kind is None:
        raise RunDirectoryError(f"{run_dir} holds no run")
    files = (run_dir / "trajectories").glob("step_*.jsonl")
    steps = sorted(step for step in map(number_of, files) if step)
    if not steps:
        why = "no step is done yet"
        if kind == "sft":
            why = "supervised training writes them with sft.responses: senior alone"
        raise RunDirectoryError(f"{run_dir} holds no trajectories: {why}")
    return steps


def read_step(run_dir: Path, step: int) -> list[Trajectory]:
    """Returns the trajectories of a step, in the order of their file.

    Raises RunDirectoryError, which names the line and the key, for a line that is no trajectory.
    """
    file = trajectory_file(run_dir, step)
    records = [
        _checked(place, record)
        for place, record in placed_objects(file, read_text(file).split("\n"))
    ]
    rewards: dict[str, list[float]] = {}
    for record in records:
        if record["reward"] is not None:
            rewards.setdefault(record["group_id"], []).append(record["reward"])
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return [
        Trajectory(
            step,
            record,
            None if record["reward"] is None else record["reward"] - means[record["group_id"]],
        )
        for record in records
    ]


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
