"""The first difference of two messages, bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tandem._proto.types.v1 import tensor_pb2
from tandem.rpc.wire import from_tensor

# Fields that differ between two servers of the same models and weights.
NOT_COMPARED = frozenset(
    {
        # The clock decides.
        "tandem.types.v1.ServerInfo.uptime_seconds",
        "google.rpc.RetryInfo.retry_delay",
        "tandem.trainer.v1.TrainStepResponse.critic_seconds",
        # The build, the machine and the cluster decide.
        "tandem.types.v1.ServerInfo.software_version",
        "tandem.types.v1.ServerInfo.advertised_address",
        "tandem.types.v1.ModelInfo.path",
        "tandem.trainer.v1.GetServerInfoResponse.critic_address",
        # The load decides how many drafts a pass has; the response does not depend on them.
        "tandem.rollout.v1.FinishedEvent.draft_tokens",
        "tandem.rollout.v1.FinishedEvent.accepted_draft_tokens",
        "tandem.types.v1.Trajectory.accepted_draft_mask",
        # Drawn at random by the sender of an update.
        "tandem.weights.v1.GetVersionResponse.open_update_id",
        # Depends on the weights that the receiver held before.
        "tandem.trainer.v1.PublishResult.bytes",
    }
)

# Most characters of a value that is shown.
_SHOWN = 200


@dataclass(frozen=True)
class Difference:
    """A place at which two messages differ.

    Attributes:
        path: dotted path of the field, for example `report.metrics["loss/total"]`.
        recorded: the value in the recording, as text; "absent" where it has none.
        replayed: the value of the replay.
    """

    path: str
    recorded: str
    replayed: str


def first_difference(recorded: Message, replayed: Message) -> Difference | None:
    """Returns the first difference of two messages of one type, in the order of the fields.

    Floats are compared by their bits. NOT_COMPARED are left out, and fields that are unknown here.
    """
    return _in_message("", recorded, replayed)


def _in_message(path: str, one: Message, other: Message) -> Difference | None:
    if isinstance(one, tensor_pb2.Tensor) and (found := _in_tensor(path, one, other)):
        return found
    if isinstance(one, AnyMessage) and one.type_url == other.type_url:
        inner, other_inner = _unpacked(one), _unpacked(other)
        if inner is not None and other_inner is not None:
            return _in_message(path, inner, other_inner)
    for field in one.DESCRIPTOR.fields:
        if field.full_name in NOT_COMPARED:
            continue
        place = f"{path}.{field.name}" if path else field.name
        if found := _in_field(place, field, one, other):
            return found
    return None


def _in_field(path: str, field: FieldDescriptor, one: Message, other: Message) -> Difference | None:
    if field.has_presence:
        present = [message.HasField(field.name) for message in (one, other)]
        if not all(present):
            values = [
                _shown(getattr(message, field.name)) if has else "absent"
                for message, has in zip((one, other), present, strict=True)
            ]
            return Difference(path, *values) if any(present) else None
    values = getattr(one, field.name), getattr(other, field.name)
    compare: Callable[..., Difference | None] = _of_values
    if field.message_type is not None:
        compare = _in_message
    if not field.is_repeated:
        return compare(path, *values)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            compare = _of_values
        return _in_map(path, compare, *values)
    for index, pair in enumerate(zip(*values, strict=False)):
        if found := compare(f"{path}[{index}]", *pair):
            return found
    sizes = [len(value) for value in values]
    if sizes[0] != sizes[1]:
        return Difference(path, *(f"{size} elements" for size in sizes))
    return None


def _in_map(
    path: str, compare: Callable[..., Difference | None], one: Any, other: Any
) -> Difference | None:
    for key in sorted({*one, *other}):
        place = f'{path}["{key}"]'
        if not (key in one and key in other):
            values = (_shown(values[key]) if key in values else "absent" for values in (one, other))
            return Difference(place, *values)
        if found := compare(place, one[key], other[key]):
            return found
    return None


def _in_tensor(path: str, one: Any, other: Any) -> Difference | None:
    """Names the first element that differs; None if that is not what differs."""
    if one.dtype != other.dtype or one.shape != other.shape or one.data == other.data:
        return None
    try:
        arrays = [from_tensor(tensor).ravel() for tensor in (one, other)]
    except ValueError:
        return None
    bits = [array.view(f"u{array.itemsize}") for array in arrays]
    index = int(np.flatnonzero(bits[0] != bits[1])[0])
    return Difference(f"{path}[{index}]", *(str(array[index]) for array in arrays))


def _of_values(path: str, one: Any, other: Any) -> Difference | None:
    same = one == other
    if isinstance(one, float):
        # Zeros of different sign are equal, and NaN is not equal to itself.
        same = struct.pack("<d", one) == struct.pack("<d", other)
    return None if same else Difference(path, _shown(one), _shown(other))


def _unpacked(message: AnyMessage) -> Message | None:
    """Returns the message inside, None if its type is unknown here or its bytes are damaged."""
    try:
        kind = descriptor_pool.Default().FindMessageTypeByName(message.TypeName())
        return message_factory.GetMessageClass(kind).FromString(message.value)
    except (KeyError, DecodeError):
        return None


def _shown(value: Any) -> str:
    text = "{" + " ".join(str(value).split()) + "}" if isinstance(value, Message) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
