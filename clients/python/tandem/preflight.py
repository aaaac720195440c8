"""What can be known to be wrong before a run begins: all of it at once, nothing touched."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format

from tandem.cluster import Section, find_binary, rank_environment, sections
from tandem.errors import ConfigError, ProblemsError, RpcError, ServerStartError, TandemError
from tandem.rollout.v1 import rollout_pb2
from tandem.settings import EvalMode, RunSettings
from tandem.text import TextCodec
from tandem.trainer.v1.objective_pb2 import PolicyObjective
from tandem.types.v1 import server_pb2
from tandem.wire import message_record, to_message

# A server reads its models' configurations for this, not their weights.
CHECK_SECONDS = 60.0


class Problems:
    """Collects failures, so that a user sees all of them."""

    def __init__(self) -> None:
        self.errors: list[TandemError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps a TandemError that its body raises."""
        try:
            yield
        except ProblemsError as several:
            self.errors.extend(several.problems)
        except TandemError as error:
            self.errors.append(error)

    def raise_any(self) -> None:
        """Raises what was collected: the only one as it is, several as a ProblemsError."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ProblemsError(self.errors)


def check_vocabulary(codec: TextCodec, model: server_pb2.ModelInfo, whose: str) -> None:
    """ConfigError unless `codec` is the tokenizer of the model that `whose` server holds."""
    # A model may have more rows than its tokenizer has tokens.
    fits = codec.vocabulary_size <= model.vocab_size
    if not fits or model.vocabulary_digest not in ("", codec.vocabulary_digest):
        raise _other_tokenizer(codec, f"{whose} ({model.path})", f"{model.vocab_size:,}")


def _other_tokenizer(codec: TextCodec, whose: str, size: str) -> ConfigError:
    return ConfigError(
        f"tokenizer: {codec.directory} has {codec.vocabulary_size:,} tokens and is not the "
        f"tokenizer of {whose}, whose vocabulary has {size}",
        hint="name the directory of the senior's model, or one with the same tokenizer.json",
    )


def check_sizes(settings: RunSettings, purpose: str, max_samples: int, max_queue: int) -> None:
    """ConfigError for a step that the trainer, or samples that a rollout server, cannot take."""
    batch = settings.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    step = {"train": ("batch", samples), "sft": ("sft.batch_size", settings.sft.batch_size)}
    field, samples = step.get(purpose, ("", 0))
    if samples > max_samples:
        raise ConfigError(
            f"{field}: a step has {samples:,} samples, the trainer's max_samples is {max_samples:,}"
        )
    parts = settings.objective.num_mini_batches or 1
    if purpose == "train" and parts > samples:
        raise ConfigError(f"objective.num_mini_batches: {parts:,}, a step has {samples:,} samples")
    asked = {"eval.samples": settings.eval.samples}
    if purpose == "train":
        asked["batch.samples_per_prompt"] = batch.samples_per_prompt
    for field, samples in asked.items():
        if samples > max_queue:
            raise ConfigError(
                f"{field}: the {samples:,} samples of a prompt are drawn together, a rollout "
                f"server's max_queue is {max_queue:,}"
            )


def check_overlong_buffer(settings: RunSettings) -> None:
    """ConfigError for a buffer of tokens that no response has."""
    buffer, longest = settings.reward.overlong_buffer, settings.sampling.max_tokens
    if buffer is not None and buffer.len > longest:
        raise ConfigError(
            f"reward.overlong_buffer.len: {buffer.len:,} tokens, sampling.max_tokens allows a "
            f"response {longest:,}"
        )


def check_kl(settings: RunSettings) -> None:
    """ConfigError for settings of a KL that the objective has not, or that would break it."""
    control, batch = settings.kl_control, settings.batch
    asking = {"kl_control": control is not None, "reference": settings.reference != "trainer"}
    for field, asks in asking.items():
        if asks and not settings.objective.kl_coefficient:
            raise ConfigError(f"{field}: is for a KL, and objective.kl_coefficient is not set or 0")
    samples = batch.prompts_per_step * batch.samples_per_prompt
    if control is not None and control.horizon < samples:
        raise ConfigError(
            f"kl_control.horizon: {control.horizon:,} responses, a step alone has {samples:,}"
        )
    if settings.cluster is None and settings.reference in settings.servers.rollout:
        raise ConfigError(
            f"reference: {settings.reference} is one of servers.rollout, which get the trainer's "
            "weights",
            hint="the reference is a rollout server of its own, or `junior`",
        )


def check_same_junior(rollouts: Mapping[str, rollout_pb2.GetServerInfoResponse]) -> None:
    """ConfigError unless all rollout servers, by what they are called, have one junior."""
    for whose, info in rollouts.items():
        require_junior("reference: junior", info.HasField("junior"), whose)
    versions = {whose: info.junior_version for whose, info in rollouts.items()}
    if len(set(versions.values())) > 1:
        held = ", ".join(f"{whose} has {version}" for whose, version in versions.items())
        raise ConfigError(f"reference: junior: the rollout servers have different juniors: {held}")


def modes_in(settings: RunSettings, purpose: str) -> Sequence[EvalMode]:
    """The evaluations that are made on the way; none in a run without `eval.every`."""
    return settings.eval.modes if purpose == "eval" or settings.eval.every else ()


def handoff_boundary_ids(settings: RunSettings, codec: TextCodec) -> list[int]:
    """Ids of the tokens that end a turn of the handoff; ConfigError when there is none."""
    text = settings.eval.handoff_boundary
    ids = codec.ids_ending_with(text)
    if not ids:
        raise ConfigError(
            f"eval.handoff_boundary: no token of {codec.directory} ends with {text!r}, where the "
            "author would change",
            hint='choose a text that single tokens end with, such as "." or "\\n"',
        )
    return ids


def check_junior(modes: Sequence[EvalMode], has_junior: bool, whose: str) -> None:
    """ConfigError when evaluations need a junior that `whose` has not."""
    needing = [mode for mode in modes if mode != "solo"]
    if needing:
        require_junior(f"eval.modes: {', '.join(needing)}", has_junior, whose)


def require_junior(field: str, has_junior: bool, whose: str) -> None:
    """ConfigError for a setting that needs a junior when the rollout server `whose` has none."""
    if not has_junior:
        raise ConfigError(
            f"{field}: {whose} has no junior",
            hint="junior_model among a rollout server's settings names one",
        )


def named_objective(error: RpcError) -> TandemError:
    """What a trainer says to an objective, by the field of the run's settings."""
    if error.field is None:
        return error
    field = f"objective.{error.field.removeprefix('policy.')}"
    return ConfigError(
        f"{field}: {error.message.removeprefix(f'{error.field}: ')}", hint=error.hint
    )


def check_cluster(
    settings: RunSettings, purpose: str, codec: TextCodec | None, problems: Problems
) -> dict[str, Any]:
    """Checks the servers that a run would start; returns the objective in force ("train" alone).

    The servers do it themselves, with --check-config: settings, models, memory, objective.
    """
    cluster = settings.cluster
    assert cluster is not None
    for role in ("rollout", "trainer"):
        if getattr(cluster, role) in (None, []):
            problems.errors.append(ConfigError(f"cluster.{role}: a run needs a {role} server"))
    objective = settings.policy_objective() if purpose == "train" else None
    resolved: dict[str, list[Checked]] = {"rollout": [], "trainer": [], "critic": []}
    with ThreadPoolExecutor() as pool:
        checks = [
            (section, pool.submit(_check_server, section, objective))
            for section in sections(cluster)
        ]
        for section, check in checks:
            with problems.collect():
                resolved[section.role].append(check.result())
            if codec is not None:
                with problems.collect():
                    _check_model_directory(codec, section)
    if not (resolved["trainer"] and resolved["rollout"]):
        return {}
    [trainer], rollouts = resolved["trainer"], resolved["rollout"]
    with problems.collect():
        max_queue = min(server.config["max_queue"] for server in rollouts)
        check_sizes(settings, purpose, trainer.config["max_samples"], max_queue)
    for server in rollouts:
        has_junior = bool(server.config["junior_model"])
        with problems.collect():
            check_junior(modes_in(settings, purpose), has_junior, f"cluster.{server.field}")
        if purpose == "train" and settings.reference == "junior":
            with problems.collect():
                require_junior("reference: junior", has_junior, f"cluster.{server.field}")
    return trainer.objective


@dataclass(frozen=True)
class Checked:
    """What a server says of its configuration: every field set; and of the objective.

    Attributes:
        field: where its section stands in the cluster.
    """

    field: str
    config: dict[str, Any]
    objective: dict[str, Any]


def _check_server(section: Section, objective: Mapping[str, Any] | None) -> Checked:
    binary = find_binary(section.binary)
    config = section.with_free_ports()
    asked: list[str] = []
    if section.role == "trainer":
        if objective is not None:
            message = to_message(objective, PolicyObjective(), "objective")
            text = json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)
            asked = ["--check-objective", text]
        # The address that the critic will have is not known yet.
        config = {"critic_address": "127.0.0.1:7703"} | config if section.has_critic else config
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as folder:
        file = Path(folder) / f"{section.name}.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        try:
            done = subprocess.run(
                [binary, "--config", file, "--check-config", *asked],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                # Whether the layout fits the ranks, of which any may be asked; no port is opened.
                env=os.environ | rank_environment(0, section.ranks, port=1),
                timeout=CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ServerStartError(
                f"cluster.{section.field}: {binary} --check-config takes more than "
                f"{CHECK_SECONDS:.0f} s"
            ) from None
        if done.returncode:
            said = done.stderr.strip().rpartition("bad configuration: ")[2]
            if said.startswith("policy."):
                raise ConfigError(f"objective.{said.removeprefix('policy.')}")
            raise ConfigError(f"cluster.{section.field}: {said.removeprefix(f'{file}: ')}")
    lines = done.stdout.splitlines()
    # With an objective to check, the last line is the one in force.
    answer = json_format.Parse(lines.pop(), PolicyObjective()) if asked else None
    return Checked(
        section.field,
        yaml.safe_load("\n".join(lines)),
        {} if answer is None else message_record(answer),
    )


def _check_model_directory(codec: TextCodec, section: Section) -> None:
    """ConfigError when the model that a server will load comes with another tokenizer."""
    named = section.config.get("senior_model" if section.role == "rollout" else "model")
    if not isinstance(named, str):
        return  # The server says what is wrong with it.
    directory = Path(named)
    if not (directory / "tokenizer.json").exists() or directory == codec.directory:
        return
    model = TextCodec(directory)
    if model.vocabulary_digest != codec.vocabulary_digest:
        raise _other_tokenizer(
            codec, f"cluster.{section.field} ({directory})", f"{model.vocabulary_size:,}"
        )
