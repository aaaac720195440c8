"""The authors of tokens, as an authorship mask has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

JUNIOR, SENIOR, ENVIRONMENT = 0, 1, 2
# Their names, by the number in the mask.
AUTHOR_NAMES = ("junior", "senior", "environment")


def written(mask: Sequence[int]) -> int:
    """Returns the number of tokens that the models wrote."""
    return sum(author != ENVIRONMENT for author in mask)


def turns(mask: Sequence[int]) -> int:
    """Returns the number of the models' turns: an environment speaks between two of them."""
    speakers = (author == ENVIRONMENT for author in mask)
    return sum(not said for said, _ in itertools.groupby(speakers))


def senior_fraction(masks: Sequence[Sequence[int]]) -> float:
    """Returns the senior's share of the tokens that the models wrote, at least one in all masks."""
    return sum(author == SENIOR for mask in masks for author in mask) / sum(map(written, masks))
