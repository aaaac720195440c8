"""Short versions of `make soak` and `make chaos`."""

from __future__ import annotations

import harness
import kills
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from soak import Replies, Soak
from steadiness import DisturbanceError, serving

SOAK_SECONDS = 6


def test_clients_at_random_change_nothing(tmp_path):
    with serving(tmp_path / "run", harness.make_models(tmp_path / "models")) as servers:
        soak = Soak(servers, seed=1)
        soak.run(SOAK_SECONDS, clients=4)
    assert soak.replies.compared > 0
    assert {server.process.returncode for server in servers} == {0}


def test_another_reply_to_the_same_request_is_noticed():
    replies = Replies()
    replies.expect("request", "weights", StringValue(value="a"))
    replies.expect("request", "weights", StringValue(value="a"))
    replies.expect("request", "other weights", StringValue(value="b"))
    assert replies.compared == 1
    with pytest.raises(DisturbanceError):
        replies.expect("request", "weights", StringValue(value="b"))


def test_a_run_whose_processes_are_killed_ends_as_if_undisturbed(tmp_path):
    chaos = kills.Chaos(tmp_path, seed=2)
    # Run 1 is PPO, with servers that it starts itself.
    chaos.go(kills=2, first=1)
    assert chaos.kills == 2
