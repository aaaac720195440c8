"""The events of a Generate call, found by the sample that they are about.

How many tokens an event brings, and in which order the events of different samples come, depends on
the load of the server: on drafts, for example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from tandem._proto.rollout.v1.rollout_pb2 import GenerateResponse, TokensEvent
from tandem.rpc.generate_events import read_event

# A request, and its sample or, for the request itself, None.
_Key = tuple[str, int | None]


class GenerateEvents:
    """Reads events as far as they are asked for.

    Attributes:
        receive: returns the next event that is no heartbeat, None at the end.
    """

    def __init__(self, receive: Callable[[], GenerateResponse | None]) -> None:
        self._receive = receive
        self._tokens: dict[_Key, TokensEvent] = defaultdict(TokensEvent)  # all so far
        self._matched: dict[_Key, int] = defaultdict(int)  # number of tokens
        # Position of the first token, there and wanted; not 0 where a response is continued.
        self._starts: dict[_Key, int] = {}
        self._wanted_starts: dict[_Key, int] = {}
        self._ends: dict[_Key, list[GenerateResponse]] = defaultdict(list)
        self._gap = False

    def matching(self, event: GenerateResponse) -> GenerateResponse | None:
        """Returns the event that says the same of this call as `event` says of another.

        For tokens, it has those of the same places in the response, or fewer if the response ended.
        None: the call ended without the event.
        """
        if event.HasField("tokens"):
            return self._part(event.tokens)
        key = _key(event)
        while not self._ends[key]:
            if not self._read():
                return None
        return self._ends[key].pop(0)

    def has_more(self) -> bool:
        """Awaits the end; returns whether there are events or tokens that were not asked for."""
        while self._read():
            pass
        unmatched = (len(self._tokens[key].token_ids) > self._matched[key] for key in self._tokens)
        return self._gap or any(self._ends.values()) or any(unmatched)

    def _part(self, wanted: TokensEvent) -> GenerateResponse | None:
        key = wanted.request_id, wanted.sample_index
        first = wanted.offset - self._wanted_starts.setdefault(key, wanted.offset)
        end = first + len(wanted.token_ids)
        there = self._tokens[key]
        while len(there.token_ids) < end:
            if self._ends[key] or self._ends[wanted.request_id, None]:
                break
            if not self._read():
                return None
        self._matched[key] = max(self._matched[key], end)
        part = slice(first, end)
        return GenerateResponse(
            tokens=TokensEvent(
                request_id=wanted.request_id,
                sample_index=wanted.sample_index,
                offset=self._starts.get(key, wanted.offset - first) + first,
                token_ids=there.token_ids[part],
                authorship_mask=there.authorship_mask[part],
            )
        )

    def _read(self) -> bool:
        """Takes one event; returns whether there was one."""
        event = self._receive()
        if event is None:
            return False
        key = _key(event)
        if not event.HasField("tokens"):
            self._ends[key].append(event)
            return True
        there = self._tokens[key]
        start = self._starts.setdefault(key, event.tokens.offset)
        self._gap |= event.tokens.offset != start + len(there.token_ids)
        there.token_ids.extend(event.tokens.token_ids)
        there.authorship_mask += event.tokens.authorship_mask
        return True


def _key(event: GenerateResponse) -> _Key:
    told = read_event(event)
    # An event of a kind that is not known names no request.
    return ("" if told is None else told.request_id), getattr(told, "sample_index", None)
