"""Writing weights tensor by tensor: safetensors files, in a number format of choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tandem.errors import ConfigError
from tandem.models.weights.layout import INDEX, WEIGHTS, index_of
from tandem.utils.byte_progress import ByteCount

if TYPE_CHECKING:
    import torch

# Most bytes of tensors in a file; a larger tensor has a file of its own.
SHARD_BYTES = 5_000_000_000

# Ends the names of the tensors that every number format keeps in float32: the biases that
# DeepSeek-V3's routers add to scores. Rounded, they choose other experts.
_KEPT_IN_FLOAT32 = ".e_score_correction_bias"

_TYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: its name, its shape, and the name that torch gives its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The number of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """The number of its bytes."""
        return self.numel * _TYPE_BYTES[self.dtype]


def stored_dtype(name: str, dtype: str) -> str:
    """Returns the type in which the tensor `name` of a model in `dtype` is stored."""
    return "float32" if name.endswith(_KEPT_IN_FLOAT32) else dtype


def dtype_key(config: Mapping[str, Any]) -> str:
    """Returns the key of the dtype: that of earlier versions of transformers if the file has it."""
    return "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"


def cast(tensor: torch.Tensor, name: str, dtype: str, where: str = "--dtype") -> torch.Tensor:
    """Returns a tensor in the type `dtype`.

    Raises ConfigError for a tensor that is not finite, or that `dtype` cannot hold.
    """
    import torch

    cast_tensor = tensor.to(getattr(torch, dtype))
    if not torch.isfinite(cast_tensor).all():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"the tensor {name!r} holds numbers that are not finite")
        raise ConfigError(
            f"{where}: the tensor {name!r} holds numbers that {dtype} cannot hold",
            hint="bf16 has the range of fp32",
        )
    return cast_tensor


def cast_all(
    tensors: Sequence[OutputTensor], values: Iterable[torch.Tensor], count: ByteCount
) -> Iterator[torch.Tensor]:
    """Yields the values in the types of `tensors`, and counts the bytes that they had."""
    for tensor, value in zip(tensors, values, strict=True):
        yield cast(value, tensor.name, tensor.dtype)
        count.add(value.nbytes)


def write_file(
    file: Path,
    tensors: Sequence[OutputTensor],
    values: Iterable[torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a safetensors file: `values` has the tensors in their order, one at a time."""
    with file.open("wb") as stream:
        stream.write(_header(tensors, metadata or {"format": "pt"}))
        for tensor, value in zip(tensors, values, strict=True):
            _write_values(stream, tensor, value)


def write_shards(
    directory: Path,
    tensors: Sequence[OutputTensor],
    values: Iterable[torch.Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes model.safetensors or, for more than `shard_bytes`, several files with their index."""
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    remaining = iter(values)
    if len(shards) == 1:
        write_file(directory / WEIGHTS, tensors, remaining)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, (next(remaining) for _ in shard))
        places |= {tensor.name: name for tensor in shard}
    (directory / INDEX).write_text(index_of(places, sum(tensor.bytes for tensor in tensors)))


def _header(tensors: Sequence[OutputTensor], metadata: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.bytes],
        }
        begin += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_values(stream: IO[bytes], tensor: OutputTensor, value: torch.Tensor) -> None:
    import torch

    assert tuple(value.shape) == tensor.shape, tensor.name
    assert value.dtype == getattr(torch, tensor.dtype), tensor.name
    if value.numel():
        stream.write(memoryview(value.contiguous().view(-1).view(torch.uint8).numpy()))
