"""The section `environment` of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem.settings.base import Count, NonEmptyPath, Settings, Text
from tandem.settings.paths import absolute

ToolCallFormat = Literal["hermes", "qwen_xml", "llama3", "mistral"]


class OpenEnvSettings(Settings):
    """An environment that is an OpenEnv server."""

    # Address of the server, http://HOST:PORT for example; its sessions are at /ws below that.
    url: Annotated[str, Field(pattern=r"^(http|https|ws|wss)://[^/]")]
    # Field of the server's actions that gets the whole text of a turn; the models then call no
    # tools. Not set: the tools of an MCP environment, or a tool `step` with the fields of an
    # action.
    text_field: Text | None = None
    # Field of the observations that the models are told. Not set: all fields, as JSON; a text that
    # is the only one as it is.
    observation_field: Text | None = None
    # Reward of an episode: the sum of the rewards of its steps, or the last one that was given.
    reward: Literal["sum", "last"] = "sum"
    # Seconds for which a session is asked for again while the server does not answer, or has as
    # many as it can.
    retry_seconds: float = Field(30.0, ge=0, le=1e8)


class EnvironmentSettings(Settings):
    """An environment that the models talk with, turn by turn, in the place of single responses.

    Either `class` or `openenv` names it.
    """

    # "path/file.py:Class" or "module:Class": a class with reset(self, **row), tools as methods, and
    # optionally get_reward(self).
    class_: Annotated[str, Field(pattern=r"^.+:\w+$")] | None = Field(None, alias="class")
    openenv: OpenEnvSettings | None = None
    # Folder in which modules are looked up after the installed ones. Default: the run file's.
    python_path: NonEmptyPath = Field(default_factory=Path.cwd)
    # How the model writes calls of tools: hermes (<tool_call>{…}</tool_call>, as Qwen2.5 and Qwen3
    # do), qwen_xml (<function=…> inside of that, as Qwen3.5 and Nemotron 3 do), llama3
    # (<|python_tag|> or bare JSON), mistral ([TOOL_CALLS] […], or NAME[ARGS]{…} behind each
    # [TOOL_CALLS]). Not set: the one that the chat template names.
    tool_calls: ToolCallFormat | None = None
    # Whether reset() gets the function `junior`, by which an environment asks the frozen junior of
    # the rollout servers: for an opponent's move, for example.
    junior: bool = False
    # Most turns of the models in an episode.
    max_turns: Count = 8
    # Most calls of tools in an episode. Not set: no bound of its own.
    max_tool_calls: Count | None = None
    # Turns with a call that is not valid JSON after which an episode ends.
    max_parse_errors: Count = 3
    # Most tokens of an episode, those of the environment included. Not set: what the servers'
    # max_model_len leaves. sampling.max_tokens bounds a turn.
    max_episode_tokens: Count | None = None
    # Most seconds of a call of the environment, which is given up then.
    timeout_seconds: float = Field(60.0, gt=0, le=1e8)
    # Most seconds of all calls of the environment in an episode; the time in which the models write
    # does not count. Not set: no bound of the episode's own.
    episode_timeout_seconds: float | None = Field(None, gt=0, le=1e8)
    # Whether environments run in threads of the run's process, or in processes of their own, each
    # of which has one episode at a time: an environment that hangs in C, crashes or takes too much
    # memory then costs its own episode.
    executor: Literal["thread", "process"] = "thread"
    # Calls of environments that run at once in threads; processes, and so the episodes under way.
    # Not set: one for each episode of a step, at most 256 threads or 64 processes.
    workers: Count | None = None
    # Most bytes of memory (data) of a process. Not set: 4 GiB.
    memory_bytes: Count | None = None
    # Most episodes under way at once; the next one begins when one has ended. Not set: all of a
    # step.
    concurrent_episodes: Count | None = None

    @model_validator(mode="after")
    def _one_environment(self) -> EnvironmentSettings:
        if (self.class_ is None) == (self.openenv is None):
            raise ValueError("either `class` or `openenv` names the environment")
        if self.openenv is not None and self.junior:
            raise ValueError("junior: only applies to a `class`")
        if self.openenv is not None and self.executor == "process":
            raise ValueError("executor: only applies to a `class`")
        if self.executor == "thread" and self.memory_bytes is not None:
            raise ValueError("memory_bytes: only applies with executor: process")
        if self.openenv is not None and self.openenv.text_field and self.tool_calls:
            raise ValueError("tool_calls: has no effect with openenv.text_field")
        return self

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also anchors the file of the class and the folder of modules."""
        values.setdefault("python_path", str(base))
        super().anchor(values, base)
        file, colon, name = str(values.get("class") or "").rpartition(":")
        if file.endswith(".py"):
            values["class"] = absolute(file, base) + colon + name
