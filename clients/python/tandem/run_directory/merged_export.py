"""Exports of a checkpoint of adapters: its base model, with the adapters merged into the maps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import ConfigError
from tandem.models.importing import companions
from tandem.models.weights.reading import Source, SourceTensor, safetensors_of
from tandem.models.weights.writing import (
    OutputTensor,
    cast_all,
    dtype_key,
    stored_dtype,
    write_shards,
)
from tandem.utils.atomic_files import read_json
from tandem.utils.byte_progress import ByteCount, OnBytes

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "config.json"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def write_merged(
    checkpoint: Path, folder: Path, dtype: str, progress: OnBytes | None = None
) -> None:
    """Writes the model W + (alpha / rank) B A of a directory in PEFT's format.

    Sums are float32, cast at the end to `dtype`, a name that torch gives a type. The base model is
    the one that adapter_config.json names. Takes the memory of one tensor and the adapters.

    Raises ConfigError for a base model that is not there, or whose files stack a map that has an
    adapter with others, and for an adapter of a critic, which has more than the maps.
    """
    settings = read_json(checkpoint / ADAPTER_CONFIG)
    base = Path(settings["base_model_name_or_path"])
    served = "`tandem export served` lets the running server merge them"
    if not base.is_dir():
        raise ConfigError(
            f"{checkpoint / ADAPTER_CONFIG}: base_model_name_or_path: {base} is not here",
            hint=served,
        )
    adapters = {
        tensor.name.removeprefix(_PREFIX): tensor
        for tensor in safetensors_of(checkpoint / _ADAPTER_WEIGHTS)
    }
    maps = {name.removesuffix(_A) for name in adapters if name.endswith(_A)}
    source = Source(base)
    for name in sorted(adapters):
        if not name.endswith((_A, _B)):
            raise ConfigError(f"{checkpoint}: {name}: is not an adapter of a map", hint=served)
    for name in sorted(maps):
        if f"{name}.weight" not in source.tensors:
            raise ConfigError(
                f"{base}: has no tensor {name}.weight, which an adapter changes: its files stack "
                "this map with others",
                hint=served,
            )
    scale = settings["lora_alpha"] / settings["r"]
    tensors = [
        OutputTensor(one.name, one.shape, stored_dtype(one.name, dtype))
        for one in source.tensors.values()
    ]
    count = ByteCount(sum(4 * one.numel for one in tensors), progress)
    values = _merged(source, adapters, maps, scale)
    write_shards(folder, tensors, cast_all(tensors, values, count))
    for file in companions(base):
        shutil.copy(file, folder / file.name)
    config = read_json(base / _CONFIG)
    config[dtype_key(config)] = dtype
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _merged(
    source: Source, adapters: dict[str, SourceTensor], maps: set[str], scale: float
) -> Iterator[torch.Tensor]:
    """Yields the tensors of the base model in float32, with the adapters added."""
    for name, value in source.values():
        wide = value.float()
        adapted = name.removesuffix(".weight")
        if adapted in maps:
            a, b = (adapters[adapted + end].read().float() for end in (_A, _B))
            wide = wide + scale * (b @ a)
        yield wide
