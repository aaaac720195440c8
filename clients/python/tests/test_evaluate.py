"""Evaluations against fake servers."""

import pytest

from tandem import settings
from tandem.evaluate import evaluate
from tandem.session import Session
from tandem.settings import RunSettings


@pytest.fixture
def config(run_file):
    overrides = ["eval.samples=3", "eval.temperature=1.0", "reward.answer_pattern=w.$"]
    return settings.load(RunSettings, run_file, overrides)


def test_batches_are_bounded_and_change_nothing(world, config):
    with Session(config) as session:
        whole = evaluate(session)
    assert len(world.batches) == 1
    world.batches.clear()
    # Two prompts of three samples each fit in eight.
    world.max_queue = 8
    with Session(config) as session:
        assert evaluate(session) == whole
    assert len(world.batches) == 10
