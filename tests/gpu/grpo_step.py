"""Two steps of tandem GRPO with three real processes: grpo_step.py MODELS DEVICE DTYPE"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import harness


def main() -> None:
    """Trains, and checks that the rollout server serves what was trained."""
    models, device, dtype = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    compute = {"device": device, "dtype": dtype, "num_threads": 1}
    if device == "cpu":
        compute["kernels"] = "aten"
    pair = harness.Models(models / "senior", models / "junior", models / "other")
    with tempfile.TemporaryDirectory() as folder:
        sections = {"rollout": {"compute": compute}, "trainer": {"compute": compute}}
        with harness.cluster(Path(folder) / "cluster", pair, **sections) as cluster:
            steps: list[dict] = []
            settings = harness.run_settings(Path(folder), pair, cluster, steps=2)
            harness.run_training(settings, on_step=steps.append)
            with (
                harness.rollout_client(cluster) as rollout,
                harness.trainer_client(cluster) as trainer,
            ):
                served, trained = rollout.info().server.weights, trainer.info().server.weights
    numbers = [value for step in steps for value in step.values() if isinstance(value, float)]
    assert len(steps) == 2, steps
    assert all(map(math.isfinite, numbers)), steps
    assert served.version == trained.version == 2, (served, trained)
    assert served.digest == trained.digest, (served, trained)
    print(f"2 steps on {device} in {dtype}, version 2 with digest {served.digest[:8]} is served")


if __name__ == "__main__":
    main()
