"""Fixtures of the comparisons with `transformers`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The first calls of MKL's vector functions on two threads can be inaccurate
    (pytorch/pytorch#188792), and the models are tiny."""
    import torch

    torch.set_num_threads(1)
