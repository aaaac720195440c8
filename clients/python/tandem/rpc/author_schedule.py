"""The author schedule and its randomness: a second, slow implementation to check the server with.

The authorship mask of a trajectory follows from its tokens, its tandem configuration and its seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
) -> list[int]:
    """Returns the author of each of `tokens`: 1 = senior, 0 = junior.

    `tandem` has the fields of TandemConfig; `boundaries` is the strategy's default set, used when
    `tandem` names no boundary_token_ids of its own.
    """
    if not tandem["enabled"]:
        return [1] * len(tokens)
    strategy = tandem["selection_strategy"]
    boundary = set(tandem.get("boundary_token_ids") or boundaries)
    mask: list[int] = []
    since_draw = 0
    for t in range(len(tokens)):
        coin = int(uniform(seed, sample_index, t, AUTHOR) < tandem["prob_senior"])
        after_boundary = t > 0 and tokens[t - 1] in boundary
        if strategy == "bernoulli":
            author = coin
        elif strategy == "chunk":
            author = int(t // tandem["chunk_size"] % 2 == 0)
        elif strategy == "alternating":
            author = int(t % 2 == 0)
        elif strategy == "sentence":
            author = 1 if t == 0 else mask[-1] ^ after_boundary
        elif strategy == "word":
            draw = t == 0 or after_boundary or since_draw == tandem["max_gap_tokens"]
            author = coin if draw else mask[-1]
            since_draw = 1 if draw else since_draw + 1
        else:
            raise ValueError(f"unknown selection_strategy: {strategy}")
        mask.append(author)
    return mask
