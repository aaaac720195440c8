"""A short version of `make soak-rollout`, and what its checks notice."""

from __future__ import annotations

import json

import harness
import pytest
from rollout_soak import RolloutSoak, require_expected_log
from soak_configurations import CONFIGURATIONS
from soak_replays import Replays
from steadiness import DisturbanceError

SECONDS = 8
CONFIGURATION = CONFIGURATIONS["bfloat16-int8"]


def test_a_server_short_of_cache_answers_as_an_idle_one(tmp_path):
    models = harness.make_models(tmp_path / "models")
    soak = RolloutSoak(CONFIGURATION, models, tmp_path, seed=1)
    soak.run(SECONDS, clients=4, patience=0.5)
    assert soak.preemptions > 0
    assert soak.replays.samples > 0
    assert soak.replays.log_probs > 0

    # One bit of one kept log-prob is enough.
    workload = soak.workload
    prompt, trajectory = workload.kept[0]
    data = bytearray(trajectory.author_logprobs.data)
    data[0] ^= 1
    trajectory.author_logprobs.data = bytes(data)
    workload.kept = [(prompt, trajectory)]
    workload.scored = []
    with pytest.raises(DisturbanceError):
        Replays(CONFIGURATION, workload).compare(tmp_path / "again", models)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"level": "info", "event": "listening"}, True),
        ({"event": "listening"}, True),
        ({"level": "warning", "event": "rpc_handled", "grpc_code": "INVALID_ARGUMENT"}, True),
        ({"level": "warning", "event": "rpc_handled", "grpc_code": "UNAVAILABLE"}, False),
        ({"level": "error", "event": "rpc_handled", "grpc_code": "INTERNAL"}, False),
        ({"level": "warning", "event": "stream_given_up"}, False),
    ],
)
def test_a_line_of_the_log_that_no_client_provoked_is_noticed(tmp_path, line, expected):
    log = tmp_path / "log"
    log.write_text(json.dumps(line) + "\n")
    if expected:
        require_expected_log(log)
    else:
        with pytest.raises(DisturbanceError):
            require_expected_log(log)
