"""The trajectories of a run directory: reading, checking and choosing them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tandem.errors import ConfigError, RunDirectoryError
from tandem.run_directory.trajectories.files import (
    EVALUATIONS,
    STEPS,
    Head,
    TrajectoryFile,
    open_records,
    trajectory_files,
)
from tandem.utils.atomic_files import kind_of_run


@dataclass(frozen=True)
class Trajectory:
    """A response of a step.

    Attributes:
        step: the step.
        record: what the file has of it, with the keys of docs/guides/run-directory.md.
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
        """The columns of the row other than its prompt, as text."""
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
        nothing = [None] * len(self.record["response_token_ids"])
        senior = self.record["senior_logprobs"] or nothing
        junior = self.record["junior_logprobs"] or nothing
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

    def admits(self, head: Head) -> bool:
        """Whether the response has such a reward and contains the text, in upper or lower case."""
        reward = head.reward
        return (
            self.reward is None or (reward is not None and reward in self.reward)
        ) and self.text.casefold() in head.text.casefold()


def recorded(run_dir: Path, mode: str = "") -> list[TrajectoryFile]:
    """Returns the files that a run directory holds, at least one, by step.

    They are those of its steps or, with a `mode`, of its evaluations in this mode. A file of
    trajectories stands for itself, as step 0 if its name has none.

    Raises RunDirectoryError for a directory that is not a run directory or holds no such file.
    """
    if run_dir.is_file():
        return [TrajectoryFile.of(run_dir) or TrajectoryFile(0, "", run_dir)]
    kind = kind_of_run(run_dir)
    if kind is None:
        raise RunDirectoryError(f"{run_dir} holds no run")
    if mode:
        evaluations = trajectory_files(run_dir / EVALUATIONS)
        files = [one for one in evaluations if one.mode == mode]
        if not files:
            known = sorted({one.mode for one in evaluations})
            there = (
                f"it has {', '.join(known)}"
                if known
                else "eval.every sets how often a run evaluates"
            )
            raise RunDirectoryError(f"{run_dir} holds no answers of {mode} evaluations: {there}")
        return files
    files = [one for one in trajectory_files(run_dir / STEPS) if not one.mode and one.step]
    if not files:
        why = "no step has finished yet, or trajectories.every is 0"
        if kind == "sft":
            why = "supervised training writes them only with sft.responses: senior"
        elif kind in ("dpo", "reward-model"):
            why = "training on pairs draws no responses"
        raise RunDirectoryError(f"{run_dir} holds no trajectories: {why}")
    return files


class Chosen:
    """The trajectories of a file that a filter admits; they are read as they are asked for.

    Attributes:
        step: the step.
        count: number of the trajectories.
    """

    def __init__(self, file: TrajectoryFile, wanted: Filter = Filter()) -> None:
        """Opens the file; RunDirectoryError, which names the place, if it is damaged."""
        self.step = file.step
        self._records = open_records(file.path)
        heads = self._records.heads
        self._indices = [index for index, head in enumerate(heads) if wanted.admits(head)]
        self.count = len(self._indices)
        rewards: dict[str, list[float]] = {}
        for head in heads:
            if head.reward is not None:
                rewards.setdefault(head.group_id, []).append(head.reward)
        self._means = {group: sum(values) / len(values) for group, values in rewards.items()}

    def read(self, most: int | None = None) -> Iterator[Trajectory]:
        """Yields the trajectories, `most` at most, in the order of the file.

        Raises RunDirectoryError, which names the record and the key, for one that is damaged.
        """
        for record in self._records.read(set(self._indices[:most])):
            reward = record["reward"]
            mean = self._means.get(record["group_id"], 0.0)
            yield Trajectory(self.step, record, None if reward is None else reward - mean)
