"""Adapters: those that a client asks for, and those that the trainer has."""

from __future__ import annotations

from typing import Any

from tinker import types

from tandem._proto.types.v1 import server_pb2
from tandem.openai_server.errors import RequestError

_ALL_LINEAR = "all-linear"
# Last parts of the names of feed-forward maps, of experts too; other maps are those of attention.
_FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def trained_parts(model: server_pb2.ModelInfo) -> dict[str, bool]:
    """Returns which parts of the trainer's model train, by the fields of LoraConfig."""
    if not model.HasField("adapter"):
        return {"train_attn": True, "train_mlp": True, "train_unembed": True}
    maps = set(model.adapter.target_modules)
    everything = _ALL_LINEAR in maps
    return {
        "train_attn": everything or not maps <= _FEED_FORWARD,
        "train_mlp": everything or bool(maps & _FEED_FORWARD),
        "train_unembed": False,
    }


def described(model: server_pb2.ModelInfo) -> dict[str, Any]:
    """Returns the fields of answers that say whether a model trains adapters, and of which rank."""
    return {"is_lora": model.HasField("adapter"), "lora_rank": model.adapter.rank}


def check_adapter(
    config: types.LoraConfig | None, model: server_pb2.ModelInfo, *, unembed_optional: bool
) -> None:
    """Raises RequestError unless the trainer trains what a client asks for.

    Rank 0 means all parameters. With `unembed_optional` a client that asks for adapters of the
    output layer, too, gets the others.
    """
    if config is None:
        raise _refused("rank", "is required")
    if config.rank != model.adapter.rank:
        has = "all parameters, which is rank 0"
        if model.HasField("adapter"):
            has = f"adapters of rank {model.adapter.rank}"
        raise _refused("rank", f"{config.rank}: the trainer's `lora` makes it train {has}")
    if config.seed is not None and model.HasField("adapter") and config.seed != model.adapter.seed:
        raise _refused("seed", f"{config.seed}: the trainer's `lora` has seed {model.adapter.seed}")
    for name, trained in trained_parts(model).items():
        if getattr(config, name) == trained:
            continue
        if name == "train_unembed" and unembed_optional and not trained:
            continue
        reason = "the trainer's `lora` has other target_modules"
        if not model.HasField("adapter"):
            reason = "with rank 0; the trainer's `freeze` names parameters that do not train"
        elif name == "train_unembed":
            reason = "adapters of the output layer are not served (--unembed-optional)"
        raise _refused(name, f"must be {str(trained).lower()}: {reason}")


def _refused(field: str, reason: str) -> RequestError:
    return RequestError(
        f"lora_config.{field}: {reason}", f"lora_config.{field}", code="unsupported_parameter"
    )
