"""The messages of a call, by which it is known whether it continues a trajectory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash


@dataclass(frozen=True)
class Conversation:
    """The messages of a call, as the chat template reads them."""

    messages: Sequence[Mapping[str, Any]]

    @cached_property
    def digests(self) -> list[str]:
        """A digest of each message."""
        return [message_digest(message) for message in self.messages]

    def continues(self, heard: Sequence[str], said: Collection[str]) -> bool:
        """Whether it continues the messages `heard` and one of `said`, which the model wrote.

        What follows has other roles than the assistant's.
        """
        rest = self.messages[len(heard) + 1 :]
        return (
            bool(rest)
            and self.digests[: len(heard)] == list(heard)
            and self.digests[len(heard)] in said
            and all(message["role"] != "assistant" for message in rest)
        )


def message_digest(message: Mapping[str, Any]) -> str:
    """Returns a digest of a message: what no chat template reads of a call does not count."""
    rest = dict(message)
    if isinstance(calls := rest.pop("tool_calls", None), list):
        rest["calls"] = [_call(call) for call in calls]
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    return [call.get("id"), function.get("name"), function.get("arguments")]
