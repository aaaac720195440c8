"""A run's own side: all that is read and checked before a server starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster import registry
from tandem.cluster.plan import Uses, learner_of, modes_in, planned, trains, uses_of
from tandem.cluster.readiness import wait_until_serving
from tandem.data.dataset import Dataset
from tandem.environments.contract import EnvironmentClass
from tandem.environments.run_environment import RunEnvironment, load_environment
from tandem.errors import ConfigError
from tandem.preflight import checks
from tandem.preflight.inputs import Inputs, read_inputs
from tandem.preflight.learnability import obstacles
from tandem.preflight.own_cluster import plan_cluster
from tandem.preflight.problems import Problems
from tandem.preflight.teachers import check_distillation
from tandem.preflight.vocabulary import check_vocabulary
from tandem.rewards.reward import READING_PATTERNS, Reward
from tandem.rewards.server import RewardServer
from tandem.rpc.client import CriticClient
from tandem.rpc.credentials import Credentials
from tandem.session.connections import Connections
from tandem.session.frozen_server import FrozenServer
from tandem.session.reference import ServerReference
from tandem.settings.cluster import ClusterSettings, ServersSettings
from tandem.settings.paths import model_settings
from tandem.settings.run import (
    ENVIRONMENT_REWARD,
    Purpose,
    RewardFunctionSettings,
    RunSettings,
)
from tandem.trackers.trackers import require_installed
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run that is read, and checked as far as that needs no server of its own.

    Attributes:
        reward: None if it is refused, which is among the problems.
        servers: the addresses of the servers, unless the run starts them.
        environment: None for a run without episodes, or if it is refused.
        teachers: the teachers that are running rollout servers, by name.
        cluster: the cluster that the run starts, without problems; None if it uses running servers.
        in_force: sections of the settings with the servers' defaults, as far as they are known.
    """

    inputs: Inputs
    reward: Reward | None
    environment: RunEnvironment | None
    problems: Problems
    progress: Progress
    connections: Connections
    servers: ServersSettings
    reference: ServerReference | None
    teachers: dict[str, FrozenServer]
    cluster: ClusterSettings | None
    in_force: dict[str, Any]


def prepare(
    settings: RunSettings, purpose: Purpose, progress: Progress, stack: ExitStack, *, dry_run: bool
) -> Prepared:
    """Reads and checks a run; opens the reference, if it is a running server.

    The problems of a run that starts its own cluster are raised; those of one that uses running
    servers are kept for the problems that its servers add.
    """
    problems = Problems(_named_models(settings))
    servers, credentials = settings.servers, Credentials()
    finds_cluster = settings.cluster is None and not servers.any_named
    with problems.collect():
        credentials = registry.with_defaults(
            settings.credentials.credentials(), found=finds_cluster
        )
    if settings.cluster is None:
        with problems.collect():
            uses = uses_of(settings, purpose)
            servers = registry.addresses(
                servers, any_rollout=uses.rollout, learner=learner_of(purpose)
            )
    connections = Connections(settings.servers, credentials)
    with problems.collect():
        checks.check_modes(modes_in(settings, purpose), settings, purpose)
    environment_class = _load_environment(settings, purpose, problems)
    reward = _read_reward(settings, environment_class, purpose, progress, problems, stack)
    tools = environment_class.shown_tools if environment_class is not None else []
    inputs = read_inputs(settings, purpose, problems, tools)
    _check_reward(reward, inputs, connections, problems)
    environment = _open_environment(environment_class, inputs, progress, problems, stack)
    settings = inputs.settings  # now with the steps of `epochs`
    if settings.cluster is None and servers.start_timeout_seconds > 0:
        problems.raise_any()
        _wait_for(servers, credentials, uses_of(settings, purpose))
    reference = cluster = None
    teachers: dict[str, FrozenServer] = {}
    if purpose in ("train", "sft"):
        check_distillation(settings, purpose, servers.rollout or (), inputs.data_sets, problems)
        teachers = _connect_teachers(inputs, connections, problems, stack)
    with problems.collect():
        checks.check_async(settings, purpose)
    if purpose == "train":
        with problems.collect():
            checks.check_overlong_buffer(settings)
        with problems.collect():
            checks.check_kl(settings, servers.rollout or ())
        reference = _connect_reference(inputs, connections, problems, stack)
        checks.note_start_and_reference(settings)
        checks.note_async(settings)
        for obstacle in obstacles(settings):
            _log.warning(f"this run cannot learn: {obstacle}")
    elif purpose == "dpo":
        with problems.collect():
            checks.check_pair_reference(settings, servers.rollout or ())
        reference = _connect_reference(inputs, connections, problems, stack)
    if settings.cluster is not None:
        cluster, in_force = plan_cluster(settings.cluster, inputs, problems, dry_run=dry_run)
        problems.raise_any()
    else:
        in_force = {"servers": servers.model_dump(mode="json", exclude_none=True)}
    return Prepared(
        inputs,
        reward,
        environment,
        problems,
        progress,
        connections,
        servers,
        reference,
        teachers,
        cluster,
        in_force,
    )


def _load_environment(
    settings: RunSettings, purpose: Purpose, problems: Problems
) -> EnvironmentClass | None:
    """Loads the class of `environment`, whose tools the prompts show."""
    if settings.environment is None or purpose == "drafts":
        return None
    with problems.collect():
        return load_environment(settings.environment)
    return None


def _open_environment(
    environment: EnvironmentClass | None,
    inputs: Inputs,
    progress: Progress,
    problems: Problems,
    stack: ExitStack,
) -> RunEnvironment | None:
    """Opens the environment of a run that draws episodes; None for any other."""
    draws = inputs.purpose == "train" or modes_in(inputs.settings, inputs.purpose)
    data = list(inputs.data_sets.values())
    if environment is None or not draws or inputs.codec is None or not data:
        return None
    with problems.collect():
        opened = RunEnvironment(inputs.settings, environment, inputs.codec, data)
        opened.progress = progress
        return stack.enter_context(closing(opened))
    return None


def _reward_functions(
    settings: RunSettings, environment: EnvironmentClass | None
) -> list[RewardFunctionSettings]:
    """Returns the functions of the reward, with that of the environment if it has one.

    Raises ConfigError for an environment without get_reward() that is to give the reward.
    """
    functions = settings.reward_functions
    named = any(one.function == ENVIRONMENT_REWARD for one in functions)
    if environment is None:
        return functions
    if named and not environment.has_reward:
        raise ConfigError(
            f"environment.class: {environment.name} has no get_reward()",
            hint="without one, reward.function or `rewards` judge the response",
        )
    if named or not environment.has_reward:
        return functions
    return [*functions, RewardFunctionSettings(function=ENVIRONMENT_REWARD)]


def _named_models(settings: RunSettings) -> Iterator[Path]:
    """Yields the directories of models that the settings name."""
    yield settings.tokenizer
    if settings.cluster is not None:
        plan = planned(settings.cluster)
        for section in (*plan.rollout, plan.trainer or {}, plan.critic or {}):
            for _, holder, key in model_settings(section):
                if isinstance(holder[key], str):
                    yield Path(holder[key])


def _read_reward(
    settings: RunSettings,
    environment: EnvironmentClass | None,
    purpose: Purpose,
    progress: Progress,
    problems: Problems,
    stack: ExitStack,
) -> Reward | None:
    """Loads the reward; also checks that the trackers of a run that trains are installed."""
    if trains(purpose):
        with problems.collect():
            require_installed(settings.trackers)
    for place, one in enumerate(settings.reward_functions):
        if one.answer_pattern is not None and one.function not in READING_PATTERNS:
            field = f"rewards.{place}" if settings.rewards else "reward"
            _log.warning(
                f"{field}.answer_pattern has no effect with {one.function}: it only applies to "
                f"{' and '.join(READING_PATTERNS)}"
            )
    with problems.collect():
        reward = stack.enter_context(closing(Reward(*_reward_functions(settings, environment))))
        reward.progress = progress
        return reward
    return None


def _check_reward(
    reward: Reward | None, inputs: Inputs, connections: Connections, problems: Problems
) -> None:
    """Checks that the reward can judge the rows that are judged, and opens its servers."""
    evaluates = bool(modes_in(inputs.settings, inputs.purpose))
    held_out = inputs.eval_data or (inputs.data if evaluates else None)
    judged = {
        "train": (inputs.data, inputs.eval_data),
        "sft": (held_out,),
        "dpo": (held_out,),
        "eval": (inputs.data,),
    }.get(inputs.purpose, ())
    if inputs.settings.eval.modes == ["legibility"]:
        # Legibility judges no answer.
        judged = (inputs.data,) if inputs.purpose == "train" else ()
    datasets = [dataset for dataset in judged if dataset is not None]
    if reward is None or not datasets:
        return
    for dataset in datasets:
        with problems.collect():
            reward.check(dataset.examples)
            for warning in reward.warnings(dataset.examples):
                _log.info(warning)
    for server in reward.servers.values():
        with problems.collect():
            _open_reward_model(server, datasets, inputs, connections, problems)


def _open_reward_model(
    server: RewardServer,
    datasets: Sequence[Dataset],
    inputs: Inputs,
    connections: Connections,
    problems: Problems,
) -> None:
    """Connects to a reward model, and checks that it reads the run's tokens."""

    def connect(address: str, limit_seconds: float) -> CriticClient:
        options = connections.options(connections.retry)
        return CriticClient(address, **options | {"timeout_seconds": limit_seconds})

    server.open(connect)
    whose = f"the reward model at {server.address}"
    if inputs.codec is not None:
        check_vocabulary(inputs.codec, server.model, whose)
    longest = max(len(one.token_ids) for dataset in datasets for one in dataset.examples)
    longest += inputs.settings.sampling.max_tokens
    if longest > server.model.max_model_len:
        problems.warn(
            f"{whose} reads {server.model.max_model_len:,} tokens, but a prompt with its response "
            f"may have {longest:,}: a longer one than it reads has no reward"
        )


def _wait_for(servers: ServersSettings, credentials: Credentials, uses: Uses) -> None:
    named = [
        *((servers.rollout or ()) if uses.trainer else ()),
        servers.trainer if uses.trainer else None,
        servers.critic if uses.critic else None,
    ]
    wait_until_serving(
        [address for address in named if address is not None],
        credentials,
        servers.start_timeout_seconds,
    )


def _connect_reference(
    inputs: Inputs, connections: Connections, problems: Problems, stack: ExitStack
) -> ServerReference | None:
    """Opens the running rollout server that is the reference, if one is."""
    address = inputs.settings.reference_address
    if address is None:
        return None
    with problems.collect():
        return ServerReference(
            FrozenServer.connect(
                "reference", "the reference", address, inputs.codec, connections, stack
            )
        )
    return None


def _connect_teachers(
    inputs: Inputs, connections: Connections, problems: Problems, stack: ExitStack
) -> dict[str, FrozenServer]:
    """Opens the running rollout servers that are teachers, by name."""
    servers = {}
    for name, address in inputs.settings.teachers.items():
        if ":" in address:
            with problems.collect():
                servers[name] = FrozenServer.connect(
                    f"teachers.{name}",
                    f"the teacher {name}",
                    address,
                    inputs.codec,
                    connections,
                    stack,
                )
    return servers
