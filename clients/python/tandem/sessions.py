"""Sessions of `tandem serve-openai`: rewards for agents' episodes, and the episodes to train on.

with_rewards = SessionsClient("http://127.0.0.1:8000/v1")
with_rewards.reward("episode-7", 1.0, group_id="task-3")
episodes = with_rewards.finished(count=8, wait_seconds=600)
samples = policy_samples(episodes)          # for TrainerClient.train_step()
with_rewards.drop(episodes[-1].cursor)      # once what was learnt is safe
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import RewardError, SessionsError
from tandem.rpc.requests import PolicySample

# Seconds between two looks for finished sessions.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class FinishedSession:
    """An agent's episode that has ended.

    Attributes:
        id: the name that the agent gave it.
        cursor: the place behind it among the finished sessions of its server.
        group_id: sessions with the same one are compared with each other.
        trajectories: the agent's calls, joined where they continue each other.
        rewards: the reward of each trajectory; None if the session ended without one.
    """

    id: str
    cursor: str
    group_id: str
    trajectories: Sequence[trajectory_pb2.Trajectory]
    rewards: Sequence[float] | None


# The reward of a session, or one for each of its trajectories.
SessionReward = Callable[[FinishedSession], float | Iterable[float]]


def policy_samples(
    sessions: Iterable[FinishedSession], reward: SessionReward | None = None
) -> list[PolicySample]:
    """Returns a sample of each trajectory, for TrainerClient.train_step().

    `reward` judges every session, in place of the reward that it ended with, if any.

    Raises RewardError for a session without a reward, and for rewards that are not one for each
    trajectory.
    """
    return [
        PolicySample(trajectory, session.group_id, value)
        for session in sessions
        for trajectory, value in zip(session.trajectories, _rewards(session, reward), strict=True)
    ]


def _rewards(session: FinishedSession, reward: SessionReward | None) -> Sequence[float]:
    given = session.rewards if reward is None else reward(session)
    if given is None:
        raise RewardError(
            f"session {session.id}: ended without a reward, which policy_samples(reward=) can give"
        )
    count = len(session.trajectories)
    rewards = list(given) if isinstance(given, Iterable) else [given] * count
    if len(rewards) != count:
        raise RewardError(
            f"session {session.id}: reward gave {len(rewards)} numbers for {count} trajectories"
        )
    return rewards


class SessionsClient:
    """Calls the sessions' pages of one `tandem serve-openai`; may be shared by threads.

    Every method raises SessionsError for a call that the server refuses or does not answer. Each
    call may be made again: a repeat changes nothing.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`base_url` ends with /v1; `ssl_context` checks a certificate of your own authority."""
        self._base_url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = timeout_seconds
        # Proxies of the environment are not used, as by all clients here.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl_context)
        )

    def state(self, session_id: str) -> dict[str, Any]:
        """Returns the state of a session: its trajectories, why each began, and its reward."""
        state: dict[str, Any] = self._call("GET", _session(session_id))
        return state

    def reward(
        self,
        session_id: str,
        reward: float,
        *,
        group_id: str | None = None,
        trajectory_rewards: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Ends a session with its reward; returns its state.

        `group_id` is that of its samples, by default its id. `trajectory_rewards` are the rewards
        of its trajectories, which all have `reward` by default.
        """
        body = {
            "reward": reward,
            "group_id": group_id,
            "trajectory_rewards": None if trajectory_rewards is None else [*trajectory_rewards],
        }
        state: dict[str, Any] = self._call("POST", f"{_session(session_id)}/reward", body)
        return state

    def finish(self, session_id: str, *, group_id: str | None = None) -> dict[str, Any]:
        """Ends a session without a reward, which policy_samples(reward=) gives it; as reward()."""
        body = {"group_id": group_id}
        state: dict[str, Any] = self._call("POST", f"{_session(session_id)}/finish", body)
        return state

    def discard(self, session_id: str) -> None:
        """Ends a session from which nothing is learnt."""
        self._call("DELETE", _session(session_id))

    def finished(
        self, after: str | None = None, *, count: int = 1, wait_seconds: float = 0.0
    ) -> list[FinishedSession]:
        """Returns up to `count` finished sessions, in the order in which they ended.

        Waits until there are as many, but no longer than `wait_seconds`. `after` is the cursor of
        the last session that was trained on; without it they are the first that the server holds.
        The same call returns the same sessions again, until they are dropped.
        """
        end = time.monotonic() + wait_seconds
        sessions: list[FinishedSession] = []
        while True:
            query = {"limit": str(min(256, count - len(sessions)))}
            if after is not None:
                query["after"] = after
            page = self._call("GET", f"/trajectories?{urllib.parse.urlencode(query)}")["sessions"]
            sessions += [_finished(one) for one in page]
            if len(sessions) >= count or (not page and time.monotonic() >= end):
                return sessions
            if sessions:
                after = sessions[-1].cursor
            if not page:
                time.sleep(_POLL_SECONDS)

    def drop(self, through: str) -> None:
        """Lets the server forget the finished sessions up to the one with this cursor."""
        self._call("DELETE", f"/trajectories?{urllib.parse.urlencode({'through': through})}")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer; None for one without a body."""
        request = urllib.request.Request(
            self._base_url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={**self._headers, "content-type": "application/json"},
            method=method,
        )
        place = f"{method} {request.full_url}"
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                read = answer.read()
                return json.loads(read) if read else None
        except urllib.error.HTTPError as error:
            raise _refused(place, error) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SessionsError(f"{place}: {error}") from None


def _session(session_id: str) -> str:
    return f"/sessions/{urllib.parse.quote(session_id, safe='')}"


def _finished(record: Mapping[str, Any]) -> FinishedSession:
    trajectories = [
        trajectory_pb2.Trajectory.FromString(base64.b64decode(one["trajectory"]))
        for one in record["trajectories"]
    ]
    rewards = [one["reward"] for one in record["trajectories"]]
    return FinishedSession(
        record["id"],
        record["cursor"],
        record["group_id"],
        trajectories,
        None if None in rewards else rewards,
    )


def _refused(place: str, error: urllib.error.HTTPError) -> SessionsError:
    """Returns the error that an answer's body names."""
    try:
        said = json.loads(error.read())["error"]
        message, code = said["message"], said["code"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        message, code = error.reason, None
    return SessionsError(f"{place}: {message}", status=error.code, code=code)
