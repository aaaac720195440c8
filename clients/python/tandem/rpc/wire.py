"""Conversions between messages of the contract and plain Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from tandem._proto.types.v1 import sampling_pb2, tensor_pb2
from tandem.errors import ConfigError
from tandem.rpc import renamed

_DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def to_tensor(values: Any, dtype: Any = "<f4") -> tensor_pb2.Tensor:
    """Returns a dense tensor message; FLOAT32 unless another dtype is given."""
    array = np.ascontiguousarray(values, dtype=dtype)
    return tensor_pb2.Tensor(dtype=_CODES[array.dtype], shape=array.shape, data=array.tobytes())


def from_tensor(tensor: tensor_pb2.Tensor) -> np.ndarray:
    """Returns the values of a tensor message as an array; bfloat16 is widened to float32."""
    if tensor.dtype == tensor_pb2.DATA_TYPE_BFLOAT16:
        halves = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return halves.view("<f4").reshape(tuple(tensor.shape))
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor of type {tensor.dtype}")
    return np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))


def short_floats(values: Iterable[Any]) -> list[float]:
    """Returns float32 values as the shortest decimals that read back to the same float32."""
    return [float(str(value)) for value in np.asarray(values, np.float32)]


def enum_names(enum: EnumDescriptor) -> dict[str, int]:
    """Returns the short lower-case names of an enum's values, without the one for "not set"."""
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix).lower(): value.number for value in enum.values[1:]}


def enum_name(message: Message, field: str) -> str:
    """Returns the short lower-case name of an enum field's value; "" where it is not set."""
    names = enum_names(message.DESCRIPTOR.fields_by_name[field].enum_type)
    number = getattr(message, field)
    return next((name for name, value in names.items() if value == number), "")


def to_message(values: Mapping[str, Any], message: Message, path: str) -> Any:
    """Fills `message` from a mapping of its fields; None is "not set", enums by short name.

    Raises ConfigError, which names `path` and the field, for a value that does not fit.
    """
    for name, value in values.items():
        if value is None:
            continue
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise ConfigError(
                f"{path}: {message.DESCRIPTOR.name} has no field {name!r}{renamed.advice(name)}"
            )
        try:
            _set_field(message, field, value, f"{path}.{name}")
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}.{name}: {error}") from None
    return message


def _set_field(message: Message, field: FieldDescriptor, value: Any, path: str) -> None:
    if field.enum_type is not None and isinstance(value, str):
        setattr(message, field.name, _enum_number(field.enum_type, value, path))
    elif field.message_type is not None and isinstance(value, Mapping):
        to_message(value, getattr(message, field.name), path)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


def _enum_number(enum: EnumDescriptor, name: str, path: str) -> int:
    names = enum_names(enum)
    if name not in names:
        raise ConfigError(f"{path}: {name!r} is not one of {', '.join(names)}")
    return names[name]


def message_record(message: Message) -> dict[str, Any]:
    """Returns the fields of a message, inner messages as mappings; None is "not set".

    Enums are given by their short names.
    """
    record: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.enum_type is not None:
            record[field.name] = enum_name(message, field.name) or None
        else:
            known = not field.has_presence or message.HasField(field.name)
            value = getattr(message, field.name) if known else None
            record[field.name] = message_record(value) if isinstance(value, Message) else value
    return record


def tandem_record(config: sampling_pb2.TandemConfig) -> dict[str, Any]:
    """Returns the tandem configuration as a trajectory record has it."""
    return {
        "enabled": config.enabled,
        "selection_strategy": enum_name(config, "selection_strategy"),
        "prob_senior": config.prob_senior,
        "chunk_size": config.chunk_size,
        "max_gap_tokens": config.max_gap_tokens,
        "boundary_token_ids": list(config.boundary_token_ids),
    }
