"""Tandem Reinforcement Learning from Python: typed clients, the training loop, the command line."""

import importlib.util

if importlib.util.find_spec("tandem.types") is None:
    raise ImportError(
        "the modules of the contract are not generated: run clients/python/generate_protos.py"
    )

from tandem.aio import AsyncCriticClient, AsyncRolloutClient, AsyncTrainerClient
from tandem.client import CriticClient, RolloutClient, TrainerClient
from tandem.cluster import LocalCluster
from tandem.errors import TandemError
from tandem.requests import PolicySample, Prompt, SupervisedSample
from tandem.schedule import authorship_mask, prompt_seed
from tandem.settings import ClusterSettings, RunSettings
from tandem.transport import RetryPolicy

__version__ = "0.1.0"

__all__ = [
    "AsyncCriticClient",
    "AsyncRolloutClient",
    "AsyncTrainerClient",
    "ClusterSettings",
    "CriticClient",
    "LocalCluster",
    "PolicySample",
    "Prompt",
    "RetryPolicy",
    "RolloutClient",
    "RunSettings",
    "SupervisedSample",
    "TandemError",
    "TrainerClient",
    "authorship_mask",
    "prompt_seed",
]
