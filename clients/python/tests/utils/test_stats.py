"""Statistics of evaluations."""

import itertools
import statistics

import pytest

from tandem.utils.stats import clustered_mean, pass_at_k, wilson_interval


def test_pass_at_k_is_the_fraction_of_subsets_with_a_success(subtests):
    for n, c, k in [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (5, 3, 5)]:
        with subtests.test(n=n, c=c, k=k):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_of_a_known_case():
    low, high = wilson_interval(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0


def test_a_mean_of_clusters_of_one_is_the_plain_one():
    values = [0.1, 0.4, 0.2, 0.9]
    mean, half = clustered_mean([[value] for value in values])
    assert mean == pytest.approx(statistics.mean(values))
    assert half == pytest.approx(1.959964 * statistics.stdev(values) / 2)


def test_a_mean_counts_values_and_its_interval_counts_clusters():
    clusters = [[0.1, 0.3], [0.4], [0.2, 0.2, 0.8]]
    mean, half = clustered_mean(clusters)
    assert mean == pytest.approx(2.0 / 6)
    # The same values a hundred times over tell nothing new.
    assert clustered_mean([cluster * 100 for cluster in clusters]) == pytest.approx((mean, half))
    assert clustered_mean(clusters * 100)[1] < half / 9


def test_one_cluster_has_no_interval():
    assert clustered_mean([[1.0, 3.0]]) == (2.0, None)
