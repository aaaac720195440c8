"""Seeds of prompts."""

from __future__ import annotations

import hashlib


def prompt_seed(run_seed: int, step: int, prompt_index: int, purpose: str = "train") -> int:
    """Returns the seed of one request: BLAKE2b with an 8-byte digest, read little endian.

    The hashed text is "<purpose>/<run_seed>/<step>/<prompt_index>" in ASCII decimal. It does not
    depend on the machine, the Python version or PYTHONHASHSEED.
    """
    text = f"{purpose}/{run_seed}/{step}/{prompt_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
