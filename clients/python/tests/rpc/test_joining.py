"""Turns of an episode, joined to one response."""

import copy

import fakes
import numpy as np
import pytest

from tandem import LogProbs, Prompt, ResponseSoFar, from_tensor, join
from tandem.errors import TurnsDifferError
from tandem.rpc.wire import to_tensor

TANDEM = {"enabled": True, "selection_strategy": "alternating", "prob_senior": 0.5}
SAID = [40, 41]


def turn(tokens, before=None, said=(), version=3, **changes):
    """A turn as a server writes it, behind the response so far."""
    so_far = ResponseSoFar() if before is None else ResponseSoFar.after(before, said)
    prompt = Prompt(
        [7, 8],
        seed=5,
        sampling={"max_tokens": 9},
        tandem=TANDEM,
        return_other_logprobs=True,
        response=so_far,
        first_sample_index=2,
        **changes,
    )
    return fakes.written(prompt.message(), 2, version, tokens)


def two_turns():
    first = turn([1, 2, 3])
    return first, turn([4, 5], first, SAID)


def test_a_joined_response_has_the_tokens_of_all_with_their_authors_and_numbers():
    first, second = two_turns()
    first.log_keep_mass.CopyFrom(to_tensor([-0.5, 0.0, 0.0]))
    second.accepted_draft_mask = b"\0\1"
    whole = join(first, SAID, second)
    assert list(whole.response_token_ids) == [1, 2, 3, 40, 41, 4, 5]
    # The strategy starts anew behind the environment.
    assert list(whole.authorship_mask) == [1, 0, 1, 2, 2, 1, 0]
    for name in ("author_logprobs", "other_logprobs"):
        parts = [from_tensor(getattr(one, name)) for one in (first, second)]
        expected = np.concatenate([parts[0], [0, 0], parts[1]])
        assert np.array_equal(from_tensor(getattr(whole, name)), expected.astype(np.float32))
    assert from_tensor(whole.log_keep_mass).tolist() == [-0.5, 0, 0, 0, 0, 0, 0]
    assert list(whole.accepted_draft_mask) == [0, 0, 0, 0, 0, 0, 1]
    assert [(run.weights.version, run.count) for run in whole.senior_versions] == [(3, 7)]
    assert whole.response_offset == 0
    assert whole.sampling.max_tokens == 5 + 9
    assert whole.finish_reason == second.finish_reason


def test_tokens_of_the_environment_have_the_version_of_the_token_before_them():
    first = turn([1, 2])
    whole = join(first, SAID, turn([4], first, SAID, version=4))
    assert [(run.weights.version, run.count) for run in whole.senior_versions] == [(3, 4), (4, 1)]


def test_a_joined_response_is_joined_again():
    first, second = two_turns()
    whole = join(first, SAID, second)
    third = turn([6], whole, [42])
    assert list(join(whole, [42], third).authorship_mask) == [1, 0, 1, 2, 2, 1, 0, 2, 1]


def test_log_probs_of_the_environment_are_not_known():
    first, second = two_turns()
    both = LogProbs.of(join(first, SAID, second))
    assert both.is_environment.tolist() == [False, False, False, True, True, False, False]
    assert both.is_senior.tolist() == [True, False, True, False, False, True, False]
    for values in (both.senior, both.junior, both.author, both.other):
        assert np.isnan(values).tolist() == both.is_environment.tolist()


def experts(rows):
    return to_tensor(np.zeros((rows, 1, 1)), np.uint8)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_token_ids", lambda one: one.prompt_token_ids.append(9)),
        ("seed", lambda one: setattr(one, "seed", 6)),
        ("sample_index", lambda one: setattr(one, "sample_index", 1)),
        ("sampling", lambda one: setattr(one.sampling, "temperature", 0.5)),
        ("tandem", lambda one: setattr(one.tandem, "prob_senior", 0.25)),
        ("junior_version", lambda one: setattr(one, "junior_version", "other")),
        ("response_offset", lambda one: setattr(one, "response_offset", 4)),
        ("other_logprobs", lambda one: one.ClearField("other_logprobs")),
        ("routed_experts", lambda one: one.routed_experts.CopyFrom(experts(8))),
    ],
)
def test_turns_of_different_responses_are_refused(field, change):
    first, second = two_turns()
    join(first, SAID, second)
    change(second)
    with pytest.raises(TurnsDifferError, match=f"^{field}: ") as caught:
        join(first, SAID, second)
    assert caught.value.field == field


def test_a_turn_that_is_no_first_one_is_refused():
    _, second = two_turns()
    with pytest.raises(TurnsDifferError, match="response_offset: the turn begins at 5"):
        join(second, [], turn([6], second))


def test_the_last_turn_must_have_the_experts_of_every_token():
    first, second = two_turns()
    first.routed_experts.CopyFrom(experts(4))
    second.routed_experts.CopyFrom(experts(8))
    assert join(first, SAID, second).routed_experts == second.routed_experts
    short = copy.deepcopy(second)
    short.routed_experts.CopyFrom(experts(2))
    with pytest.raises(TurnsDifferError, match=r"routed_experts: .* of 2 tokens, not of all 8"):
        join(first, SAID, short)


def test_a_response_so_far_has_what_an_environment_said_behind_the_turn():
    first, _ = two_turns()
    so_far = ResponseSoFar.after(first, SAID)
    assert so_far.token_ids == [1, 2, 3, 40, 41]
    assert so_far.authorship_mask == [1, 0, 1, 2, 2]
    assert ResponseSoFar.after(first).token_ids == [1, 2, 3]


def test_the_likeliest_tokens_are_joined_with_empty_rows_for_an_environment():
    first, second = two_turns()
    for one, start in ((first, 10), (second, 20)):
        length = len(one.response_token_ids)
        ids = np.arange(start, start + 2 * length).reshape(length, 2)
        one.top_token_ids.CopyFrom(to_tensor(ids, "<i4"))
        one.top_logprobs.CopyFrom(to_tensor(ids / -100))
    whole = join(first, SAID, second)
    ids = from_tensor(whole.top_token_ids)
    assert ids.tolist() == [[10, 11], [12, 13], [14, 15], [-1, -1], [-1, -1], [20, 21], [22, 23]]
    assert from_tensor(whole.top_logprobs)[-1].tolist() == np.float32([-0.22, -0.23]).tolist()
    second.ClearField("top_token_ids")
    with pytest.raises(TurnsDifferError, match="top_token_ids"):
        join(first, SAID, second)
