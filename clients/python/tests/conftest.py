"""Fixtures: fake servers and a run against them."""

from __future__ import annotations

import json

import fakes
import pytest
import yaml


@pytest.fixture
def world():
    """The state that the fake servers share."""
    return fakes.FakeWorld()


@pytest.fixture
def address(world, tmp_path):
    """The address at which all fake services listen."""
    with fakes.serve(world, str(tmp_path / "model")) as address:
        yield address


@pytest.fixture
def run_file(address, tmp_path):
    """The file of a run on the fake servers."""
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(2, 22)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fakes.write_tokenizer(tmp_path / "model")
    config = {
        "run_dir": str(tmp_path / "run"),
        "steps": 4,
        "tokenizer": str(tmp_path / "model"),
        "servers": {"rollout": [address], "trainer": address},
        "data": {"jsonl": str(tmp_path / "rows.jsonl")},
        "batch": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "sampling": {"max_tokens": 6},
        "eval": {"handoff_boundary": "7"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
