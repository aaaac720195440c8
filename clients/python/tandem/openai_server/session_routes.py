"""The pages of sessions: their state, their rewards, and the finished ones for training."""

from __future__ import annotations

import asyncio
import base64
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.openai_server import limits
from tandem.openai_server.admission import Admission
from tandem.openai_server.errors import RequestError
from tandem.openai_server.fields import Fields, json_of
from tandem.openai_server.sessions import Session, Sessions
from tandem.utils.authors import written

_Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class End(Fields):
    """A request to /v1/sessions/ID/finish."""

    # Sessions with the same one are compared with each other. Default: the session's id.
    group_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Reward(End):
    """A request to /v1/sessions/ID/reward."""

    reward: _Number
    # One for each trajectory of the session, in the place of `reward`.
    trajectory_rewards: list[_Number] | None = None


_Body = TypeVar("_Body", bound=Fields)


class SessionPages:
    """The pages of one server's sessions."""

    def __init__(self, sessions: Sessions, admission: Admission) -> None:
        self._sessions = sessions
        self._admission = admission

    async def totals(self, request: Request) -> Response:
        """Counts the sessions."""
        return JSONResponse(self._sessions.totals())

    async def state(self, request: Request) -> Response:
        """Describes a session."""
        return JSONResponse(_state(self._sessions.find(request.path_params["session"])))

    async def reward(self, request: Request) -> Response:
        """Ends a session with its reward."""
        given = await self._read(request, Reward)
        name = request.path_params["session"]
        session = self._sessions.finish(
            name, given.reward, given.trajectory_rewards, given.group_id
        )
        return JSONResponse(_state(session))

    async def finish(self, request: Request) -> Response:
        """Ends a session whose reward the training loop gives."""
        given = await self._read(request, End)
        session = self._sessions.finish(request.path_params["session"], None, None, given.group_id)
        return JSONResponse(_state(session))

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        """Returns the body of a request; raises RequestError for one that does not fit."""
        with self._admission.request():
            async with self._admission.body(request) as body:
                return _read(body, kind)

    async def discard(self, request: Request) -> Response:
        """Ends a session from which nothing is learnt."""
        self._sessions.discard(request.path_params["session"])
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def finished(self, request: Request) -> Response:
        """Gives finished sessions behind a cursor, and changes nothing."""
        after = _one_parameter(request, {"after", "limit"}).get("after")
        limit = _limit(request)
        async with self._admission.heavy:
            page = self._sessions.finished(after, limit)
            return await asyncio.to_thread(
                lambda: JSONResponse({"sessions": [self._whole(session) for session in page]})
            )

    async def drop(self, request: Request) -> Response:
        """Forgets the finished sessions up to a cursor."""
        through = _one_parameter(request, {"through"}).get("through")
        if through is None:
            raise RequestError("through: is required", "through")
        self._sessions.drop(through)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _whole(self, session: Session) -> dict[str, Any]:
        """Returns a finished session with its trajectories, as messages of the contract."""
        return {
            "id": session.id,
            "cursor": self._sessions.cursor(session),
            "group_id": session.group_id,
            "trajectories": [
                {
                    "reward": reward,
                    "trajectory": base64.b64encode(one.joined.SerializeToString()).decode(),
                }
                for one, reward in zip(session.trajectories, session.rewards, strict=True)
                if one.joined is not None
            ],
        }


def session_routes(pages: SessionPages, wrapped: Any) -> list[Route]:
    """Returns the routes; `wrapped` makes an endpoint of a method of the pages."""
    one = "/v1/sessions/{session}"
    return [
        Route("/v1/sessions", wrapped(pages.totals), methods=["GET"]),
        Route(one, wrapped(pages.state), methods=["GET"]),
        Route(one, wrapped(pages.discard), methods=["DELETE"]),
        Route(f"{one}/reward", wrapped(pages.reward), methods=["POST"]),
        Route(f"{one}/finish", wrapped(pages.finish), methods=["POST"]),
        Route("/v1/trajectories", wrapped(pages.finished), methods=["GET"]),
        Route("/v1/trajectories", wrapped(pages.drop), methods=["DELETE"]),
    ]


def _state(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "state": "finished" if session.number else "open",
        "reward": session.reward,
        "group_id": session.group_id or None,
        "begun": {why.value: count for why, count in session.begun.items() if count},
        "trajectories": [
            {
                "index": one.index,
                "turns": one.turns,
                "busy": one.busy,
                "prompt_tokens": len(one.prompt),
                "response_tokens": len(one.joined.response_token_ids) if one.joined else 0,
                "written_tokens": written(one.joined.authorship_mask) if one.joined else 0,
            }
            for one in session.trajectories
        ],
    }


def _read(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return kind.model_validate(json_of(body))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(f"{field}: {first['msg']}", field) from None


def _one_parameter(request: Request, known: set[str]) -> dict[str, str]:
    """Returns the parameters of a page; raises RequestError for one that it does not have."""
    given = dict(request.query_params)
    for name in given:
        if name not in known:
            raise RequestError(f"{name}: not a parameter of this page", name)
    return given


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(limits.MAX_PAGE_SESSIONS))
    if not given.isdecimal() or not 1 <= int(given) <= limits.MAX_PAGE_SESSIONS:
        raise RequestError(f"limit: must be 1 to {limits.MAX_PAGE_SESSIONS}", "limit")
    return int(given)
