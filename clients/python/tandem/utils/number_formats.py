"""The number formats of exported weights, by their short and their long names."""

from __future__ import annotations

from tandem._proto.types.v1 import tensor_pb2
from tandem.errors import ConfigError

_LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NAMES = tuple(_LONG_NAMES)


def torch_name(name: str, field: str) -> str:
    """Returns the name that torch and transformers give a format: "bfloat16" for "bf16".

    Long names are taken too. Raises ConfigError, which begins with `field`, for other names.
    """
    long = _LONG_NAMES.get(name, name)
    if long not in _LONG_NAMES.values():
        raise ConfigError(f"{field}: {name!r} is not one of {', '.join(NAMES)}")
    return long


def data_type(name: str, field: str) -> tensor_pb2.DataType:
    """Returns the contract's value of a format; raises ConfigError as torch_name() does."""
    return tensor_pb2.DataType.Value(f"DATA_TYPE_{torch_name(name, field).upper()}")
