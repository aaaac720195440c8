"""The promises of docs/operations/upgrade.md about files and calls of other versions."""

from __future__ import annotations

import json
import subprocess

import grpc
import harness
import pytest
import tandem
from tandem._proto.trainer.v1 import trainer_pb2
from tandem.cluster.local import find_binary
from tandem.errors import DataLossError


@pytest.fixture
def checkpoint(trainer, tmp_path):
    """A checkpoint, and a function that changes entries of its manifest (None removes one)."""
    path = tmp_path / "checkpoints" / "step_1"
    trainer.save_checkpoint(str(path.parent), path.name)
    manifest = path / "manifest.json"

    def change(**entries):
        values = json.loads(manifest.read_text()) | entries
        kept = {key: value for key, value in values.items() if value is not None}
        manifest.write_text(json.dumps(kept))

    return path, change


def test_a_checkpoint_of_another_format_is_refused_by_name(trainer, checkpoint):
    path, change = checkpoint
    change(version=4)
    with pytest.raises(DataLossError, match="has a version that this build does not support"):
        trainer.load_checkpoint(str(path))


def test_a_checkpoint_without_the_newer_entries_of_its_format_loads(trainer, checkpoint):
    path, change = checkpoint
    before = trainer.info().server.weights.digest
    change(name=None, run_id=None)
    assert trainer.load_checkpoint(str(path)).digest == before


def test_servers_pass_over_fields_of_newer_clients(fresh_pair):
    call = "/tandem.trainer.v1.TrainerService/GetServerInfo"
    # Field 1000, which no message has, with the value 7.
    newer = b"\xc0\x3e\x07"
    with grpc.insecure_channel(fresh_pair.trainer.address) as channel:
        reply = channel.unary_unary(call)(newer)
    with harness.trainer_client(fresh_pair) as trainer:
        known = trainer_pb2.GetServerInfoResponse.FromString(reply).server
        assert known.weights == trainer.info().server.weights


@pytest.mark.parametrize("role", ["rollout", "trainer", "critic"])
def test_servers_and_client_have_one_version(role):
    server = find_binary(f"tandem-{role}-server")
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"tandem-{role}-server {tandem.__version__}\n"


def test_a_method_that_a_server_lacks_is_unimplemented(pair):
    with grpc.insecure_channel(pair.trainer.address) as channel:
        method = channel.unary_unary("/tandem.trainer.v1.TrainerService/OfTheFuture")
        with pytest.raises(grpc.RpcError) as caught:
            method(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
