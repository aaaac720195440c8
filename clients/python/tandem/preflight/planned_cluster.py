"""The checks of a cluster before it starts: its servers check themselves with --check-config."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import tempfile
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from tandem._proto.trainer.v1.objective_pb2 import PolicyObjective
from tandem.cluster.local import (
    Section,
    find_binary,
    inherited_environment,
    rank_environment,
    sections,
)
from tandem.errors import ConfigError, ServerStartError, remedy
from tandem.models.files import difference, max_positions
from tandem.models.hub import is_snapshot
from tandem.models.tokenizer import TextCodec
from tandem.models.weights.layout import weight_files
from tandem.preflight.memory import PlannedMemory, fitted
from tandem.preflight.problems import Problems
from tandem.preflight.server_facts import RolloutFacts, ServerFacts
from tandem.preflight.vocabulary import other_tokenizer
from tandem.rpc.calls import CriticCalls
from tandem.rpc.wire import message_record
from tandem.settings.cluster import ClusterSettings
from tandem.settings.explain import foreign_advice
from tandem.settings.lanes import lane_setting
from tandem.settings.paths import model_settings
from tandem.settings.values import dump_values, read_yaml
from tandem.utils.text_files import encoded

_log = logging.getLogger(__name__)


# Most seconds of a --check-config, which reads configurations of models but no weights.
CHECK_SECONDS = 60.0


@dataclass(frozen=True)
class CheckedCluster:
    """The result of the check of a cluster.

    Attributes:
        cluster: as given, with key-value caches that fit into the memory beside all else.
        servers: None if a server refuses its configuration.
        objective: the objective in force, every field set; {} if there was none to check.
    """

    cluster: ClusterSettings
    servers: ServerFacts | None
    objective: dict[str, Any]


def check_cluster(
    cluster: ClusterSettings,
    objective: Mapping[str, Any] | None,
    codec: TextCodec | None,
    problems: Problems,
    *,
    uses_junior: bool = True,
) -> CheckedCluster:
    """Checks the servers that a run would start, as planned() for it, with --check-config.

    Each server checks its settings, models, device and memory, and the trainer the `objective`;
    together they must fit into this machine's memory. Without `uses_junior` the juniors of rollout
    servers bound no sequence.
    """
    waiting = _without_weights(cluster)
    for field, directory in waiting.items():
        _log.info(
            f"cluster.{field} is not checked: the Hub's cache lacks the weights of {directory}, "
            "which a run downloads"
        )
    resolved = _check_servers(cluster, objective, problems, waiting)
    with problems.collect():
        plans = [one.memory for ones in resolved.values() for one in ones]
        fits = fitted(cluster, plans)
        if fits != cluster:
            # A server refuses a cache that holds no sequence.
            cluster, resolved = fits, _check_servers(fits, objective, problems, waiting)
    for field, directory in _models(cluster):
        if codec is not None:
            with problems.collect():
                _check_tokenizer(codec, field, directory)
    with problems.collect():
        _check_same_senior(cluster)
    rollouts, critics = resolved["rollout"], resolved["critic"]
    # A run of a reward model has no trainer.
    learners = critics if cluster.trainer is None else resolved["trainer"]
    if not learners or len(rollouts) < len(cluster.rollout):
        return CheckedCluster(cluster, None, {})
    facts = ServerFacts(
        learners[0].config["max_samples"],
        [one.rollout_facts() for one in rollouts],
        uses_junior,
        [one.longest_sequence() for one in (*resolved["trainer"], *critics)],
    )
    return CheckedCluster(cluster, facts, learners[0].objective)


def _without_weights(cluster: ClusterSettings) -> dict[str, Path]:
    """Returns the models of the Hub of which a dry run fetched no weights, by their sections."""
    found = {}
    for section in sections(cluster):
        for _, holder, key in model_settings(section.config):
            directory = Path(str(holder[key] or ""))
            if is_snapshot(directory) and not weight_files(directory):
                found[section.field] = directory
    return found


def _check_servers(
    cluster: ClusterSettings,
    objective: Mapping[str, Any] | None,
    problems: Problems,
    waiting: Container[str],
) -> dict[str, list[_Checked]]:
    """Returns the results of the servers that accept their configuration, by role.

    The sections `waiting` are not checked.
    """
    resolved: dict[str, list[_Checked]] = {"rollout": [], "trainer": [], "critic": []}
    with ThreadPoolExecutor() as pool:
        checks = [
            (section, pool.submit(_check_server, section, objective))
            for section in sections(cluster)
            if section.field not in waiting
        ]
        for section, check in checks:
            with problems.collect():
                resolved[section.role].append(check.result())
    return resolved


@dataclass(frozen=True)
class _Checked:
    """A server's resolved configuration and, of a trainer, the objective in force.

    Attributes:
        field: the key of its section in the cluster.
        memory: what its ranks need of this machine.
    """

    field: str
    config: dict[str, Any]
    objective: dict[str, Any]
    memory: PlannedMemory

    def longest_sequence(self, lane: str = "") -> int:
        """Returns the most tokens of a sequence that the models hold, or those of a lane."""
        limits = [
            max_positions(Path(holder[key]))
            for field, holder, key in model_settings(self.config)
            if holder[key] and field.startswith(lane)
        ]
        # The senior's limit stands for a junior's that is not set.
        limits += [
            lane_setting(self.config, one, "max_model_len") for one in (lane or "senior", "senior")
        ]
        return min(one for one in limits if one is not None)

    def rollout_facts(self) -> RolloutFacts:
        """Returns the facts of the rollout server that it starts."""
        has_junior = bool(lane_setting(self.config, "junior", "model"))
        return RolloutFacts(
            f"cluster.{self.field}",
            self.longest_sequence("senior"),
            self.longest_sequence("junior") if has_junior else None,
            bool(lane_setting(self.config, "senior", "speculator")),
            self.config["max_queue"],
            self.config.get("tandem", {}),
        )


def _check_server(section: Section, objective: Mapping[str, Any] | None) -> _Checked:
    binary = find_binary(section.binary)
    config = section.with_free_ports()
    asked: list[str] = []
    if section.role == "trainer":
        if objective is not None:
            asked = ["--check-objective", json.dumps(dict(objective))]
        # The critic's address is not known yet, but the objective needs one.
        if section.has_critic:
            config = {"critic_address": CriticCalls.default_address} | config
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as folder:
        file = Path(folder) / f"{section.name}.yaml"
        file.write_bytes(encoded(dump_values(config)))
        try:
            done = subprocess.run(
                [binary, "--config", file, "--check-config", *asked],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                # The check needs the number of ranks, and opens no port.
                env=inherited_environment() | rank_environment(0, section.ranks, port=1),
                timeout=CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ServerStartError(
                f"cluster.{section.field}: {binary} --check-config took more than "
                f"{CHECK_SECONDS:.0f} s"
            ) from None
        if done.returncode:
            raise _refusal(section, done.stderr, file)
    lines = done.stdout.splitlines()
    # With an objective to check, the last line is the one in force.
    answer = json_format.Parse(lines.pop(), PolicyObjective()) if asked else None
    return _Checked(
        section.field,
        read_yaml("\n".join(lines)),
        {} if answer is None else message_record(answer),
        PlannedMemory.parse(
            section.field,
            done.stdout,
            section.ranks,
            sizes_cache=section.role == "rollout" and not config.get("kv_cache_bytes"),
        ),
    )


def _refusal(section: Section, printed: str, file: Path) -> ConfigError:
    """Returns the error for a configuration, or an objective, that a server refuses."""
    said = printed.strip().rpartition("bad configuration: ")[2].removeprefix(f"{file}: ")
    # A reason, if there is one, follows the message in brackets.
    reason = re.search(r" \[([A-Z_]+)\]$", said)
    if reason:
        said = said[: reason.start()]
    hint = remedy(reason[1]) if reason else None
    if unknown := re.search(r"(\w+): unknown key", said):
        hint = foreign_advice(unknown[1]) or hint
    if said.startswith("policy."):
        return ConfigError(f"objective.{said.removeprefix('policy.')}", hint=hint)
    return ConfigError(f"cluster.{section.field}: {said}", hint=hint)


def _models(cluster: ClusterSettings) -> Iterator[tuple[str, Path]]:
    """Yields the directory of every model that the servers load, with the field that names it."""
    for section in sections(cluster):
        for field, holder, key in model_settings(section.config):
            if isinstance(holder[key], str) and holder[key]:
                yield f"cluster.{section.field}.{field}", Path(holder[key])


def _check_tokenizer(codec: TextCodec, field: str, directory: Path) -> None:
    """Raises ConfigError for a model with another tokenizer; a model may have none."""
    if not (directory / "tokenizer.json").exists() or directory == codec.directory:
        return
    model = TextCodec(directory)
    if model.vocabulary_digest != codec.vocabulary_digest:
        raise other_tokenizer(codec, f"{field} ({directory})", f"{model.vocabulary_size:,}")


def _check_same_senior(cluster: ClusterSettings) -> None:
    """Raises ConfigError unless trainer and rollout servers load the same senior."""
    trainer = (cluster.trainer or {}).get("model")
    for index, rollout in enumerate(cluster.rollout):
        served = lane_setting(rollout, "senior", "model")
        if not (isinstance(trainer, str) and isinstance(served, str) and trainer and served):
            continue  # The server itself refuses the section.
        if how := difference(Path(served), Path(trainer)):
            field = "cluster.rollout" + (f".{index}" if len(cluster.rollout) > 1 else "")
            name = next(one for one, *_ in model_settings(rollout) if one.startswith("senior"))
            raise ConfigError(
                f"{field}.{name} ({served}) and cluster.trainer.model ({trainer}) name "
                f"different models: {how}",
                hint="cluster.model names one for all servers",
            )
