"""Facts about a model directory that need no server: its longest sequence, equal weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import ConfigError
from tandem.models.weights.layout import OLD_BUFFER, weight_files

# Number of bytes of two tensors that are compared at a time.
_CHUNK = 1 << 26
# A model with a tied head may or may not store it.
_HEAD = "lm_head.weight"
# The name of a rotation with two lists of factors, and the one of Phi-3's older files.
_LONGROPE = ("longrope", "su")


@dataclass(frozen=True)
class _Tensor:
    """A tensor at bytes [begin, end) of a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def max_positions(directory: Path) -> int | None:
    """Returns the most tokens of a sequence by a model's config.json; None if it does not say."""
    config = _read(directory / "config.json")
    # Models with images have it in a part of its own.
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    limits = [text.get("max_position_embeddings"), _one_rotation(text)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def end_token_ids(directory: Path) -> set[int]:
    """Returns the ids that end a response by config.json and generation_config.json of a model.

    Empty if they name none, or cannot be read.
    """
    config = _read(directory / "config.json")
    text = config.get("text_config")
    ids: set[int] = set()
    for part in (config, text, _read(directory / "generation_config.json")):
        named = part.get("eos_token_id") if isinstance(part, dict) else None
        listed = named if isinstance(named, list) else [named]
        ids |= {one for one in listed if isinstance(one, int)}
    return ids


def _read(file: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; empty if it cannot be read: its server says why."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _one_rotation(config: dict[str, Any]) -> Any:
    """Returns the most tokens that a model rotates in one way, where longer ones differ.

    As common/model/config/rope_config.h says: longrope with two lists.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in _LONGROPE:
        return None
    if rope.get("short_factor") == rope.get("long_factor"):
        return None
    key = "original_max_position_embeddings"
    return config.get(key) or rope.get(key)


def difference(first: Path, second: Path) -> str | None:
    """Returns the first difference between the weights of two model directories, in words.

    None if they are equal, or one cannot be read. Tensors of two element types are not compared: a
    server may convert either.
    """
    if first == second or (first.exists() and second.exists() and first.samefile(second)):
        return None
    one, other = _tensors(first), _tensors(second)
    if not one or not other:
        return None
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            if name == _HEAD:
                continue
            return f"only {first if name in one else second} has {name}"
        if one[name].shape != other[name].shape:
            return f"{name} has the shapes {list(one[name].shape)} and {list(other[name].shape)}"
    # The smallest tensors come first: they already differ between two models.
    for name in sorted(one.keys() & other.keys(), key=lambda name: (_size(one[name]), name)):
        try:
            if one[name].dtype == other[name].dtype and not _equal(one[name], other[name]):
                return f"{name} differs"
        except (OSError, ValueError):
            return None  # A file was cut, which its server refuses.
    return None


def _tensors(directory: Path) -> dict[str, _Tensor]:
    """Returns the tensors that a server reads from a directory; empty if a file cannot be read."""
    found: dict[str, _Tensor] = {}
    try:
        for file in weight_files(directory):
            found |= _header(file)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # Its server says what is wrong with it.
    return found


def _header(file: Path) -> dict[str, _Tensor]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(min(length, 1 << 27)))
    header.pop("__metadata__", None)
    return {
        name: _Tensor(
            file,
            one["dtype"],
            tuple(one["shape"]),
            *(8 + length + offset for offset in one["data_offsets"]),
        )
        for name, one in header.items()
        if not name.endswith(OLD_BUFFER)
    }


def _size(tensor: _Tensor) -> int:
    return tensor.end - tensor.begin


def _equal(one: _Tensor, other: _Tensor) -> bool:
    if _size(one) == _size(other) == 0:
        return True  # An empty tensor cannot be mapped.
    return _size(one) == _size(other) and all(
        np.array_equal(_bytes(one)[start : start + _CHUNK], _bytes(other)[start : start + _CHUNK])
        for start in range(0, _size(one), _CHUNK)
    )


def _bytes(tensor: _Tensor) -> np.ndarray:
    return np.memmap(tensor.file, np.uint8, "r", tensor.begin, (_size(tensor),))
