"""Tandem Reinforcement Learning from Python: typed clients, the training loop, the command line."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("tandem._proto.types") is None:
    raise ImportError(
        "the contract's modules have not been generated: run clients/python/generate_protos.py"
    )

if TYPE_CHECKING:
    from tandem.cluster.local import LocalCluster
    from tandem.errors import EnvironmentFailedError, TandemError
    from tandem.models.tokenizer import TextCodec
    from tandem.rpc.aio import AsyncCriticClient, AsyncRolloutClient, AsyncTrainerClient
    from tandem.rpc.author_schedule import authorship_mask
    from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
    from tandem.rpc.credentials import Credentials
    from tandem.rpc.images import ImageProcessor, VisionInput
    from tandem.rpc.joining import join
    from tandem.rpc.logprobs import LogProbs
    from tandem.rpc.requests import PolicySample, Prompt, ResponseSoFar, SupervisedSample
    from tandem.rpc.retry import RetryPolicy
    from tandem.rpc.seeds import prompt_seed
    from tandem.rpc.wire import from_tensor
    from tandem.sessions import FinishedSession, SessionsClient, policy_samples
    from tandem.settings.cluster import ClusterSettings
    from tandem.settings.run import RunSettings

# A library prints nothing by itself; without a handler, Python would print warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"

# Each is imported when it is first asked for: half a second that `tandem --help` does without, and
# in which Ctrl-C would print a traceback.
_HOMES = {
    "AsyncCriticClient": "rpc.aio",
    "AsyncRolloutClient": "rpc.aio",
    "AsyncTrainerClient": "rpc.aio",
    "ClusterSettings": "settings.cluster",
    "Credentials": "rpc.credentials",
    "CriticClient": "rpc.client",
    "EnvironmentFailedError": "errors",
    "FinishedSession": "sessions",
    "ImageProcessor": "rpc.images",
    "LocalCluster": "cluster.local",
    "LogProbs": "rpc.logprobs",
    "PolicySample": "rpc.requests",
    "Prompt": "rpc.requests",
    "ResponseSoFar": "rpc.requests",
    "RetryPolicy": "rpc.retry",
    "RolloutClient": "rpc.client",
    "RunSettings": "settings.run",
    "SessionsClient": "sessions",
    "SupervisedSample": "rpc.requests",
    "TandemError": "errors",
    "TextCodec": "models.tokenizer",
    "TrainerClient": "rpc.client",
    "VisionInput": "rpc.images",
    "authorship_mask": "rpc.author_schedule",
    "from_tensor": "rpc.wire",
    "join": "rpc.joining",
    "policy_samples": "sessions",
    "prompt_seed": "rpc.seeds",
}

__all__ = [
    "AsyncCriticClient",
    "AsyncRolloutClient",
    "AsyncTrainerClient",
    "ClusterSettings",
    "Credentials",
    "CriticClient",
    "EnvironmentFailedError",
    "FinishedSession",
    "ImageProcessor",
    "LocalCluster",
    "LogProbs",
    "PolicySample",
    "Prompt",
    "ResponseSoFar",
    "RetryPolicy",
    "RolloutClient",
    "RunSettings",
    "SessionsClient",
    "SupervisedSample",
    "TandemError",
    "TextCodec",
    "TrainerClient",
    "VisionInput",
    "authorship_mask",
    "from_tensor",
    "join",
    "policy_samples",
    "prompt_seed",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
