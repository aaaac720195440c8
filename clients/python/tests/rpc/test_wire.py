"""Tensors and messages of the contract, and records of trajectories."""

import datetime
import math

import fakes
import numpy as np
import pytest

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import objective_pb2
from tandem._proto.types.v1 import sampling_pb2, tensor_pb2, trajectory_pb2
from tandem.errors import ConfigError
from tandem.rpc.logprobs import LogProbs
from tandem.rpc.renamed import NEW_NAMES
from tandem.rpc.requests import PolicySample
from tandem.rpc.wire import from_tensor, short_floats, to_message, to_tensor
from tandem.run_directory.trajectories.record import Response, trajectory_record

KEYS = {
    "place", "row", "scores", "prompt_token_ids", "response_token_ids", "authorship_mask",
    "accepted_draft_mask", "vision_inputs",
    "senior_logprobs", "junior_logprobs", "log_keep_mass", "finish_reason", "text", "reward",
    "overlong_punishment", "group_id", "sample_index", "seed", "senior_versions", "junior_version",
    "sampling", "tandem",
}  # fmt: skip


def prompt(**changes):
    message = rollout_pb2.Prompt(prompt_token_ids=[1, 2], seed=7, **changes)
    message.sampling.max_tokens = 20
    message.tandem.prob_senior = 0.5
    return message


def test_tensors_survive_the_wire():
    values = np.array([[1.5, -2.0], [0.1, 3e-9]], np.float32)
    assert np.array_equal(from_tensor(to_tensor(values)), values)
    halves = tensor_pb2.Tensor(
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16, shape=[2], data=b"\x80\x3f\x00\xc0"
    )
    assert from_tensor(halves).tolist() == [1.0, -2.0]


def test_short_floats_read_back_to_the_same_float32():
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert np.array_equal(np.array(short_floats(values), np.float32), values)


def test_enums_go_by_short_name_and_unknown_ones_are_explained():
    objective = to_message(
        {"aggregation": "seq_mean_token_sum", "dual_clip": None, "clip_ratio_low": 0.1},
        objective_pb2.PolicyObjective(),
        "objective",
    )
    assert objective.aggregation == objective_pb2.AGGREGATION_SEQ_MEAN_TOKEN_SUM
    assert not objective.HasField("dual_clip")
    with pytest.raises(
        ConfigError,
        match=r"^tandem.selection_strategy: 'wrd' is not one of "
        "bernoul",
    ):
        to_message({"selection_strategy": "wrd"}, sampling_pb2.TandemConfig(), "tandem")


def test_a_value_that_does_not_fit_its_field_is_named(subtests):
    for values, message in [
        ({"prob": 1}, "tandem: TandemConfig has no field 'prob'"),
        (
            {"prob_primary": 1},
            "tandem: TandemConfig has no field 'prob_primary'; prob_primary is now prob_senior",
        ),
        ({"prob_senior": "half"}, "tandem.prob_senior: must be real number"),
        ({"prob_senior": [0.5]}, "tandem.prob_senior: "),
        ({"selection_strategy": 1.5}, "tandem.selection_strategy: "),
        ({"chunk_size": 2**31}, "tandem.chunk_size: Value out of range"),
        ({"boundary_token_ids": 7}, "tandem.boundary_token_ids: "),
        ({"boundary_token_ids": ["a"]}, "tandem.boundary_token_ids: "),
    ]:
        with subtests.test(values=values, message=message):
            with pytest.raises(ConfigError) as caught:
                to_message(values, sampling_pb2.TandemConfig(), "tandem")
            assert str(caught.value).startswith(message)


def test_an_old_name_is_refused_with_the_new_one(subtests):
    for message in [
        sampling_pb2.TandemConfig(),
        objective_pb2.PolicyObjective(),
        trajectory_pb2.Trajectory(),
    ]:
        for old in NEW_NAMES:
            said = f"; {old} is now {NEW_NAMES[old]}$"
            with subtests.test(old=old, message=message), pytest.raises(ConfigError, match=said):
                to_message({old: 1}, message, "request")


def test_record_sorts_log_probs_by_model():
    trajectory = fakes.sample(prompt(return_other_logprobs=True), 0, version=3)
    row = {"answer": 5, "bad": math.nan, "when": datetime.date(2026, 1, 2), "tags": ("a",)}
    record = trajectory_record(
        Response(trajectory, text="x", reward=0.5, group_id="g", place="rows:1", row=row)
    )
    assert set(record) == KEYS
    assert record["row"] == {"answer": 5, "bad": None, "when": "2026-01-02", "tags": ["a"]}
    author = from_tensor(trajectory.author_logprobs)
    other = from_tensor(trajectory.other_logprobs)
    mask = np.frombuffer(trajectory.authorship_mask, np.uint8)
    assert set(mask) == {0, 1}
    senior, junior = np.where(mask, author, other), np.where(mask, other, author)
    assert np.array_equal(np.array(record["senior_logprobs"], np.float32), senior)
    assert np.array_equal(np.array(record["junior_logprobs"], np.float32), junior)
    assert record["senior_versions"] == [[3, len(mask), "d"]]
    assert record["tandem"]["selection_strategy"] == "bernoulli"


def test_marks_of_drafts_are_recorded_and_no_part_of_a_step():
    trajectory = fakes.sample(prompt(), 0, 0)
    marks = [index % 2 for index in range(len(trajectory.response_token_ids))]
    trajectory.accepted_draft_mask = bytes(marks)
    assert trajectory_record(Response(trajectory, ""))["accepted_draft_mask"] == marks
    sent = PolicySample(trajectory, "g").messages()[0].policy_sample.trajectory
    assert not sent.accepted_draft_mask
    assert sent.response_token_ids == trajectory.response_token_ids


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 10_000_000])
def test_a_record_of_routing_larger_than_a_message_travels_in_parts(size):
    trajectory = fakes.sample(prompt(), 0, 0)
    trajectory.routed_experts.data = bytes(index % 251 for index in range(size))
    *parts, last = PolicySample(trajectory, "g", reward=1.0).messages()
    sent = [one.routed_experts_part for one in parts]
    assert all(one.ByteSize() <= 2 << 20 for one in (*parts, last))
    assert all(sent)
    rest = last.policy_sample.trajectory.routed_experts.data
    assert b"".join([*sent, rest]) == trajectory.routed_experts.data
    assert last.policy_sample.reward == 1.0


def test_log_probs_are_arrays_by_author_and_by_model():
    both = LogProbs.of(fakes.sample(prompt(return_other_logprobs=True), 0, 0))
    assert {True, False} == set(both.is_senior.tolist())
    for name, where in (("senior", both.is_senior), ("junior", ~both.is_senior)):
        by_model = getattr(both, name)
        assert by_model.dtype == np.float32
        assert np.array_equal(by_model[where], both.author[where])
        assert np.array_equal(by_model[~where], both.other[~where])
    alone = LogProbs.of(fakes.sample(prompt(), 0, 0))
    assert np.isnan(alone.other).all()
    assert np.array_equal(np.isnan(alone.senior), ~alone.is_senior)


def test_record_has_null_where_nothing_was_computed():
    record = trajectory_record(Response(fakes.sample(prompt(), 0, 0), ""))
    for author, senior, junior in zip(
        record["authorship_mask"], record["senior_logprobs"], record["junior_logprobs"], strict=True
    ):
        assert (senior is None) == (author == 0)
        assert (junior is None) == (author == 1)
    assert record["accepted_draft_mask"] is None
    solo = prompt()
    solo.tandem.enabled = False
    record = trajectory_record(Response(fakes.sample(solo, 0, 0), ""))
    assert record["junior_logprobs"] is None
    assert None not in record["senior_logprobs"]
