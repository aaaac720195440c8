"""Fixtures: fake servers and a run against them."""

from __future__ import annotations

import json
import logging

import fakes
import pytest
import yaml

from tandem.run_directory.log import handled_by, shown


class Notes(list):
    """Messages; `on_note` is called with each."""

    def __init__(self):
        super().__init__()
        self.on_note = lambda text: None
        self.handler = logging.Handler()
        self.handler.emit = self._take

    def _take(self, record):
        text = shown(record)
        if text is not None:
            self.append(text)
            self.on_note(text)


@pytest.fixture
def notes():
    """The messages of the package during the test, as the command line would print them."""
    told = Notes()
    with handled_by(told.handler):
        yield told


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
