"""The author schedule and its randomness: a second, slow implementation to check the server with.

The authorship mask of a trajectory follows from its tokens, its tandem configuration and its seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tandem.utils.authors import ENVIRONMENT, SENIOR

AUTHOR, TOKEN = 0, 1  # purposes of a draw

_MASK32 = 0xFFFFFFFF


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Returns four words of Philox4x32-10.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int, purpose: int) -> float:
    """Returns the draw in [0, 1) for one position of one sample."""
    words = philox4x32(
        (position, sample_index & _MASK32, sample_index >> 32, purpose),
        (seed & _MASK32, seed >> 32),
    )
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53


def authorship_mask(
    tokens: Sequence[int],
    tandem: Mapping[str, Any],
    seed: int,
    sample_index: int,
    boundaries: Collection[int] = (),
    environment: Collection[int] = (),
) -> list[int]:
    """Returns the author of each of `tokens`: 1 = senior, 0 = junior, 2 = environment.

    `tandem` has the fields of TandemConfig; `boundaries` is the strategy's default set, used when
    `tandem` names no boundary_token_ids of its own. `environment` are the indices of the tokens
    that an environment said. Behind them a turn begins, and the strategy starts anew.
    """
    said = set(environment)
    if not tandem["enabled"]:
        return [ENVIRONMENT if t in said else SENIOR for t in range(len(tokens))]
    strategy = tandem["selection_strategy"]
    boundary = set(tandem.get("boundary_token_ids") or boundaries)
    mask: list[int] = []
    # The turn's first token, its tokens since the last coin, and the number of turns before it.
    first = since_draw = turns = 0
    for t in range(len(tokens)):
        if t in said:
            mask.append(ENVIRONMENT)
            turns += t > first
            first = t + 1
            continue
        coin = int(uniform(seed, sample_index, t, AUTHOR) < tandem["prob_senior"])
        after_boundary = t > first and tokens[t - 1] in boundary
        if strategy == "bernoulli":
            author = coin
        elif strategy == "chunk":
            author = int((t - first) // tandem["chunk_size"] % 2 == 0)
        elif strategy == "alternating":
            author = int((t - first) % 2 == 0)
        elif strategy == "sentence":
            author = 1 if t == first else mask[-1] ^ after_boundary
        elif strategy == "word":
            draw = t == first or after_boundary or since_draw == tandem["max_gap_tokens"]
            author = coin if draw else mask[-1]
            since_draw = 1 if draw else since_draw + 1
        elif strategy == "turn":
            author = int(turns % 2 == 0)
        else:
            raise ValueError(f"unknown selection_strategy: {strategy}")
        mask.append(author)
    return mask
