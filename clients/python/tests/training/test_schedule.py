"""The schedule of an asynchronous run: which weights draw which step."""

import itertools

import pytest

from tandem.training.schedule import Schedule

CASES = list(itertools.product((1, 2, 3, 4, 7), (0, 5)))


@pytest.mark.parametrize(("staleness", "origin"), CASES)
def test_rollouts_lie_between_one_step_and_the_bound_behind(staleness, origin):
    schedule = Schedule(staleness, origin)
    # Step s trains the weights after step s - 1.
    behind = [step - 1 - schedule.drawn_after(step) for step in range(origin + 1, origin + 30)]
    assert behind[0] == 0
    assert behind[1 : 1 + staleness] == list(range(1, staleness + 1))
    assert set(behind[1:]) == set(range(1, staleness + 1))


@pytest.mark.parametrize(("staleness", "origin"), CASES)
def test_a_step_is_drawn_with_weights_that_are_published(staleness, origin):
    schedule = Schedule(staleness, origin)
    for step in range(origin + 1, origin + 30):
        assert schedule.is_publication(schedule.drawn_after(step))
    for publication in filter(schedule.is_publication, range(origin, origin + 30)):
        last = schedule.last_drawn_with(publication)
        assert schedule.drawn_after(last) == publication
        assert schedule.drawn_after(last + 1) == publication + staleness


@pytest.mark.parametrize(("staleness", "origin"), CASES)
def test_weights_that_are_published_draw_nothing_that_older_ones_should(staleness, origin):
    """last_drawn_before() is what a run waits for before it publishes, and what it saves."""
    schedule = Schedule(staleness, origin)
    for step in range(origin + 1, origin + 30):
        last = schedule.last_drawn_before(step)
        assert schedule.drawn_after(last) < step <= schedule.drawn_after(last + 1)
    assert schedule.last_drawn_before(origin) == origin


def test_before_the_origin_nothing_is_published_and_nothing_is_left_to_draw():
    schedule = Schedule(staleness=2, origin=6)
    assert not any(map(schedule.is_publication, range(6)))
    assert {schedule.last_drawn_before(step) for step in range(7)} == {6}
