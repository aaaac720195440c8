"""The digest of weights, written down once more: docs/adr/0072."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import xxhash

_BLOCK = 256


def weights_digest(tensors: Mapping[str, bytes]) -> str:
    """Returns the digest of tensors, given as their bytes on the wire by name."""
    digest = xxhash.xxh3_128()
    for name, data in sorted(tensors.items()):
        text = name.encode()
        digest.update(struct.pack("<Q", len(text)) + text + struct.pack("<QQ", *_sums(data)))
    return digest.hexdigest()


def _sums(data: bytes) -> tuple[int, int]:
    padded = data + bytes(-len(data) % (4 * _BLOCK))
    words = np.frombuffer(padded, "<u4").astype(np.uint64).reshape(-1, _BLOCK)
    place, block = np.arange(_BLOCK), np.arange(len(words)) + _BLOCK
    first, second = (
        int(
            (
                (words * (_split_mix(2 * place + sum_) >> np.uint64(32))).sum(1, dtype=np.uint64)
                * (_split_mix(2 * block + sum_) | np.uint64(1))
            ).sum(dtype=np.uint64)
        )
        for sum_ in range(2)
    )
    return first, second


def _split_mix(index: np.ndarray) -> np.ndarray:
    z = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
