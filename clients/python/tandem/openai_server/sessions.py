"""Sessions: the calls of one agent's episode, joined into trajectories with the exact ids.

A call whose messages continue those of a trajectory continues it; any other call begins
another trajectory of the session. All of it happens in one event loop, so nothing is locked.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import TurnsDifferError
from tandem.openai_server import limits
from tandem.openai_server.conversation import Conversation
from tandem.openai_server.errors import RequestError
from tandem.rpc.joining import join
from tandem.rpc.requests import ResponseSoFar

_log = logging.getLogger(__name__)

# Bytes of a digest of a message, and of a token's id among those of a prompt.
_MESSAGE_BYTES, _ID_BYTES = 80, 32


class Begun(StrEnum):
    """Why a call began a trajectory.

    It is the session's first; its messages continue none; other fields than those of the
    trajectory that they continue; another call continues that at the same time; or the chat
    template renders the turns so far otherwise once these messages follow.
    """

    FIRST = "first"
    MESSAGES = "messages"
    SETTINGS = "settings"
    CONCURRENT = "concurrent"
    TEMPLATE = "template"


@dataclass(eq=False)
class SessionTrajectory:
    """Turns that continue each other.

    Attributes:
        index: its number in the session, and the index of its sample.
        settings: digest of the fields that all its calls have in common.
        prompt: ids of the prompt.
        heard: digests of the messages before the last turn.
        said: digests of the message of the last turn, as it may come back; empty before one ended.
        joined: the response so far; None before the first turn has ended.
        turns: number of turns that have ended.
        busy: whether a call writes its next turn.
        seed: determines, with the index, every random draw.
    """

    index: int
    settings: str
    seed: int
    prompt: Sequence[int] = ()
    heard: Sequence[str] = ()
    said: Collection[str] = ()
    joined: trajectory_pb2.Trajectory | None = None
    turns: int = 0
    busy: bool = True

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        joined = 0 if self.joined is None else self.joined.ByteSize()
        return joined + len(self.prompt) * _ID_BYTES + len(self.heard) * _MESSAGE_BYTES


@dataclass(eq=False)
class Session:
    """An agent's episode.

    Attributes:
        trajectories: in the order in which they began.
        begun: how many trajectories began, by why.
        reward: None while the session is open, and where it ended without one.
        rewards: the reward of each trajectory, or None; empty while the session is open.
        group_id: sessions with the same one are compared with each other.
        number: its place among the finished sessions, from 1; 0 while it is open.
        size: about how many bytes its trajectories take.
    """

    id: str
    trajectories: list[SessionTrajectory] = field(default_factory=list)
    begun: Counter[Begun] = field(default_factory=Counter)
    reward: float | None = None
    rewards: Sequence[float | None] = ()
    group_id: str = ""
    number: int = 0
    size: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        """Whether a call is worked on."""
        return any(one.busy for one in self.trajectories)


@dataclass(eq=False)
class Call:
    """A call of a session while it is worked on.

    Attributes:
        trajectory: the one that it continues or begins.
        conversation: the call's messages.
        begun: why it begins a trajectory; None if it continues one.
        said: ids of what the environment said since the last turn.
        ended: whether its turn belongs to the trajectory, which other calls may continue now: they
            may come before a stream of this one is closed.
    """

    session: Session
    trajectory: SessionTrajectory
    conversation: Conversation
    begun: Begun | None
    said: Sequence[int] = ()
    ended: bool = False

    def so_far(self) -> ResponseSoFar:
        """Returns the response that the call continues; none for a first turn."""
        whole = self.trajectory.joined
        return ResponseSoFar() if whole is None else ResponseSoFar.after(whole, self.said)


class Sessions:
    """All sessions of a server."""

    def __init__(self) -> None:
        # Names this server's sessions: their numbers begin anew with another one.
        self._instance = secrets.token_hex(8)
        # The session that was used last is the last one.
        self._open: OrderedDict[str, Session] = OrderedDict()
        # In the order of their ends.
        self._finished: OrderedDict[str, Session] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._last = 0
        self._dropped = 0
        self._bytes = 0
        self._begun: Counter[Begun] = Counter()
        self._idle = 0

    # Calls.

    @contextmanager
    def call(self, name: str, settings: str, seed: int, talk: Conversation) -> Iterator[Call]:
        """Gives a call its trajectory; one that never wrote a turn is forgotten.

        Raises RequestError for a session that has ended, and where there is no room.
        """
        session = self._session(name)
        call = self._continue(session, settings, talk)
        if call is None:
            why = _why_begun(session, settings, talk)
            call = Call(session, self._begin(session, settings, seed, why), talk, why)
        try:
            yield call
        finally:
            if not call.ended:
                call.trajectory.busy = False
            if call.trajectory.joined is None:
                session.trajectories.remove(call.trajectory)
                for begun in (session.begun, self._begun):
                    begun[call.begun or Begun.FIRST] -= 1
            self._used(session)
            if not session.trajectories:
                self._open.pop(name, None)

    def begin_instead(self, call: Call, settings: str, seed: int) -> None:
        """Lets a call begin a trajectory, as the template cannot continue that of the call."""
        call.trajectory.busy = False
        call.begun = Begun.TEMPLATE
        call.trajectory = self._begin(call.session, settings, seed, Begun.TEMPLATE)

    def wrote(self, call: Call, turn: trajectory_pb2.Trajectory, said: Collection[str]) -> None:
        """Takes the turn that a call wrote; `said` are digests of its message.

        Raises RequestError if the turn does not fit, as where another junior wrote it.
        """
        one = call.trajectory
        try:
            one.joined = turn if one.joined is None else join(one.joined, call.said, turn)
        except TurnsDifferError as error:
            raise RequestError(
                f"the turn does not continue its trajectory: {error.message}",
                status=HTTPStatus.CONFLICT,
                code="turns_differ",
            ) from None
        one.heard, one.said = call.conversation.digests, said
        one.turns += 1
        one.busy, call.ended = False, True
        before = call.session.size
        call.session.size = sum(one.size for one in call.session.trajectories)
        self._bytes += call.session.size - before

    def _session(self, name: str) -> Session:
        """Returns an open session, or a new one."""
        self._forget_idle()
        session = self._open.get(name)
        if session is None:
            self._require_not_ended(name)
            if len(self._open) + len(self._finished) >= limits.MAX_SESSIONS:
                raise _full(f"the server holds {limits.MAX_SESSIONS} sessions")
        if self._bytes >= limits.MAX_SESSIONS_BYTES:
            raise _full(f"the server holds {self._bytes} bytes of sessions")
        if session is None:
            session = self._open[name] = Session(name)
        self._used(session)
        return session

    def _used(self, session: Session) -> None:
        session.used = time.monotonic()
        if session.id in self._open:
            self._open.move_to_end(session.id)

    def _continue(self, session: Session, settings: str, talk: Conversation) -> Call | None:
        """Returns a call that continues the trajectory that has heard most of its messages."""
        found = [
            one
            for one in session.trajectories
            if not one.busy and one.settings == settings and talk.continues(one.heard, one.said)
        ]
        if not found:
            return None
        one = max(found, key=lambda one: len(one.heard))
        one.busy = True
        return Call(session, one, talk, None)

    def _begin(self, session: Session, settings: str, seed: int, why: Begun) -> SessionTrajectory:
        if len(session.trajectories) >= limits.MAX_SESSION_TRAJECTORIES:
            raise RequestError(
                f"session_id: session {session.id} has {len(session.trajectories)} trajectories, "
                "which is the most: its calls do not continue each other",
                "session_id",
                code="too_many_trajectories",
            )
        taken = {one.index for one in session.trajectories}
        index = next(index for index in itertools.count() if index not in taken)
        one = SessionTrajectory(index, settings, seed)
        session.trajectories.append(one)
        session.begun[why] += 1
        self._begun[why] += 1
        # One line for each reason: an agent may never continue anything.
        if why != Begun.FIRST and session.begun[why] == 1:
            _log.warning("session %s: trajectory %d begins: %s", session.id, index, why)
        return one

    # Ends.

    def finish(
        self,
        name: str,
        reward: float | None,
        rewards: Sequence[float] | None,
        group_id: str | None,
    ) -> Session:
        """Ends a session with its reward, or None; the same end again changes nothing.

        `rewards` are those of its trajectories, by default the session's. Raises RequestError for
        a session that is not open, or at work.
        """
        session = self.find(name)
        _require_idle(session)
        count = len(session.trajectories)
        if rewards is not None and len(rewards) != count:
            raise RequestError(
                f"trajectory_rewards: has {len(rewards)} numbers; the session has {count} "
                "trajectories",
                "trajectory_rewards",
            )
        end = (reward, list(rewards or [reward] * count), group_id or name)
        if session.number:
            if end != (session.reward, session.rewards, session.group_id):
                raise _conflict(f"session {name} has ended in another way", "session_ended")
            return session
        session.reward, session.rewards, session.group_id = end
        session.number = self._last = next(self._numbers)
        del self._open[name]
        self._finished[name] = session
        return session

    def discard(self, name: str) -> None:
        """Ends a session for no training: its trajectories are forgotten."""
        session = self.find(name)
        if session.number:
            raise _conflict(f"session {name} has ended for training", "session_ended")
        _require_idle(session)
        self._forget(session, "was discarded")

    def find(self, name: str) -> Session:
        """Returns a session that is open, or finished and not dropped; raises RequestError."""
        self._forget_idle()
        if name in self._open:
            return self._open[name]
        if name in self._finished:
            return self._finished[name]
        self._require_not_ended(name)
        raise RequestError(
            f"session {name} does not exist",
            status=HTTPStatus.NOT_FOUND,
            code="session_not_found",
        )

    def totals(self) -> dict[str, Any]:
        """Returns the numbers of sessions, and of trajectories by why they began."""
        self._forget_idle()
        return {
            "open": len(self._open),
            "finished": len(self._finished),
            "dropped_for_idleness": self._idle,
            "bytes": self._bytes,
            "begun": {why.value: self._begun[why] for why in Begun},
        }

    def _require_not_ended(self, name: str) -> None:
        if name in self._finished:
            raise _conflict(f"session {name} has ended", "session_ended")
        if name in self._ended:
            raise _conflict(f"session {name} {self._ended[name]}", "session_ended")

    def _forget_idle(self) -> None:
        """Discards the sessions that were not used for long."""
        oldest = time.monotonic() - limits.SESSION_IDLE_SECONDS
        for session in list(
            itertools.takewhile(lambda one: one.used < oldest, self._open.values())
        ):
            if not session.busy:
                _log.warning("session %s: discarded, it was idle", session.id)
                self._idle += 1
                self._forget(session, f"was idle for {limits.SESSION_IDLE_SECONDS} s")

    def _forget(self, session: Session, why: str) -> None:
        self._open.pop(session.id, None)
        self._bytes -= session.size
        self._ended[session.id] = why
        while len(self._ended) > limits.MAX_ENDED_SESSIONS:
            self._ended.popitem(last=False)

    # Finished sessions, in the order of their ends.

    def cursor(self, session: Session) -> str:
        """Returns the name of the place behind a finished session."""
        return f"{self._instance}-{session.number}"

    def finished(self, after: str | None, most: int) -> list[Session]:
        """Returns finished sessions behind a cursor; without one, all that are held.

        Raises RequestError for a cursor behind which sessions were dropped, or of another server.
        """
        number = self._dropped if after is None else self._number(after, "after")
        if number < self._dropped:
            raise _conflict("after: sessions behind this cursor were dropped", "sessions_dropped")
        page: list[Session] = []
        size = 0
        for session in self._finished.values():
            if session.number <= number:
                continue
            size += session.size
            if len(page) >= most or (page and size > limits.MAX_PAGE_BYTES):
                break
            page.append(session)
        return page

    def drop(self, through: str) -> None:
        """Forgets the finished sessions before a cursor; a repeat changes nothing."""
        number = self._number(through, "through")
        for session in [one for one in self._finished.values() if one.number <= number]:
            del self._finished[session.id]
            self._forget(session, "was taken for training")
        self._dropped = max(self._dropped, number)

    def _number(self, cursor: str, field: str) -> int:
        instance, _, number = cursor.rpartition("-")
        if instance != self._instance or not number.isdecimal() or int(number) > self._last:
            raise _conflict(
                f"{field}: the cursor is not one of this server's, which may have restarted",
                "cursor_unknown",
            )
        return int(number)


def _why_begun(session: Session, settings: str, talk: Conversation) -> Begun:
    """Returns why a call continues none of a session's trajectories."""
    if not session.trajectories:
        return Begun.FIRST
    heard = [one for one in session.trajectories if talk.continues(one.heard, one.said)]
    if not heard:
        return Begun.MESSAGES
    same = any(one.settings == settings for one in heard)
    return Begun.CONCURRENT if same else Begun.SETTINGS


def _require_idle(session: Session) -> None:
    if session.busy:
        raise _conflict(f"a call of session {session.id} is worked on", "session_busy")


def _conflict(why: str, code: str) -> RequestError:
    return RequestError(why, status=HTTPStatus.CONFLICT, code=code)


def _full(why: str) -> RequestError:
    return RequestError(
        f"{why}: finished ones wait to be taken for training, others for their rewards",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code="too_many_sessions",
        retry_after_seconds=limits.RETRY_SECONDS,
    )
