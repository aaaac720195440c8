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


def paired_gain(
    before: Sequence[Sequence[bool]], after: Sequence[Sequence[bool]], z: float = 1.959964
) -> tuple[float, float]:
    """Returns the gain in accuracy on the same questions, and half the width of its 95 % interval.

    `before` and `after` hold, by question, whether each of its samples was correct. The questions
    are the pairs: samples of one question depend on each other, so they are averaged first.
    """
    n = len(before)
    differences = [_mean(b) - _mean(a) for a, b in zip(before, after, strict=True)]
    mean = _mean(differences)
    variance = sum((d - mean) ** 2 for d in differences) / max(1, n - 1)
    return mean, z * math.sqrt(variance / n)


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
