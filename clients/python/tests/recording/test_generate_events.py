"""Events of a Generate call are found however the server cuts and orders them."""

from __future__ import annotations

import pytest

from tandem._proto.rollout.v1.rollout_pb2 import GenerateResponse
from tandem.recording.matching_events import GenerateEvents
from tandem.recording.message_difference import first_difference

RESPONSES = {0: [5, 6, 7, 8], 1: [9, 10]}


def tokens(sample, first, count, request_id="a"):
    ids = RESPONSES[sample][first : first + count]
    mask = bytes(token % 2 for token in ids)
    event = GenerateResponse(tokens={"request_id": request_id, "sample_index": sample})
    event.tokens.offset = first
    event.tokens.token_ids.extend(ids)
    event.tokens.authorship_mask = mask
    return event


def finished(sample):
    event = GenerateResponse(finished={"request_id": "a"})
    event.finished.trajectory.sample_index = sample
    event.finished.trajectory.response_token_ids.extend(RESPONSES[sample])
    return event


def failed(request_id="a"):
    return GenerateResponse(failed={"request_id": request_id})


def events_of(*events):
    return GenerateEvents(iter([*events, None]).__next__)


ONE_BY_ONE = [
    *(tokens(0, i, 1) for i in range(3)),
    tokens(1, 0, 1),
    tokens(0, 3, 1),
    finished(0),
    tokens(1, 1, 1),
    finished(1),
]
IN_RUNS = [tokens(1, 0, 2), finished(1), tokens(0, 0, 1), tokens(0, 1, 3), finished(0)]


@pytest.mark.parametrize("recorded", [ONE_BY_ONE, IN_RUNS])
@pytest.mark.parametrize("replayed", [ONE_BY_ONE, IN_RUNS])
def test_runs_of_tokens_and_the_order_of_samples_make_no_difference(recorded, replayed):
    events = events_of(*replayed)
    for event in recorded:
        assert first_difference(event, events.matching(event)) is None
    assert not events.has_more()


def test_an_event_is_awaited_no_longer_than_it_must_be():
    source = iter([tokens(0, 0, 2), finished(0)])
    events = GenerateEvents(source.__next__)
    for place in range(2):
        events.matching(tokens(0, place, 1))
    assert next(source) == finished(0)


def test_other_tokens_are_a_difference():
    other = tokens(0, 0, 4)
    other.tokens.token_ids[2] = 1
    events = events_of(other)
    assert first_difference(tokens(0, 0, 2), events.matching(tokens(0, 0, 2))) is None
    found = first_difference(tokens(0, 2, 2), events.matching(tokens(0, 2, 2)))
    assert (found.path, found.recorded, found.replayed) == ("tokens.token_ids[0]", "7", "1")


@pytest.mark.parametrize("end", [finished(0), failed()])
def test_missing_tokens_are_a_difference(end):
    events = events_of(tokens(0, 0, 3), end)
    found = first_difference(tokens(0, 0, 4), events.matching(tokens(0, 0, 4)))
    assert (found.path, found.replayed) == ("tokens.token_ids", "3 elements")


@pytest.mark.parametrize("event", [tokens(0, 0, 1), finished(0), failed()])
def test_what_never_comes_is_none(event):
    assert events_of(failed("b"), finished(1), tokens(1, 0, 1)).matching(event) is None


@pytest.mark.parametrize(
    "further", [tokens(0, 2, 1), finished(0), failed(), tokens(0, 3, 1), tokens(0, 0, 1)]
)
def test_what_was_not_asked_for_is_more(further):
    events = events_of(tokens(0, 0, 2), further)
    events.matching(tokens(0, 0, 2))
    assert events.has_more()


def test_a_request_that_fails_twice_has_two_events():
    second = failed()
    second.failed.status.code = 6
    events = events_of(failed(), second)
    assert events.matching(failed()) == failed()
    assert events.matching(failed()) == second
    assert not events.has_more()


def test_a_continued_response_begins_where_its_prompt_ends():
    def moved(events, by):
        for event in events:
            event.tokens.offset += by
        return events

    recorded = [tokens(0, 0, 1), tokens(0, 1, 3)]
    events = events_of(*moved([tokens(0, 0, 3), tokens(0, 3, 1)], 7))
    for event in moved(recorded, 7):
        assert first_difference(event, events.matching(event)) is None
    assert not events.has_more()
    # Another start is another response.
    events = events_of(*moved([tokens(0, 0, 4)], 6))
    [event] = moved([tokens(0, 0, 4)], 7)
    assert first_difference(event, events.matching(event)).path == "tokens.offset"
