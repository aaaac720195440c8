"""Tandem Reinforcement Learning from Python: typed clients, the training loop, the command line."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("tandem.types") is None:
    raise ImportError(
        "the modules of the contract are not generated: run clients/python/generate_protos.py"
    )

if TYPE_CHECKING:
    from tandem.aio import AsyncCriticClient, AsyncRolloutClient, AsyncTrainerClient
    from tandem.client import CriticClient, RolloutClient, TrainerClient
    from tandem.cluster import LocalCluster
    from tandem.credentials import Credentials
    from tandem.errors import TandemError
    from tandem.images import ImageProcessor, VisionInput
    from tandem.logprobs import LogProbs
    from tandem.requests import PolicySample, Prompt, SupervisedSample
    from tandem.schedule import authorship_mask, prompt_seed
    from tandem.settings import ClusterSettings, RunSettings
    from tandem.text import TextCodec
    from tandem.transport import RetryPolicy
    from tandem.wire import from_tensor

__version__ = "0.1.0"

# Each is imported when it is first asked for: half a second that `tandem --help` does without, and
# in which Ctrl-C would print a traceback.
_HOMES = {
    "AsyncCriticClient": "aio",
    "AsyncRolloutClient": "aio",
    "AsyncTrainerClient": "aio",
    "ClusterSettings": "settings",
    "Credentials": "credentials",
    "CriticClient": "client",
    "ImageProcessor": "images",
    "LocalCluster": "cluster",
    "LogProbs": "logprobs",
    "PolicySample": "requests",
    "Prompt": "requests",
    "RetryPolicy": "transport",
    "RolloutClient": "client",
    "RunSettings": "settings",
    "SupervisedSample": "requests",
    "TandemError": "errors",
    "TextCodec": "text",
    "TrainerClient": "client",
    "VisionInput": "images",
    "authorship_mask": "schedule",
    "from_tensor": "wire",
    "prompt_seed": "schedule",
}

__all__ = [
    "AsyncCriticClient",
    "AsyncRolloutClient",
    "AsyncTrainerClient",
    "ClusterSettings",
    "Credentials",
    "CriticClient",
    "ImageProcessor",
    "LocalCluster",
    "LogProbs",
    "PolicySample",
    "Prompt",
    "RetryPolicy",
    "RolloutClient",
    "RunSettings",
    "SupervisedSample",
    "TandemError",
    "TextCodec",
    "TrainerClient",
    "VisionInput",
    "authorship_mask",
    "from_tensor",
    "prompt_seed",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
