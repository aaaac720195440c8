"""Numbers."""

import itertools

import pytest

from tandem.stats import paired_gain, pass_at_k, wilson_interval


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (5, 3, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_of_a_known_case():
    low, high = wilson_interval(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0


def test_paired_gain():
    mean, half = paired_gain([[False], [False], [True], [True]], [[True]] * 4)
    assert mean == 0.5
    assert half == pytest.approx(1.96 * (1 / 3 / 4) ** 0.5, abs=1e-3)


def test_the_pairs_of_a_gain_are_questions_not_samples():
    before = [[False], [False], [True], [True]]
    once = paired_gain(before, [[True]] * 4)
    # The same answers a hundred times over tell nothing new.
    assert paired_gain([group * 100 for group in before], [[True] * 100] * 4) == once
