"""A short version of `make chaos`."""

from __future__ import annotations

import kills
import pytest


# test_training_laws.py and test_runs.py resume runs that were killed at chosen places.
@pytest.mark.slow
def test_a_run_whose_processes_are_killed_ends_as_if_undisturbed(tmp_path):
    chaos = kills.Chaos(tmp_path, seed=2)
    # Run 1 is PPO, with servers that it starts itself.
    chaos.go(kills=2, first=1)
    assert chaos.kills == 2
