"""The sources of the reference policy's log-probabilities."""

import json

import fakes
import numpy as np
import pytest
from commands import lines, tandem

from tandem.rpc.wire import from_tensor

KL = "objective.kl_coefficient=0.1"


@pytest.fixture
def judge():
    """A second rollout server, whose senior gives every token another log-probability."""
    other = fakes.FakeWorld()
    other.logprob["senior"] = lambda token: -token / 64
    with fakes.serve(other) as address:
        yield other, address


def scores(sample):
    """Log-probabilities of the response by the senior of `judge`."""
    return [-token / 64 for token in sample.trajectory.response_token_ids]


def test_without_a_setting_the_trainer_has_the_reference(run_file, world, sent, tmp_path):
    tandem("train", run_file, KL, "steps=1")
    assert not any(sample.HasField("reference_logprobs") for sample in sent)
    assert world.headers[0].policy.reference_logprobs == 0
    assert world.scores == 0
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["time/reference_seconds"] is None


def test_the_junior_s_recorded_log_probabilities_are_the_reference(run_file, world, sent, tmp_path):
    tandem("train", run_file, KL, "reference=junior", "steps=1")
    assert world.headers[0].policy.reference_logprobs == 2  # PROVIDED
    assert world.scores == 0
    assert len(sent) == 6
    for sample in sent:
        response = sample.trajectory
        senior = np.frombuffer(response.authorship_mask, np.uint8) == 1
        given = from_tensor(sample.reference_logprobs)
        np.testing.assert_array_equal(given[senior], from_tensor(response.other_logprobs)[senior])
        np.testing.assert_array_equal(
            given[~senior], from_tensor(response.author_logprobs)[~senior]
        )
    both = b"".join(sample.trajectory.authorship_mask for sample in sent)
    assert set(both) == {0, 1}
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["time/reference_seconds"] > 0


@pytest.mark.parametrize("without", ["return_other_logprobs=false", "tandem.enabled=false"])
def test_log_probabilities_of_the_junior_that_are_not_recorded_come_from_score(
    run_file, world, sent, without
):
    world.logprob["junior"] = lambda token: -token / 64
    tandem("train", run_file, KL, "reference=junior", "steps=1", without, "sampling.temperature=0")
    assert world.scores == 1
    # Log-probabilities of greedy responses are those at temperature 1.
    assert world.score_temperatures == [1.0]
    for sample in sent:
        assert from_tensor(sample.reference_logprobs) == pytest.approx(scores(sample))


def test_the_senior_of_another_server_is_the_reference(run_file, world, sent, judge, tmp_path):
    other, address = judge
    other.published, other.served_digest = 3, "base"
    tandem("train", run_file, KL, f"reference='{address}'", "sampling.temperature=0.5", "steps=2")
    assert (world.scores, other.scores) == (0, 2)
    assert other.score_temperatures == [0.5, 0.5]
    assert len(sent) == 12
    for sample in sent:
        assert from_tensor(sample.reference_logprobs) == pytest.approx(scores(sample))
    assert from_tensor(sent[0].reference_logprobs).dtype == np.float32
    servers = json.loads((tmp_path / "run" / "run.json").read_text())["servers"]
    assert servers["reference_weights"] == {"version": 3, "digest": "base"}
    assert servers["models"]["reference"]["parameters"] == 1000
    # A resumed run notices that the reference has other weights.
    other.served_digest = "other"
    done = tandem(
        *("train", run_file, KL, f"reference='{address}'", "sampling.temperature=0.5", "--resume"),
        check=2,
    )
    assert "servers.reference_weights.digest (base -> other)" in done.stderr


def test_a_reference_that_changes_ends_the_run(run_file, world, judge):
    other, address = judge

    def publish():
        other.published = other.scores - 1  # 0 in the first step, 1 in the second.

    other.on_batch = publish
    done = tandem("train", run_file, KL, f"reference='{address}'", check=1)
    assert f"reference: {address} holds version 1 with digest d" in done.stderr
    assert "the run began with version 0" in done.stderr
    assert "in step 2: saved after step 1" in done.stderr
    assert len(world.headers) == 1


def test_a_prompt_that_the_reference_cannot_hold_is_refused(run_file, judge):
    other, address = judge
    other.max_model_len = 2
    done = tandem("train", run_file, KL, f"reference='{address}'", check=2)
    assert "the prompt has 2 tokens" in done.stderr
