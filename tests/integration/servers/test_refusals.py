"""Bad requests are refused with the path of their field, and the server goes on."""

from __future__ import annotations

import copy
import dataclasses
import math
import struct

import harness
import pytest
from harness import TANDEM, prompts
from tandem.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    RpcError,
    ServerStartError,
)
from tandem.rpc.requests import PolicySample, Prompt, SupervisedSample, submit, train_step
from tandem.rpc.wire import to_tensor

# Where refuse() damages a batch.
PLACE = "samples[1].trajectory."


def two_samples(client) -> list[PolicySample]:
    """Samples of one group whose rewards differ."""
    [group] = client.generate(prompts(1, TANDEM["word"], num_samples=2, return_other_logprobs=True))
    return [PolicySample(t, "g", reward=float(i)) for i, t in enumerate(group)]


@pytest.fixture(scope="module")
def good(pair):
    """Two samples of one group that the trainer would accept."""
    with harness.rollout_client(pair) as client:
        return two_samples(client)


def clear_mask(t):
    t.authorship_mask = b""


def short_mask(t):
    t.authorship_mask = t.authorship_mask[:-1]


def strange_mask(t):
    t.authorship_mask = b"\x02" + t.authorship_mask[1:]


def no_logprobs(t):
    t.ClearField("author_logprobs")


def short_logprobs(t):
    t.author_logprobs.CopyFrom(to_tensor([-1.0]))


def nan_logprobs(t):
    t.author_logprobs.data = struct.pack("<f", math.nan) + t.author_logprobs.data[4:]


def infinite_logprobs(t):
    t.author_logprobs.data = struct.pack("<f", -math.inf) + t.author_logprobs.data[4:]


def cut_tensor(t):
    t.author_logprobs.data = t.author_logprobs.data[:-1]


def short_other(t):
    t.other_logprobs.CopyFrom(to_tensor([-1.0]))


def no_versions(t):
    t.ClearField("senior_versions")


def short_versions(t):
    t.senior_versions[0].count -= 1


def no_digest(t):
    t.senior_versions[0].weights.digest = ""


def no_response(t):
    t.ClearField("response_token_ids")


def no_prompt(t):
    t.ClearField("prompt_token_ids")


def large_id(t):
    t.response_token_ids[2] = 10**6


def negative_id(t):
    t.prompt_token_ids[1] = -1


def no_finish_reason(t):
    t.finish_reason = 0


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (clear_mask, "authorship_mask"),
        (short_mask, "authorship_mask"),
        (strange_mask, "authorship_mask[0]"),
        (no_logprobs, "author_logprobs"),
        (short_logprobs, "author_logprobs"),
        (nan_logprobs, "author_logprobs[0]"),
        (infinite_logprobs, "author_logprobs[0]"),
        (cut_tensor, "author_logprobs.data"),
        (short_other, "other_logprobs"),
        (no_versions, "senior_versions"),
        (short_versions, "senior_versions"),
        (no_digest, "senior_versions[0].weights.digest"),
        (no_response, "response_token_ids"),
        (no_prompt, "prompt_token_ids"),
        (large_id, "response_token_ids[2]"),
        (negative_id, "prompt_token_ids[1]"),
        (no_finish_reason, "finish_reason"),
    ],
)
def test_a_damaged_trajectory_is_refused_with_its_field(trainer, good, damage, field):
    refused = refuse(trainer, good, damage, InvalidArgumentError)
    assert refused.field == PLACE + field


def test_an_unknown_policy_version_is_refused(trainer, good):
    def future(t):
        t.senior_versions[0].weights.version = 7

    refused = refuse(trainer, good, future, FailedPreconditionError)
    assert refused.reason == "UNKNOWN_POLICY_VERSION"
    assert refused.field == PLACE + "senior_versions[0].weights.version"


def test_other_weights_of_a_known_version_are_refused(trainer, good):
    def other(t):
        t.senior_versions[0].weights.digest = "0" * 32

    refused = refuse(trainer, good, other, FailedPreconditionError)
    assert refused.reason == "WEIGHTS_DIFFER"
    assert refused.field == PLACE + "senior_versions[0].weights.digest"
    assert refused.hint


def test_a_too_old_policy_version_is_refused_unless_allowed(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as client,
    ):
        samples = two_samples(rollout)
        client.train_step(samples, run_id="r", step=1, expected_version=0)
        with pytest.raises(FailedPreconditionError) as caught:
            client.train_step(samples, run_id="r", step=2, expected_version=1)
        assert caught.value.reason == "TRAJECTORY_TOO_OLD"
        allowed = client.train_step(
            samples, run_id="r", step=2, expected_version=1, objective={"max_staleness": 1}
        )
        assert allowed.report.weights.version == 2
        dropped = client.train_step(
            samples, run_id="r", step=3, expected_version=2, objective={"stale_samples": "drop"}
        )
        assert dropped.report.skipped
        assert dropped.report.metrics["policy/dropped_samples"] == len(samples)


def test_a_trajectory_of_another_lineage_is_refused(fresh_pair, tmp_path):
    """Its version number is known, but a checkpoint was loaded and other steps were trained."""
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as client,
    ):
        samples = two_samples(rollout)
        start = client.save_checkpoint(str(tmp_path), "start")
        client.train_step(samples, run_id="r", step=1, expected_version=0)
        old = client.info().server.weights
        client.load_checkpoint(start)
        other = [dataclasses.replace(sample, reward=-sample.reward) for sample in samples]
        client.train_step(other, run_id="r", step=1, expected_version=0)
        for sample in samples:
            for run in sample.trajectory.senior_versions:
                run.weights.CopyFrom(old)
        with pytest.raises(FailedPreconditionError) as caught:
            client.train_step(samples, run_id="r", step=2, expected_version=1)
        assert caught.value.reason == "WEIGHTS_DIFFER"
        path = "samples[0].trajectory.senior_versions[0].weights.digest"
        assert caught.value.field == path


def test_a_missing_reward_is_refused(trainer, good):
    samples = [good[0], PolicySample(good[1].trajectory, "g")]
    with pytest.raises(InvalidArgumentError) as caught:
        send(trainer, samples)
    assert caught.value.field == "samples[1].reward"
    with pytest.raises(InvalidArgumentError) as caught:
        send(trainer, [good[0], PolicySample(good[1].trajectory, "g", reward=math.nan)])
    assert caught.value.field == "samples[1].reward"


def test_log_probs_of_the_senior_on_junior_tokens_are_needed(trainer, good):
    def forget_other(t):
        t.ClearField("other_logprobs")
        # The junior wrote every token, and the senior's log-probs of them are missing.
        t.authorship_mask = bytes(len(t.authorship_mask))

    refused = refuse(trainer, good, forget_other, InvalidArgumentError, junior_weight=0.5)
    assert refused.field == PLACE + "other_logprobs"


def test_a_stream_must_hold_as_many_samples_as_it_says(trainer, good):
    messages = train_step(good, run_id="r", step=1, expected_version=0, objective={})
    for wrong in (messages[:-1], [*messages, messages[-1]], messages[1:], []):
        with pytest.raises(InvalidArgumentError):
            trainer.send_train_step(wrong)
    assert trainer.info().server.weights.version == 0


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        ({"junior_token_loss_weight": 1.5}, "junior_token_loss_weight"),
        ({"importance_sampling_cap": -1.0}, "importance_sampling_cap"),
        ({"clip_ratio_high": -0.1}, "clip_ratio_high"),
        ({"clip_ratio_low": -0.1}, "clip_ratio_low"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "norm_constant"),
        ({"distillation": {"coefficient": -0.1}}, "distillation.coefficient"),
        ({"distillation": {"top_k": 129}}, "distillation.top_k"),
        ({"distillation": {"kind": "jensen_shannon", "beta": 1.0}}, "distillation.beta"),
    ],
)
def test_an_impossible_objective_is_refused(trainer, good, objective, field):
    with pytest.raises(InvalidArgumentError) as caught:
        send(trainer, good, objective)
    assert caught.value.field == f"header.policy.{field}"


def test_an_impossible_supervised_objective_is_refused(trainer):
    with pytest.raises(InvalidArgumentError) as caught:
        send(trainer, [SupervisedSample([5], [6])], {"aggregation": "seq_mean_token_sum_norm"})
    assert caught.value.field == "header.supervised.aggregation"


@pytest.mark.parametrize(
    ("change", "field", "error"),
    [
        ({"token_ids": []}, "prompt_token_ids", InvalidArgumentError),
        ({"token_ids": [3, 10**6]}, "prompt_token_ids[1]", InvalidArgumentError),
        ({"sampling": {}}, "sampling", InvalidArgumentError),
        ({"sampling": {"top_k": 3}}, "sampling.max_tokens", InvalidArgumentError),
        ({"sampling": {"max_tokens": 5, "top_p": 0.0}}, "sampling.top_p", InvalidArgumentError),
        (
            {"sampling": {"max_tokens": 5, "stop": ["a", ""]}},
            "sampling.stop[1]",
            InvalidArgumentError,
        ),
        (
            {"sampling": {"max_tokens": 5, "temperature": -1.0}},
            "sampling.temperature",
            InvalidArgumentError,
        ),
        ({"tandem": {"prob_senior": 1.5}}, "tandem.prob_senior", InvalidArgumentError),
        (
            {"tandem": {"selection_strategy": "word", "boundary_token_ids": [10**6]}},
            "tandem.boundary_token_ids[0]",
            InvalidArgumentError,
        ),
        ({"num_samples": -1}, "num_samples", InvalidArgumentError),
        # The senior is dense.
        ({"return_routed_experts": True}, "return_routed_experts", InvalidArgumentError),
        ({"token_ids": [5] * 128}, "prompt_token_ids", OutOfRangeError),
    ],
)
def test_an_impossible_prompt_is_refused_and_its_neighbours_are_answered(
    rollout, change, field, error
):
    values = {"token_ids": [3, 4], "sampling": {"max_tokens": 5}, "request_id": "bad"}
    bad = Prompt(**(values | change))
    fine = Prompt([3, 4], sampling={"max_tokens": 5}, request_id="fine")
    with pytest.raises(error) as caught:
        rollout.generate([bad])
    assert caught.value.field == field

    kinds = {}
    for event in rollout.stream(submit([bad, fine])):
        kind = event.WhichOneof("event")
        kinds[getattr(event, kind).request_id] = kind
    assert kinds == {"bad": "failed", "fine": "finished"}


def test_a_reference_that_the_trainer_lacks_is_refused(trainer):
    with pytest.raises(FailedPreconditionError) as refused:
        trainer.compute_log_probs([SupervisedSample([5], [6])], reference=True)
    assert refused.value.reason == "NO_REFERENCE_MODEL"
    assert refused.value.field == "requests[0].reference"


def test_a_score_of_no_model_is_refused(rollout):
    with pytest.raises(InvalidArgumentError) as caught:
        rollout.score([([3, 4], 1)], senior=False, junior=False)
    assert caught.value.field == "senior"


def test_tandem_without_a_junior_is_refused(models, tmp_path):
    with (
        harness.cluster(tmp_path, models, rollout={"junior_model": ""}) as running,
        harness.rollout_client(running) as client,
    ):
        with pytest.raises(FailedPreconditionError):
            client.generate(prompts(1, TANDEM["word"] | {"enabled": True}))
        assert client.generate(prompts(1, {"enabled": False}))
        with pytest.raises(FailedPreconditionError) as caught:
            client.score([([3, 4], 1)], junior=True)
        assert (caught.value.field, caught.value.reason) == ("junior", "NO_JUNIOR")


def test_a_junior_with_another_vocabulary_is_refused_at_load(models, tmp_path):
    other = {"junior_model": str(models.other_vocabulary)}
    with (
        pytest.raises(ServerStartError, match="senior and junior have different vocabularies"),
        harness.cluster(tmp_path, models, rollout=other),
    ):
        pass


def refuse(trainer, good, damage, error, junior_weight=0.0) -> RpcError:
    """Trains on a damaged copy; returns the refusal after checking that nothing changed."""
    copies = copy.deepcopy(good)
    damage(copies[1].trajectory)
    before = trainer.info().server.weights
    with pytest.raises(error) as caught:
        send(trainer, copies, {"junior_token_loss_weight": junior_weight})
    assert caught.value.request_id
    assert trainer.info().server.weights == before
    assert trainer.health() == "SERVING"
    return caught.value


def send(trainer, samples, objective=None):
    return trainer.train_step(
        samples, run_id="r", step=1, expected_version=0, objective=objective or {}
    )
