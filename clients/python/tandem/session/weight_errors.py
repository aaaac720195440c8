"""Errors about servers that hold other weights than a run expects."""

from __future__ import annotations

import grpc

from tandem._proto.types.v1 import server_pb2
from tandem.errors import FailedPreconditionError, LostWeightsError
from tandem.rpc.client import CriticClient, TrainerClient


def other_weights(
    address: str, served: server_pb2.WeightsVersion, trainer: server_pb2.WeightsVersion
) -> FailedPreconditionError:
    """Returns the error for a rollout server whose weights no publication of a run may replace."""
    if served.version == trainer.version == 0:
        hint = (
            "they were started with different models: senior.model of a rollout server and model "
            "of the trainer must name the same model (cluster.model names it for all)"
        )
    else:
        hint = (
            "one of them was restarted or trained by another run: --resume brings both to the "
            "run's last checkpoint; a new run begins with the base model, the same for both"
        )
    return FailedPreconditionError(
        f"{address} serves version {served.version} with digest {served.digest}, the trainer "
        f"holds version {trainer.version} with {trainer.digest}: other weights",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="WEIGHTS_DIFFER",
        hint=hint,
    )


def lost_weights(
    address: str, served: server_pb2.WeightsVersion, weights: server_pb2.WeightsVersion
) -> LostWeightsError:
    """Returns the error for a rollout server without the weights that draw an asynchronous step."""
    return LostWeightsError(
        f"{address} serves {in_words(served)}, and the rollouts of this step are drawn with "
        f"{in_words(weights)}, which the trainer has left behind",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="WEIGHTS_DIFFER",
        hint="the rollout server was restarted, or another run publishes to it: --resume draws the "
        "steps after the last checkpoint again, with the same results",
    )


def changed_weights(
    server: TrainerClient | CriticClient, holds: str, left: str
) -> FailedPreconditionError:
    """Returns the error for a trainer or critic with other weights than the run left there."""
    return FailedPreconditionError(
        f"the {server.role} at {server.address} holds {holds}, not the run's {left}",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="STALE_POLICY_VERSION",
        hint="it was restarted, or another run trains it: --resume continues from the last "
        "checkpoint",
    )


def in_words(weights: server_pb2.WeightsVersion) -> str:
    """Returns weights as an error names them."""
    return f"version {weights.version} with digest {weights.digest}"
