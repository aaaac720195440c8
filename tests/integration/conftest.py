"""Fixtures over the real servers. They need a build: $TANDEM_BUILD_DIR or build/release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from numerics import Numerics, configurations
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import RolloutClient, TrainerClient


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The models are tiny: a second thread of transformers costs more than it brings."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> harness.Models:
    """Tiny random models."""
    return harness.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=configurations(), ids=lambda n: n.name)
def numerics(request: pytest.FixtureRequest) -> Numerics:
    """The device, type and kernels that the servers of a test compute with."""
    return request.param


@pytest.fixture(scope="module")
def pair(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A rollout server and a trainer, shared by the tests of a file that leave versions alone."""
    with harness.cluster(tmp_path_factory.mktemp("pair"), models, trainer={}) as running:
        yield running


@pytest.fixture
def fresh_pair(models: harness.Models, tmp_path: Path) -> Iterator[LocalCluster]:
    """A rollout server and a trainer for one test alone."""
    with harness.cluster(tmp_path / "cluster", models, trainer={}) as running:
        yield running


@pytest.fixture
def rollout(pair: LocalCluster) -> Iterator[RolloutClient]:
    """A client of the shared rollout server."""
    with harness.rollout_client(pair) as client:
        yield client


@pytest.fixture
def trainer(pair: LocalCluster) -> Iterator[TrainerClient]:
    """A client of the shared trainer."""
    with harness.trainer_client(pair) as client:
        yield client
