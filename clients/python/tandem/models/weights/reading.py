"""Reading the weights of a model directory tensor by tensor, as transformers finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import ConfigError
from tandem.models.weights.layout import (
    INDEX,
    PICKLED_INDEX,
    PICKLED_WEIGHTS,
    WEIGHTS,
    pickled_weight_files,
    weight_files,
    weight_map,
)
from tandem.utils.text_files import require_no_lfs_pointer

if TYPE_CHECKING:
    import torch

# The types of weights. A quantised checkpoint has others, with tensors of scales beside them.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source; `read` reads its values."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], torch.Tensor]


class Source:
    """The tensors of a directory's weight files, in the order in which they lie in the files.

    Attributes:
        tensors: by their names.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the headers of the weight files, of files that torch.save wrote their pickles.

        Raises ConfigError where there are none, and for files that are damaged or are not what
        their index says.
        """
        self.files = weight_files(directory)
        self._pickled = not self.files
        if self._pickled:
            self.files = pickled_weight_files(directory)
        if not self.files:
            raise ConfigError(
                f"{directory}: holds no weights",
                hint=f"expected model.safetensors, pytorch_model.bin, or files named by {INDEX} "
                f"or {PICKLED_INDEX}",
            )
        self.tensors: dict[str, SourceTensor] = {}
        self._directory = directory
        for file in self.files:
            require_no_lfs_pointer(file, str(file))
            for tensor in self._open_pickled(file) if self._pickled else safetensors_of(file):
                if tensor.name in self.tensors:
                    other = self.tensors[tensor.name].file
                    raise ConfigError(f"{file}: tensor {tensor.name!r}: {other.name} has it, too")
                self.tensors[tensor.name] = tensor
        self._require_index()

    @property
    def bytes(self) -> int:
        """Number of bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def values(
        self, names: Iterable[str] | None = None, hasher: Any = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and values of the tensors `names`, by default of all, one at a time.

        `hasher` gets the names and bytes of all tensors, of those that are not yielded, too.
        """
        import torch

        wanted = None if names is None else set(names)
        for name, tensor in self.tensors.items():
            value = tensor.read()
            if hasher is not None:
                hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
                if value.numel():
                    hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy())
            if wanted is None or name in wanted:
                yield name, value

    def _open_pickled(self, file: Path) -> Iterator[SourceTensor]:
        content = _unpickled(file)
        if not isinstance(content, Mapping):
            raise ConfigError(f"{file}: is not a mapping from names to tensors")
        for name, value in content.items():
            if not hasattr(value, "is_floating_point"):
                raise ConfigError(f"{file}: {name!r} is not a tensor")
            if not value.is_floating_point() or value.element_size() < 2:
                raise _quantised(file, name, str(value.dtype).removeprefix("torch."))
            yield SourceTensor(name, tuple(value.shape), file, lambda value=value: value)

    def _require_index(self) -> None:
        """Raises ConfigError unless every tensor is in the file that the index names."""
        if self.files[0].name in (WEIGHTS, PICKLED_WEIGHTS):
            return  # One file comes before an index.
        index = PICKLED_INDEX if self._pickled else INDEX
        places = weight_map(self._directory, index)
        for name, file in places.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ConfigError(
                    f"{self._directory / file}: tensor {name!r}: missing, although {index} places "
                    "it here"
                )
        for name, tensor in self.tensors.items():
            if name not in places:
                raise ConfigError(f"{tensor.file}: tensor {name!r}: not in {index}")


def safetensors_of(file: Path) -> list[SourceTensor]:
    """Returns the tensors of a safetensors file, in the order in which they lie in it.

    Their values are read, not mapped: of a mapped file every page that was read counts as memory.
    Raises ConfigError for a file that is damaged, and for other types than floating point.
    """
    from safetensors import SafetensorError, safe_open

    found = []
    try:
        with file.open("rb") as stream:
            # The data lie behind the header's length and the header, without gaps.
            begin = 8 + int.from_bytes(stream.read(8), "little")
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise _quantised(file, name, part.get_dtype())
                shape = tuple(part.get_shape())
                read = partial(_read, file, begin, shape, _FLOATS[part.get_dtype()])
                found.append(SourceTensor(name, shape, file, read))
                begin += math.prod(shape) * _BITS[part.get_dtype()] // 8
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


def _read(file: Path, begin: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    import torch

    values = torch.empty(shape, dtype=getattr(torch, dtype))
    if not values.numel():
        return values
    rest = memoryview(values.view(-1).view(torch.uint8).numpy())
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while rest:
            # One call reads at most 2 GiB.
            count = stream.readinto(rest)
            if not count:
                raise ConfigError(f"{file}: ends too early: it was changed while it was read")
            rest = rest[count:]
    return values


def _unpickled(file: Path) -> Any:
    """Returns the content of a file of torch.save, mapped where its format allows it."""
    import pickle

    import torch

    for mapped in (True, False):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{file}: contains more than tensors and would run code: {reason}",
                hint="if you trust it, convert it with transformers' save_pretrained",
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            # Files of torch before 1.6 cannot be mapped.
            if not mapped or "mmap" not in str(error):
                raise ConfigError(f"{file}: {str(error).partition(chr(10))[0]}") from None
    raise AssertionError


def _quantised(file: Path, name: str, dtype: str) -> ConfigError:
    return ConfigError(
        f"{file}: tensor {name!r}: has the type {dtype}, which is not floating point of 16 bits "
        "or more",
        hint="quantised checkpoints are not supported: import the model that it was made from",
    )
