"""Every objective of docs/objectives.md trains."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from tandem.cluster import LocalCluster

PAGE = (harness.REPOSITORY / "docs/objectives.md").read_text()
# Of each block of YAML: the first word of the text above it, and its objective.
OBJECTIVES = [
    (name, yaml.safe_load(block)["objective"])
    for name, block in re.findall(r"^([\w.+]+)[^\n]*\n```yaml\n(.*?)```", PAGE, re.S | re.M)
]


@pytest.fixture(scope="module")
def trio(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """All servers, the trainer with a reference model."""
    with harness.cluster(
        tmp_path_factory.mktemp("trio"),
        models,
        trainer={"reference_model": str(models.senior)},
        critic={},
    ) as running:
        yield running


def test_the_page_shows_every_method() -> None:
    names = [name for name, _ in OBJECTIVES]
    assert names == [
        *("GRPO", "Dr.GRPO", "DAPO", "GSPO", "CISPO", "RLOO"),
        *("REINFORCE++", "REINFORCE++", "PPO", "PPO", "MIS"),
    ]
    assert len(names) == PAGE.count("```yaml")


@pytest.mark.parametrize(("name", "objective"), OBJECTIVES, ids=[name for name, _ in OBJECTIVES])
def test_an_objective_of_the_page_trains(
    trio: LocalCluster,
    models: harness.Models,
    tmp_path: Path,
    name: str,
    objective: dict[str, Any],
) -> None:
    """Two steps of it, with a loss that is a number and a gradient that is not 0."""
    config = harness.run_settings(
        tmp_path, models, trio, steps=2, objective=objective, start_from="served"
    )
    steps = harness.json_lines(harness.run_training(config) / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["loss/total"])
        assert step["policy/grad_norm"] > 0
        assert abs(step["policy/mean_ratio"] - 1) < 1e-5, name  # the rollout is fresh
