"""The batch and the servers of a comparison, once for every family."""

from __future__ import annotations

from collections.abc import Iterator

import peer_batch
import pytest
import tandem_side
import torch
from tandem_side import Comparison

# The models are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(scope="session", params=peer_batch.FAMILIES)
def comparison(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Comparison]:
    """Models of one family, a batch, and Tandem's servers of these models."""
    directory = tmp_path_factory.mktemp(request.param)
    models = peer_batch.make_models(directory, request.param)
    with tandem_side.serve(models, directory) as tandem:
        yield Comparison(models, peer_batch.make_batch(models), tandem)
