"""The JSON schema of run files accepts ours, and refuses what the client refuses."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml
from check_layers import REPOSITORY

SCHEMA = json.loads((REPOSITORY / "docs/reference/run-file.schema.json").read_text())
RUN_FILES = sorted(
    path
    for path in (REPOSITORY / "examples").rglob("*.yaml")
    if "run_dir" in (yaml.safe_load(path.read_text()) or {})
)


def problems(values: dict) -> list[str]:
    errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)
    return [f"{error.json_path}: {error.message}" for error in errors]


def test_an_example_fits_the_schema(subtests):
    for path in RUN_FILES:
        with subtests.test(path=path):
            assert problems(yaml.safe_load(path.read_text())) == []


def test_there_are_examples():
    assert len(RUN_FILES) > 10


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"stepz": 3}, "$"),
        ({"steps": "three"}, "$.steps"),
        ({"data": {"jsonl": "rows.jsonl", "limit": 0}}, "$.data.limit"),
        ({"objective": {"advantage_estimator": "grpo"}}, "$.objective.advantage_estimator"),
        ({"eval": {"data": {"lines": "rows.jsonl"}}}, "$.eval.data"),
    ],
)
def test_a_mistake_is_found_by_an_editor(change, place):
    values = {"run_dir": "run", "tokenizer": "model", "data": {"jsonl": "rows.jsonl"}} | change
    assert [found for found in problems(values) if found.startswith(place)]


def test_every_setting_of_an_objective_is_described():
    for section in ("ObjectiveSettings", "DistillationSettings"):
        fields = SCHEMA["$defs"][section]["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []
