"""A short version of `make chaos`."""

from __future__ import annotations

import kills
import pytest


# test_training_laws.py and test_runs.py resume runs that were killed at chosen places.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "async-lora"])
def test_a_run_whose_processes_are_killed_ends_as_if_undisturbed(tmp_path, kind):
    chaos = kills.Chaos(tmp_path, seed=2, kinds=[kind])
    # Run 0 has servers that it starts itself.
    chaos.go(kills=2)
    assert chaos.kills == 2
    [run] = tmp_path.glob(f"{kind}/undisturbed")
    saved = [name for name in kills.fingerprint(run) if name.endswith(".safetensors")]
    assert any("adapter_model" in name for name in saved) == (kind == "async-lora")
