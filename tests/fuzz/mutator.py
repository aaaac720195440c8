"""Damages valid messages of the contract, one place at a time, by reflection over their fields.

Every choice comes from the random.Random that is passed in: the same seed damages the same way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


def _integers(bits: int, signed: bool) -> list[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    wanted = {0, 1, 2, -1, 7, 299, 300, 4097, low, low + 1, high, high - 1, 2**31, 2**32}
    return sorted(value for value in wanted if low <= value <= high)


# Values that code forgets: limits of a type, and values just outside a sensible range.
_FLOATS = [
    0.0, -0.0, 1.0, -1.0, 1.0 + 2**-30, 2.0, 1e-3, 9.9e-4, 100.0, 100.1, 5e-324, 1e-308, 1e-38,
    3.5e38, 1e308, -1e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
_TEXTS = [
    "", " ", "\0", "a\0b", ".", "..", "../up", "a/b", "~", "-1", "{}", "%s%n", "ü ✓ \U0001f600",
    "\n", "localhost", "127.0.0.1:1", "[::1]:0", ":", "/dev/null", "/proc/none", "x" * 255,
    "x" * 300, "x" * 5000, "x" * 70_000,
]  # fmt: skip
_BYTES = [b"", b"\0", b"\1", b"\2", b"\xff" * 4, b"\0\0\xc0\x7f" * 8, b"\1" * 16, b"x" * 70_000]
_EDGES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_INT32: _integers(32, True),
    FieldDescriptor.TYPE_INT64: _integers(64, True),
    FieldDescriptor.TYPE_UINT64: _integers(64, False),
    FieldDescriptor.TYPE_FIXED64: _integers(64, False),
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_BOOL: [False, True],
    FieldDescriptor.TYPE_STRING: _TEXTS,
    FieldDescriptor.TYPE_BYTES: _BYTES,
}
# Lengths to which a list grows: beyond what a model takes, and beyond what a server should hold.
_LONG = (130, 5000, 100_000)
_LONG_OF_MESSAGES = (3, 50)


def edge_values(field: FieldDescriptor) -> list[Any]:
    """Scalar values worth trying in a field; for an enum also numbers that it does not have."""
    if field.enum_type is not None:
        return [*(value.number for value in field.enum_type.values), -1, 99, 2**31 - 1, -(2**31)]
    return _EDGES[field.type]


def places(message: Message, path: str = "") -> Iterator[tuple[Message, FieldDescriptor, str]]:
    """Every field of the message and of the messages inside it, set or not, with its path."""
    for field in message.DESCRIPTOR.fields:
        place = f"{path}.{field.name}" if path else field.name
        yield message, field, place
        if field.message_type is None:
            continue
        if field.is_repeated:
            for index, item in enumerate(getattr(message, field.name)):
                yield from places(item, f"{place}[{index}]")
        elif message.HasField(field.name):
            yield from places(getattr(message, field.name), place)


def mutate(message: Message, random: Random) -> str:
    """Changes one field, chosen among all places(); returns its path and the change."""
    parent, field, path = random.choice(list(places(message)))
    if field.is_repeated:
        return f"{path}: {_change_list(getattr(parent, field.name), field, random)}"
    if field.message_type is not None:
        return f"{path}: {_change_message(parent, field, random)}"
    return f"{path}: {_change_scalar(parent, field, random)}"


def damage(data: bytes, random: Random) -> tuple[bytes, str]:
    """Changes a serialized message, mostly so that it cannot be parsed; returns it, and how."""
    name = random.choice(list(_DAMAGES))
    return _DAMAGES[name](data, random), f"bytes: {name}"


def _change_scalar(parent: Message, field: FieldDescriptor, random: Random) -> str:
    if random.random() < 0.1:
        parent.ClearField(field.name)
        return "cleared"
    value = getattr(parent, field.name)
    changed = random.choice(edge_values(field))
    if random.random() < 0.25:
        changed = _nearby(value, changed, random)
    try:
        setattr(parent, field.name, changed)
    except ValueError:  # The value is beyond the limits of the type.
        return "unchanged"
    return f"{_short(value)} becomes {_short(changed)}"


def _nearby(value: Any, otherwise: Any, random: Random) -> Any:
    """A value next to `value`, or `otherwise` where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return random.choice([value + 1, value - 1, -value, value * 2])
    if isinstance(value, bytes) and value:
        return random.choice([value[:-1], value + b"\0", _flip_a_bit(value, random)])
    if isinstance(value, str) and value:
        return random.choice([value[:-1], value + "x", value + "\0", value + "/x"])
    return otherwise


def _change_message(parent: Message, field: FieldDescriptor, random: Random) -> str:
    # Setting a member of a oneof clears the member that was set.
    parent.ClearField(field.name)
    if random.random() < 0.5:
        return "cleared"
    getattr(parent, field.name).SetInParent()
    return "made empty"


def _change_list(items: Any, field: FieldDescriptor, random: Random) -> str:
    values = list(items)
    if field.message_type is None:
        new = random.choice(edge_values(field))
    elif values and random.random() < 0.5:
        new = random.choice(values)
    else:
        new = GetMessageClass(field.message_type)()
    index = random.randrange(len(values)) if values else 0
    how = random.choice(["cleared", "cut", "one less", "one twice", "one new", "swapped", "long"])
    if how == "cleared":
        values = []
    elif how == "cut":
        values = values[:index]
    elif how == "one less":
        del values[index : index + 1]
    elif how == "one twice":
        values[index:index] = values[index : index + 1]
    elif how == "one new":
        values[index : index + random.randrange(2)] = [new]
    elif how == "swapped":
        values.reverse()
    else:
        values = [*values, *[new] * random.choice(_LONG if _is_small(new) else _LONG_OF_MESSAGES)]
    # The list owns its messages, and `del` would clear them.
    copies = [copy.deepcopy(value) for value in values]
    del items[:]
    items.extend(copies)
    return f"{how}, {len(values)} entries"


def _is_small(value: Any) -> bool:
    return not isinstance(value, Message | str)


def _flip_a_bit(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\x80"
    index = random.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << random.randrange(8)]) + data[index + 1 :]


_DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "cut": lambda data, random: data[: random.randrange(len(data) + 1)],
    "a bit flipped": _flip_a_bit,
    "garbage": lambda _, random: random.randbytes(random.choice([1, 7, 100, 5000])),
    "garbage behind": lambda data, random: data + random.randbytes(random.choice([1, 3, 20])),
    "an unknown field": lambda data, _: data + b"\xfa\xff\x03\x03abc",
    "a group without end": lambda data, _: data + b"\x0b" * 200,
    "twice": lambda data, _: data + data,
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}… ({len(value)})"
