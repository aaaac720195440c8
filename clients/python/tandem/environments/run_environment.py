"""The environment of a run: its class, the rules of its episodes, and the threads of its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem._proto.types.v1 import trajectory_pb2
from tandem.data.dataset import Dataset
from tandem.environments.calls import Calls, CallsInThreads
from tandem.environments.contract import EnvironmentClass
from tandem.environments.driver import Driver, Generate
from tandem.environments.episode import Episode, Rules
from tandem.environments.openenv import load_openenv
from tandem.environments.openenv_session import require_room
from tandem.environments.processes import MEMORY_BYTES, CallsInProcesses, Loads
from tandem.environments.template import Turns
from tandem.environments.tool_calls import PARSERS, Found, ToolCall, format_of
from tandem.models.tokenizer import TextCodec
from tandem.run_directory.episodes import EpisodeRecord, NoRecord
from tandem.settings.environment import EnvironmentSettings
from tandem.settings.run import RunSettings
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)

# Most threads, or processes, in which environments are called, where the settings do not say.
MOST_WORKERS = {"thread": 256, "process": 64}


class RunEnvironment:
    """A run's environment, checked; close() leaves its calls to themselves.

    Attributes:
        environment: the user's class.
        progress: is told how many episodes are done.
        stopping: whether the run was asked to stop.
    """

    def __init__(
        self,
        settings: RunSettings,
        environment: EnvironmentClass,
        codec: TextCodec,
        data: Sequence[Dataset],
    ) -> None:
        """Raises ConfigError for rows, a chat template or a format of calls that do not fit.

        Also for an OpenEnv server that has too few sessions.

        `data` are the rows of all episodes, at least one set.
        """
        assert settings.environment is not None
        self.environment = environment
        self.progress = Progress()
        self.stopping: Callable[[], bool] = lambda: False
        self._settings = settings.environment
        self._codec = codec
        for rows in data:
            environment.check(rows.examples)
        self._kwargs = with_tools(settings.data.chat_template_kwargs, environment)
        self._turns = Turns(codec, self._kwargs)
        self._parse = _parser(self._settings, environment, codec)
        shown = environment.text_argument or self._turns.shows_tools(data[0].examples[0].messages)
        if not shown:
            _log.warning(
                "environment: the chat template shows no tools: data.system, or the prompts, "
                "should say which there are and how to call them"
            )
        episodes = settings.batch.samples_per_step
        if self._settings.openenv is not None:
            at_once = min(self._settings.concurrent_episodes or episodes, episodes)
            require_room(self._settings.openenv.url, at_once)
        self._calls = _calls(self._settings, environment, episodes)

    def rules(self, longest: int) -> Rules:
        """Returns the rules of episodes whose prompt and response have at most `longest` tokens."""
        return Rules(
            self._settings,
            self.environment,
            self._codec,
            self._turns,
            self._parse,
            self._kwargs,
            longest,
        )

    def draw(
        self,
        episodes: Sequence[Episode],
        record: EpisodeRecord | NoRecord,
        generate: Generate,
        on_end: Callable[[Episode], None],
    ) -> None:
        """Draws episodes of one set of rules to their ends; raises what Driver.run() raises."""
        if episodes:
            Driver(
                episodes[0].rules,
                self._calls,
                record,
                generate,
                on_end=on_end,
                stopping=lambda: self.stopping(),
                progress=self.progress,
            ).run(episodes)

    def open(self) -> None:
        """Makes environments ready for calls; raises ConfigError for a process that is not."""
        self._calls.open()

    def close(self) -> None:
        """Closes the last environments, and ends their calls or leaves them to themselves."""
        self._calls.close()


def load_environment(settings: EnvironmentSettings) -> EnvironmentClass:
    """Loads the environment; raises ConfigError, which names the field, for one that is refused."""
    if settings.openenv is not None:
        return load_openenv(settings.openenv)
    return EnvironmentClass.load(settings)


def with_tools(template_kwargs: Mapping[str, Any], environment: EnvironmentClass) -> dict[str, Any]:
    """Returns variables of the chat template, the schemas of the tools among them."""
    tools = environment.shown_tools
    return {**template_kwargs, **({"tools": tools} if tools else {})}


def _calls(
    settings: EnvironmentSettings, environment: EnvironmentClass, episodes: int
) -> Calls[Any]:
    """Returns what makes the calls; `episodes` is the number of a step's."""
    workers = settings.workers or min(episodes, MOST_WORKERS[settings.executor])
    name, limit = f"environment: {environment.name}", settings.timeout_seconds
    if settings.executor == "thread":
        return CallsInThreads(name, workers, limit)
    assert settings.class_ is not None
    arguments = (settings.class_, settings.python_path, environment.field)
    loads = Loads(arguments, settings.memory_bytes or MEMORY_BYTES)
    return CallsInProcesses(name, workers, limit, loads)


def _parser(
    settings: EnvironmentSettings, environment: EnvironmentClass, codec: TextCodec
) -> Callable[[str], list[Found]]:
    """Returns what finds the calls in the text of a turn."""
    if environment.text_argument is None:
        return PARSERS[settings.tool_calls or format_of(codec.chat_template)]
    tool, argument = environment.text_argument
    return lambda text: [ToolCall(tool, {argument: text.strip()})]


def trajectories_of(episodes: Sequence[Episode]) -> list[trajectory_pb2.Trajectory]:
    """Returns the responses of episodes that have one: reset() of the others failed."""
    return [one.trajectory for one in episodes if one.trajectory is not None]
