"""Every objective on the pages of objectives, and in the recipes that they name, trains."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from tandem.cluster.local import LocalCluster

GUIDES = harness.REPOSITORY / "docs/guides"
PAGES = ("losses/objectives", "losses/ppo", "losses/kl", "losses/off-policy", "experts")
TEXT = "".join((GUIDES / f"{page}.md").read_text() for page in PAGES)
PAIRS = (GUIDES / "losses/preferences.md").read_text()
RECIPES = sorted(set(re.findall(r"\((?:\.\./)+(examples/recipes/\w+)\.yaml\)", TEXT + PAIRS)))


def objectives() -> Iterator[tuple[str, dict[str, Any]]]:
    """The objectives as sections of a run, each with a name.

    A recipe is named by its file, a YAML block of a page by the first word of its paragraph.
    """
    for recipe in RECIPES:
        values = yaml.safe_load((harness.REPOSITORY / f"{recipe}.yaml").read_text())
        if "objective" in values:
            yield Path(recipe).name, {"objective": values["objective"]}
    # A paragraph and the YAML block below it that says that it is tested here.
    tested = r"<!-- tested by tests/integration/runs/test_objectives\.py -->"
    pattern = rf"\n\n([\w.+]+)(?:(?!\n\n).)*\n\n{tested}\n\n```yaml\n(.*?)```"
    for name, block in re.findall(pattern, TEXT, re.S):
        yield name, yaml.safe_load(block)


OBJECTIVES = list(objectives())


@pytest.fixture(scope="module")
def trio(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A rollout server, a critic, and a trainer with a reference model and the junior."""
    with harness.cluster(
        tmp_path_factory.mktemp("trio"),
        models,
        trainer={
            "reference_model": str(models.senior),
            "junior_model": str(models.junior),
        },
        critic={},
    ) as running:
        yield running


def test_the_pages_name_every_recipe() -> None:
    files = (harness.REPOSITORY / "examples/recipes").glob("*.yaml")
    assert [Path(recipe).name for recipe in RECIPES] == sorted(
        {file.stem for file in files} - {"cluster"}
    )
    blocks = ["PPO", "RLHF", "Distillation", "MIS", "Rejection"]
    of_recipes = {Path(recipe).name for recipe in RECIPES}
    assert [name for name, _ in OBJECTIVES if name not in of_recipes] == blocks
    of_clusters = TEXT.count("<!-- part of a cluster file -->")
    of_experts = TEXT.count("test_experts.py -->\n\n```yaml")
    assert TEXT.count("```yaml") == len(blocks) + of_clusters + of_experts


@pytest.mark.parametrize(("name", "sections"), OBJECTIVES, ids=[name for name, _ in OBJECTIVES])
def test_an_objective_of_the_pages_trains(
    trio: LocalCluster,
    models: harness.Models,
    tmp_path: Path,
    name: str,
    sections: dict[str, Any],
) -> None:
    """Each of two steps has a finite loss and a gradient that is not 0."""
    config = harness.run_settings(tmp_path, models, trio, steps=2, start_from="served", **sections)
    steps = harness.json_lines(harness.run_training(config) / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    objective = sections["objective"]
    updates = objective.get("num_mini_batches", 1) * objective.get("num_epochs", 1)
    for step in steps:
        assert step["policy/updates"] == updates
        assert math.isfinite(step["loss/total"])
        assert step["policy/grad_norm"] > 0
        if updates == 1:
            assert abs(step["policy/mean_ratio"] - 1) < 1e-5, name  # the rollout is fresh
        has = {
            "reward/kl_penalty": objective.get("kl_placement") == "reward",
            "policy/kl_coefficient": "kl_coefficient" in objective,
            "loss/junior_kl": "junior_kl_coefficient" in objective,
            "mismatch/rejected_fraction": "rejection_upper" in objective,
            "time/reference_seconds": "reference" in sections,
        }
        assert {key: step[key] is not None for key in has} == has
