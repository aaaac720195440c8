"""Sessions of the SDK: each client has one, and says every few seconds that it is there."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from tandem.openai_server.errors import RequestError
from tandem.tinker_server import limits


@dataclass
class Session:
    """A client's session.

    Attributes:
        metadata: what the client said about itself.
        seen: when it was last heard of (time.monotonic).
        ended: whether its client has said that it is done.
        runs: the models that it trained.
        samplers: its sampling sessions.
    """

    metadata: Mapping[str, Any]
    seen: float
    ended: bool = False
    runs: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether its client may still come back."""
        return not self.ended and time.monotonic() - self.seen < limits.SESSION_SECONDS


class ClientSessions:
    """The sessions of a server; the one that began first is forgotten when there are too many."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def begin(self, metadata: Mapping[str, Any] | None) -> str:
        """Begins a session; returns its id."""
        if len(self._sessions) >= limits.MAX_SESSIONS:
            ended = (name for name, one in self._sessions.items() if not one.lives)
            del self._sessions[next(ended, next(iter(self._sessions)))]
        name = uuid.uuid4().hex
        self._sessions[name] = Session(metadata or {}, time.monotonic())
        return name

    def find(self, name: str) -> Session:
        """Returns a session, which has been heard of; raises RequestError if it is not known."""
        session = self._sessions.get(name)
        if session is None or session.ended:
            says = "is not known" if session is None else "has ended"
            raise RequestError(
                f"session_id: {name[:200]!r} {says}", "session_id", status=HTTPStatus.GONE
            )
        session.seen = time.monotonic()
        return session

    def lives(self, name: str) -> bool:
        """Returns whether the client of a session may still come back."""
        return name in self._sessions and self._sessions[name].lives

    def names(self) -> list[str]:
        """Returns the ids of all sessions."""
        return list(self._sessions)
