"""Evaluations against fake servers."""

import pytest

from tandem import evaluate as module
from tandem import settings
from tandem.evaluate import evaluate
from tandem.session import Session
from tandem.settings import RunSettings


@pytest.fixture
def config(run_file):
    overrides = ["eval.samples=3", "eval.temperature=1.0", "reward.answer_pattern=w.$"]
    return settings.load(RunSettings, run_file, overrides)


def test_batches_are_bounded_and_change_nothing(world, config, monkeypatch):
    with Session(config) as session:
        whole = evaluate(session)
        assert [method for method, _ in world.calls].count("Generate") == 1
        world.calls.clear()
        # Two prompts of three samples each fit in eight.
        monkeypatch.setattr(module, "SEQUENCES_PER_BATCH", 8)
        assert evaluate(session) == whole
    assert [method for method, _ in world.calls].count("Generate") == 10


def test_a_prompt_with_more_samples_than_a_batch_travels_alone(world, config, monkeypatch):
    monkeypatch.setattr(module, "SEQUENCES_PER_BATCH", 2)
    with Session(config) as session:
        result = evaluate(session)
    assert [len(group) for group in result.trajectories] == [3] * 20
    assert [method for method, _ in world.calls].count("Generate") == 20
