"""Environments that are OpenEnv servers.

What an environment offers is asked of the server: the tools of an MCP environment, or else the
schema of its actions. An MCP environment's tools are the models' tools. Any other has one tool,
`step`, whose arguments are the fields of an action; with `text_field` the text of a turn is that
field of the action, and the models call no tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import xxhash

from tandem.environments import openenv_session
from tandem.environments.contract import EnvironmentClass, signature_without_self
from tandem.environments.openenv_session import (
    ActionError,
    Observed,
    OpenEnvSession,
    page,
    require_websockets,
)
from tandem.errors import ConfigError, EnvironmentFailedError
from tandem.settings.environment import OpenEnvSettings

_FIELD = "environment.openenv"
# The tool of an environment that is not one of MCP.
STEP = "step"
# Fields of every action, which no model writes.
_OWN_FIELDS = ("metadata",)
# Fields of the action that calls a tool of MCP.
_MCP_FIELDS = {"type", "tool_name", "arguments"}
# Seeds are below this number: environments pass them to generators that take no larger ones.
_SEEDS = 1 << 31


def load_openenv(settings: OpenEnvSettings) -> EnvironmentClass:
    """Asks a server for its tools; raises ConfigError for one that does not answer or fit."""
    require_websockets()
    try:
        action = page(settings.url, "schema")["action"]
        fields = dict(action.get("properties") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{_FIELD}.url: {settings.url} is not the address of an OpenEnv server: {error}",
            hint="its page /schema describes the actions",
        ) from error
    for name in _OWN_FIELDS:
        fields.pop(name, None)
    mcp = not fields or set(fields) == _MCP_FIELDS
    if settings.text_field is not None and (mcp or settings.text_field not in fields):
        known = "calls of tools" if mcp else f"made of {', '.join(fields)}"
        raise ConfigError(
            f"{_FIELD}.text_field: {settings.text_field!r} is not a field of the actions of "
            f"{settings.url}, which are {known}"
        )
    tools = _mcp_tools(settings) if mcp else {STEP: _step_tool(action, fields)}
    return EnvironmentClass(
        settings.url,
        f"{_FIELD}.url",
        partial(OpenEnvEpisode, settings, mcp=mcp),
        signature_without_self(OpenEnvEpisode.reset),
        tools,
        has_reward=True,
        digest=xxhash.xxh3_128_hexdigest(json.dumps(tools, sort_keys=True).encode()),
        find=OpenEnvEpisode.tool,
        text_argument=None if settings.text_field is None else (STEP, settings.text_field),
    )


class OpenEnvEpisode:
    """One episode with a server, as an environment's class.

    Attributes:
        done: whether the server has ended the episode.
    """

    def __init__(self, settings: OpenEnvSettings, *, mcp: bool) -> None:
        """`mcp` says whether the environment is one of MCP."""
        self._settings = settings
        self._mcp = mcp
        self._session = OpenEnvSession(settings.url, settings.retry_seconds)
        self._rewards: list[float] = []
        self.done = False

    def reset(self, /, *, seed: int, **row: Any) -> str | None:
        """Begins the episode; returns the observation as text, None if it is empty.

        The server's reset gets the columns that it has parameters for.
        """
        begun = self._session.reset({**row, "seed": seed % _SEEDS})
        if begun.done:
            raise EnvironmentFailedError("the episode has ended before its first turn")
        text = self._taken(begun)
        return f"\n{text}" if text else None

    def tool(self, name: str) -> Callable[..., str]:
        """Returns a tool as a function."""
        return partial(self._call, name)

    def get_reward(self) -> float:
        """Returns the reward of the steps; 0 if the server gave none."""
        if not self._rewards:
            return 0.0
        return self._rewards[-1] if self._settings.reward == "last" else sum(self._rewards)

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _call(self, name: str, /, **arguments: Any) -> str:
        if not self._mcp:
            return self._taken(self._session.step(arguments))
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._taken(self._session.step(action))

    def _taken(self, observed: Observed) -> str:
        """Counts reward and end; returns what the models are told."""
        self.done = observed.done
        if observed.reward is not None:
            self._rewards.append(observed.reward)
        if self._mcp and "tool_name" in observed.observation:
            return _tool_result(observed.observation)
        return _told(observed.observation, self._settings.observation_field)


def _told(observation: Mapping[str, Any], field: str | None) -> str:
    """Returns an observation as text."""
    if field is not None:
        if field not in observation:
            known = ", ".join(observation)
            raise EnvironmentFailedError(
                f"{_FIELD}.observation_field: an observation has no {field!r}, only {known}"
            )
        observation = {field: observation[field]}
    if not observation:
        return ""
    values = list(observation.values())
    if len(values) == 1 and (field is not None or isinstance(values[0], str)):
        return values[0] if isinstance(values[0], str) else json.dumps(values[0])
    return json.dumps(observation)


def _tool_result(observation: Mapping[str, Any]) -> str:
    """Returns what a tool of MCP gave as text; raises RuntimeError with what it says of an error.

    A result of FastMCP has the value beside other forms of it.
    """
    if error := observation.get("error"):
        raise RuntimeError(str(error.get("message")))
    result = observation.get("result")
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)


def _mcp_tools(settings: OpenEnvSettings) -> dict[str, dict[str, Any]]:
    """Returns the schemas of the tools of an MCP environment."""
    session = OpenEnvSession(settings.url, settings.retry_seconds, openenv_session.ANSWER_SECONDS)
    try:
        session.reset({})
        listed = session.step({"type": "list_tools"}).observation.get("tools") or []
        tools = {
            one["name"]: _function(one["name"], one.get("description"), one["input_schema"])
            for one in listed
        }
    except (ActionError, EnvironmentFailedError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{_FIELD}.url: the tools of {settings.url} cannot be listed: {error}"
        ) from error
    finally:
        session.close()
    if not tools:
        raise ConfigError(f"{_FIELD}.url: {settings.url} has no tools, and its actions no fields")
    return tools


def _step_tool(action: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the tool whose arguments are the fields of an action."""
    required = [name for name in action.get("required") or () if name in fields]
    parameters = {"type": "object", "properties": dict(fields), "required": required}
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    return _function(STEP, action.get("description"), parameters)


def _function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    about = description or "Takes a step of the environment."
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}
