"""Fixtures of the tests of a session."""

import pytest


@pytest.fixture
def sent(world, monkeypatch):
    """The samples that the trainer receives, over all steps."""
    samples = []
    monkeypatch.setattr(world, "on_samples", samples.extend)
    return samples
