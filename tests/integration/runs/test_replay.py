"""A recorded run, replayed on other servers of the same models."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
from commands import tandem
from tandem.cluster.local import LocalCluster
from tandem.errors import FailedPreconditionError
from tandem.recording import files as recording
from tandem.rpc.requests import Prompt, SupervisedSample
from tandem.rpc.transport import RECORD_VARIABLE


def recorded_run(models: harness.Models, directory: Path, running: LocalCluster, file: Path):
    """Two steps of GRPO with tandem, and two requests that the servers refuse."""
    recording.create(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD_VARIABLE, str(file))
        metrics = harness.run_on(running, models, directory, steps=2)
        assert [line["step"] for line in metrics] == [1, 2]
        with harness.trainer_client(running) as trainer, harness.rollout_client(running) as rollout:
            with pytest.raises(FailedPreconditionError, match="STALE_POLICY_VERSION"):
                trainer.train_step(
                    [SupervisedSample([5, 6], [7, 8])], run_id="r", step=1, expected_version=99
                )
            with pytest.raises(Exception, match="INVALID_ARGUMENT"):
                rollout.generate([Prompt([5, 6], sampling={"top_k": -1})])


def addresses(old: LocalCluster, new: LocalCluster) -> list[str]:
    """The options that send the calls of one cluster to another."""
    pairs = zip([*old.rollouts, old.trainer], [*new.rollouts, new.trainer], strict=True)
    return [word for a, b in pairs for word in ("--map", f"{a.address}={b.address}")]


def test_a_run_replays_to_the_same_bits_on_fresh_servers(models, tmp_path):
    file, run = tmp_path / "run.rec", tmp_path / "run"
    with harness.cluster(tmp_path / "first", models, rollouts=2, trainer={}) as first:
        recorded_run(models, tmp_path, first, file)
    printed = tandem("replay", file, "--print").stdout
    for method in ("Generate", "TrainStep", "PublishWeights", "SaveCheckpoint"):
        assert f'Service/{method}", "kind": "end", "code": "OK"' in printed
    assert '"code": "FAILED_PRECONDITION"' in printed
    with harness.cluster(tmp_path / "second", models, rollouts=2, trainer={}) as second:
        options = [*addresses(first, second), "--map", f"{run}={tmp_path / 'again'}"]
        shown = tandem("replay", file, *options).stdout
        assert "all as recorded" in shown
        with harness.trainer_client(second) as trainer:
            assert trainer.info().server.weights.version == 2
        # Now the servers hold other weights than those with which the recording began.
        assert (
            "recorded" in tandem("replay", file, *options, "--only", "GetVersion", check=1).stdout
        )
    for checkpoint in ("run", "again"):
        assert (tmp_path / checkpoint / "checkpoints" / "step_000002" / "config.json").exists()


def test_other_weights_are_named_by_their_first_difference(models, tmp_path):
    file = tmp_path / "generate.rec"
    recording.create(file)
    senior = {"senior_model": str(models.senior)}
    with (
        harness.cluster(tmp_path / "first", models, rollout=senior) as first,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(RECORD_VARIABLE, str(file))
        with harness.rollout_client(first) as client:
            client.score([([5, 6, 7], 1)])
    other = {"senior_model": str(models.junior)}
    with harness.cluster(tmp_path / "second", models, rollout=other) as second:
        pair = f"{first.rollouts[0].address}={second.rollouts[0].address}"
        shown = tandem("replay", file, "--map", pair, check=1).stdout
    assert "response 1: sequences[0].senior_logprobs[0]\n  recorded -" in shown
