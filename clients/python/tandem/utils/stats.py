"""Estimates with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the unbiased estimate that one of k samples is correct, from `samples` drawn.

    1 - C(n - c, k) / C(n, k); Chen et al., "Evaluating large language models trained on code"
    (2021), equation 1.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion; 95 % by default (Wilson 1927)."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = p + z * z / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def clustered_mean(
    clusters: Sequence[Sequence[float]], z: float = 1.959964
) -> tuple[float, float | None]:
    """Returns the mean over all values, and half the width of its 95 % interval.

    The width is None with a single cluster.

    The values of a cluster depend on each other: the standard error is clustered (Miller, "Adding
    error bars to evals", arXiv 2411.00640, clustered standard errors), with n / (n - 1).
    """
    count = sum(map(len, clusters))
    mean = sum(map(sum, clusters)) / count
    n = len(clusters)
    if n == 1:
        return mean, None
    squares = sum(sum(value - mean for value in cluster) ** 2 for cluster in clusters)
    return mean, z * math.sqrt(n / (n - 1) * squares) / count


# Student's t at 97.5 % by degrees of freedom, from 1 on.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def mean_half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean of independent normal values.

    None for a single value. With more than 21 values Student's t is that of 20 degrees of freedom,
    which is at most 7 % too wide.
    """
    n = len(values)
    if n == 1:
        return None
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return _STUDENT[min(n - 1, len(_STUDENT)) - 1] * math.sqrt(variance / n)
