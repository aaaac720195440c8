"""A short version of `make soak`."""

from __future__ import annotations

import harness
import pytest
from cluster_soak import Replies, Soak
from google.protobuf.wrappers_pb2 import StringValue
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
