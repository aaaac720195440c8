"""Turns, counts and shares of authorship masks."""

from tandem.utils.authors import senior_fraction, turns, written


def test_an_environment_has_no_share_of_what_the_models_wrote():
    mask = [1, 0, 2, 2, 1, 1]
    assert written(mask) == 4
    assert senior_fraction([mask, [0]]) == 3 / 5


def test_an_environment_speaks_between_two_turns():
    assert turns([1, 0, 1]) == 1
    assert turns([1, 2, 2, 0, 1, 2, 1]) == 3
