"""Configuration files of the command line: the schema, and errors that name a field by its path.

Servers have their own schema (proto/tandem/config/v1); a cluster file carries it unchanged. A
relative path in a file starts at that file's folder, one in an override at the working directory.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from tandem.config_values import apply_override, dump_values, read_mapping
from tandem.errors import ConfigError
from tandem.trainer.v1.objective_pb2 import PolicyObjective
from tandem.wire import enum_names

# The contract's counts and token ids are int32.
INT32_MAX = 2**31 - 1

# Evaluations, in the order in which they are explained.
EvalMode = Literal["solo", "handoff", "legibility"]

# Paths among a server's settings.
SERVER_PATHS = (
    "model",
    "senior_model",
    "junior_model",
    "reference_model",
    "shutdown_checkpoint_directory",
)


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("must not be empty")
    return value


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _is_reference(text: str) -> str:
    if text not in ("trainer", "junior") and not re.fullmatch(r"\S+:\d+", text):
        raise ValueError(f"must be trainer, junior or HOST:PORT, not {text!r}")
    return text


Text = Annotated[str, Field(min_length=1)]
# Path("") would be the working directory.
NonEmptyPath = Annotated[Path, BeforeValidator(_not_empty)]
Pattern = Annotated[Text, AfterValidator(_is_pattern)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


class Settings(BaseModel):
    """A section of a file: unknown keys, and numbers that are not finite, are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Makes the relative paths among the section's raw values absolute, as seen from `base`."""
        for name, field in cls.model_fields.items():
            value = values.get(name)
            kinds = list(_kinds_in(field.annotation))
            if isinstance(value, str) and value and Path in kinds and value not in kinds:
                values[name] = _absolute(value, base)
            elif isinstance(value, dict):
                for kind in kinds:
                    if isinstance(kind, type) and issubclass(kind, Settings):
                        kind.anchor(value, base)


class ServersSettings(Settings):
    """Addresses of running servers, not needed with `cluster`, and how long to wait for them."""

    rollout: list[Text] = Field(["127.0.0.1:7701"], min_length=1)
    trainer: Text = "127.0.0.1:7702"
    critic: Text | None = None
    # Seconds that a call may take: all samples of a step that one server draws, a train step, a
    # checkpoint. Also with `cluster`.
    timeout_seconds: float = Field(3600.0, gt=0, le=1e8)


class ReasoningGymSettings(Settings):
    """A procedurally generated task of the reasoning-gym package."""

    name: Text
    config: dict[str, Any] = {}
    size: Count = 1000
    seed: int = 0


class DataSettings(Settings):
    """Where prompts come from, and how they are written. Exactly one source."""

    # Lines of {"prompt" or "messages", "answer", ...}; every field reaches the reward function.
    jsonl: NonEmptyPath | None = None
    reasoning_gym: ReasoningGymSettings | None = None
    # raw: the prompt's text as it is; chat: through the tokenizer's chat template.
    template: Literal["raw", "chat"] = "raw"
    # Text of the prompt (the user's turn with chat); fields of the row in braces.
    format: Text = "{prompt}"
    # System message, with chat. Empty: none. Not set: the template's own default.
    system: str | None = None
    # Regular expression whose first group, found in the prompt, becomes the row's `prompt`.
    extract: Pattern | None = None
    # Leave out rows whose prompt came before.
    unique: bool = False
    # Rows kept; all when not set.
    limit: Count | None = None
    # Most tokens of a prompt, and what becomes of a longer one: fail ends the start and names the
    # row, drop leaves the row out, truncate_left keeps the last tokens. Both count what they did.
    # Not set: what the servers can hold, and a longer prompt fails.
    max_prompt_tokens: Count | None = None
    too_long: Literal["fail", "drop", "truncate_left"] = "fail"

    @model_validator(mode="after")
    def _one_source(self) -> DataSettings:
        if (self.jsonl is None) == (self.reasoning_gym is None):
            raise ValueError("give exactly one of jsonl and reasoning_gym")
        if self.max_prompt_tokens is None and self.too_long != "fail":
            raise ValueError(f"too_long: {self.too_long} needs max_prompt_tokens")
        return self


class OverlongBufferSettings(Settings):
    """The soft overlong punishment of DAPO (arXiv 2503.14476)."""

    # The last tokens before sampling.max_tokens: the reward of a response that ends among them
    # falls, linearly with its length, by penalty_factor at most.
    len: Count
    penalty_factor: float = Field(1.0, gt=0)


class RewardSettings(Settings):
    """How a response is judged."""

    # "module:function", "path/file.py:function", "exact_match" or "reasoning_gym".
    function: Text = "exact_match"
    # Folder in which modules are looked up after the installed ones; the run file's by default.
    python_path: NonEmptyPath = Field(default_factory=Path.cwd)
    # The function judges all responses of a step in one call: rewards(prompts, responses, rows).
    batch: bool = False
    # Where its calls run: threads for functions that wait, processes for those that compute.
    executor: Literal["thread", "process"] = "thread"
    # Calls at a time. Not set: 16 threads, a process per CPU, every call of an `async def`. 1 with
    # threads: one after the other in the main thread.
    workers: Count | None = None
    # What a call that raises, or gives no finite number, does: fail ends the run, skip leaves its
    # response out of the step and counts it (reward/failed).
    on_error: Literal["fail", "skip"] = "fail"
    # The last match in the response (its first group, if it has one) is what a builtin judges;
    # the whole response without surrounding space when not set.
    answer_pattern: Pattern | None = None
    # A reward at or above counts as correct in an evaluation.
    correct_at: float = 1.0
    # Punish responses that are almost too long, in training alone.
    overlong_buffer: OverlongBufferSettings | None = None

    @model_validator(mode="after")
    def _one_way_to_call(self) -> RewardSettings:
        many = self.executor == "process" or self.workers is not None
        if self.function in ("exact_match", "reasoning_gym") and (many or self.batch):
            raise ValueError(f"batch, executor and workers are not for {self.function}")
        if self.batch and many:
            raise ValueError("batch is one call: executor: process and workers do not apply")
        return self

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also the file of a function, and where modules are looked up."""
        values.setdefault("python_path", str(base))
        super().anchor(values, base)
        file, colon, function = str(values.get("function")).rpartition(":")
        if file.endswith(".py"):
            values["function"] = _absolute(file, base) + colon + function


class SamplingSettings(Settings):
    """Fields of SamplingParams."""

    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=0, le=INT32_MAX)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: Count = 64
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool | None = None


class TandemSettings(Settings):
    """Fields of TandemConfig; what is not set is the rollout server's."""

    # Said outright, so that a server without a junior refuses rather than trains plain GRPO.
    enabled: bool = True
    selection_strategy: Literal["bernoulli", "chunk", "alternating", "sentence", "word"] | None = (
        None
    )
    prob_senior: float | None = Field(None, ge=0, le=1)
    chunk_size: Count | None = None
    max_gap_tokens: Count | None = None
    boundary_token_ids: list[TokenId] = []


def _objective_settings() -> type[Settings]:
    """The section whose fields are those of PolicyObjective, with the contract's types."""
    types: dict[int, Any] = {
        FieldDescriptor.TYPE_DOUBLE: float,
        FieldDescriptor.TYPE_INT32: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)],
        FieldDescriptor.TYPE_BOOL: bool,
    }
    fields: dict[str, Any] = {}
    for field in PolicyObjective.DESCRIPTOR.fields:
        if field.name == "reference_logprobs":
            continue  # Follows from the run's `reference`.
        if field.enum_type is None:
            kind = types[field.type]
        else:
            # Numbers that are given with each sample are for those who write their own loop.
            kind = Literal[
                tuple(name for name in enum_names(field.enum_type) if name != "provided")
            ]
        fields[field.name] = (kind | None, None)
    return create_model("ObjectiveSettings", __base__=Settings, **fields)


# What is not set is the trainer's default; objective.proto has a comment on every field.
ObjectiveSettings = _objective_settings()


class KlControlSettings(Settings):
    """The adaptive coefficient of the KL to the reference policy (arXiv 1909.08593)."""

    # Nats of a response that the coefficient steers towards, a sum over its tokens with a weight.
    target: float = Field(6.0, gt=0)
    # Responses over which the coefficient can change by a fifth of itself.
    horizon: Count = 10000


class FilterGroupsSettings(Settings):
    """The dynamic sampling of DAPO (arXiv 2503.14476)."""

    # How often prompts are drawn for a step at most, the first time included; a step that is not
    # full then trains what there is.
    max_num_gen_batches: Count = 10


class BatchSettings(Settings):
    """Size of a step."""

    prompts_per_step: Count = 8
    samples_per_prompt: Count = 8
    # Drop groups whose rewards are all the same, and draw further prompts in their place.
    filter_groups: FilterGroupsSettings | None = None

    @model_validator(mode="after")
    def _step_fits(self) -> BatchSettings:
        if self.prompts_per_step * self.samples_per_prompt > INT32_MAX:
            raise ValueError(f"a step has at most {INT32_MAX} samples")
        return self

    @model_validator(mode="after")
    def _rewards_may_differ(self) -> BatchSettings:
        if self.filter_groups is not None and self.samples_per_prompt == 1:
            raise ValueError("filter_groups: would drop every group of samples_per_prompt: 1")
        return self


class SftSettings(Settings):
    """Supervised training (`tandem sft`)."""

    batch_size: Count = 16
    # Text to learn after the prompt; fields of the row in braces.
    response: Text = "{answer}"
    # End the response with the tokenizer's end-of-sequence token.
    append_eos: bool = True


class CheckpointSettings(Settings):
    """When to save."""

    # Steps between checkpoints: what a crash costs at most; 0 saves at the end alone.
    every: int = Field(10, ge=0)
    # Newest checkpoints to keep; 0 keeps all.
    keep: int = Field(2, ge=0, le=INT32_MAX)
    # Save after the last step.
    at_end: bool = True


class EvalSettings(Settings):
    """Evaluations on held-out prompts."""

    data: DataSettings | None = None
    # solo: the senior answers alone. handoff: senior and junior take turns. legibility: how well
    # the junior predicts the senior's solo answers.
    modes: list[EvalMode] = Field(["solo"], min_length=1)
    # Of the handoff, the text that ends a turn: every token whose own text ends with it does. By
    # default a blank line, which not every tokenizer writes as one token.
    handoff_boundary: Text = "\n\n"
    # Responses drawn for each prompt, and the k of pass@k.
    samples: Count = 1
    k: list[int] = Field([1], min_length=1)
    temperature: float = Field(0.0, ge=0)
    # Defaults to the sampling section's.
    max_tokens: Count | None = None
    # Steps between evaluations during training; 0: none.
    every: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _k_fits(self) -> EvalSettings:
        if any(k < 1 or k > self.samples for k in self.k):
            raise ValueError(f"every k must lie in [1, samples = {self.samples}]")
        return self

    @model_validator(mode="after")
    def _modes_differ(self) -> EvalSettings:
        if len(set(self.modes)) < len(self.modes):
            raise ValueError("a mode is listed twice")
        return self


class ClusterSettings(Settings):
    """Servers of one machine (`tandem up`). Each section is the server's own configuration.

    `ranks` in a section is no setting of the server: so many processes are it, one by default.

    Ports are picked freely unless a section names them.
    """

    # Logs and resolved configurations, in logs/attempt_N: one folder for every start.
    directory: NonEmptyPath = Field(default_factory=lambda: Path.cwd() / "runs" / "cluster")
    rollout: list[dict[str, Any]] = []
    trainer: dict[str, Any] | None = None
    critic: dict[str, Any] | None = None
    # Seconds that all servers together may take to load.
    start_timeout_seconds: float = Field(300.0, gt=0)
    # Seconds between SIGTERM and SIGKILL.
    stop_timeout_seconds: float = Field(40.0, gt=0)

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also the models that the servers' sections name."""
        super().anchor(values, base)
        rollouts = values.get("rollout")
        for section in [
            *(rollouts if isinstance(rollouts, list) else [rollouts]),
            values.get("trainer"),
            values.get("critic"),
        ]:
            for key in SERVER_PATHS:
                if isinstance(section, dict) and section.get(key) and isinstance(section[key], str):
                    section[key] = _absolute(section[key], base)

    @model_validator(mode="before")
    @classmethod
    def _single_rollout(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("rollout"), dict):
            values = values | {"rollout": [values["rollout"]]}
        return values

    @model_validator(mode="after")
    def _some_server(self) -> ClusterSettings:
        if not self.rollout and self.trainer is None and self.critic is None:
            raise ValueError("no server: give rollout, trainer or critic")
        return self


class RunSettings(Settings):
    """A training run (`tandem train`, `tandem sft`, `tandem eval`)."""

    # Where everything of the run goes.
    run_dir: NonEmptyPath
    seed: int = Field(0, ge=0, lt=2**64)
    steps: int = Field(10, ge=0, lt=2**63)
    # Directory with tokenizer.json: the senior's.
    tokenizer: NonEmptyPath
    servers: ServersSettings = ServersSettings()
    # Servers to start for the time of the run, instead of `servers`: a cluster file, or what stands
    # in one.
    cluster: ClusterSettings | None = None
    # Weights that a new run starts from. Not set: the base model of the servers, refused while they
    # hold updates that no checkpoint has. "base": the same, whatever they hold. "served": what they
    # hold. Else a checkpoint, or another run's directory: its last one.
    start_from: Literal["base", "served"] | NonEmptyPath | None = None
    data: DataSettings
    reward: RewardSettings = RewardSettings()
    batch: BatchSettings = BatchSettings()
    sampling: SamplingSettings = SamplingSettings()
    tandem: TandemSettings = TandemSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    # Whose log-probabilities the KL of objective.kl_coefficient compares with. trainer: its own
    # reference_model. junior: the frozen junior of the rollout servers. HOST:PORT: the senior of a
    # rollout server that no trainer publishes to.
    reference: Annotated[str, AfterValidator(_is_reference)] = "trainer"
    # Adapt objective.kl_coefficient, which is then what the run begins with.
    kl_control: KlControlSettings | None = None
    sft: SftSettings = SftSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    # Also record, for every token, the log-probability under the model that did not write it.
    # On by default: the loss reads the senior's log-probability of junior-written tokens.
    return_other_logprobs: bool = True

    @property
    def reference_address(self) -> str | None:
        """Of the rollout server that is the reference, if one is."""
        return self.reference if ":" in self.reference else None

    def policy_objective(self) -> dict[str, Any]:
        """The fields of PolicyObjective that a run sends with its steps."""
        source = {} if self.reference == "trainer" else {"reference_logprobs": "provided"}
        return given(self.objective) | source

    def derived(self) -> dict[str, int]:
        """The sizes that follow from the settings; shown by --dry-run."""
        samples = self.batch.prompts_per_step * self.batch.samples_per_prompt
        return {
            "samples_per_step": samples,
            "max_response_tokens_per_step": samples * self.sampling.max_tokens,
            "samples_in_run": samples * self.steps,
            "prompts_in_run": self.batch.prompts_per_step * self.steps,
            "sft_samples_in_run": self.sft.batch_size * self.steps,
        }

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also puts the content of a cluster file in the place of its name."""
        if isinstance(values.get("cluster"), str) and values["cluster"]:
            values["cluster"] = _read_cluster(Path(_absolute(values["cluster"], base)))
        super().anchor(values, base)


Model = TypeVar("Model", bound=Settings)


def load(schema: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """Reads a YAML file, applies `dotted.key=value` overrides (later wins) and checks it.

    Raises ConfigError, with the dotted path of every problem.
    """
    values = read_mapping(path)
    schema.anchor(values, path.absolute().parent)
    for override in overrides:
        apply_override(values, override)
        schema.anchor(values, Path.cwd())
    return validate(schema, values, str(path))


def validate(schema: type[Model], values: dict[str, Any], source: str) -> Model:
    """Checks values against the schema; every problem is named with its dotted path.

    Relative paths among the values start at the working directory.
    """
    schema.anchor(values, Path.cwd())
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = _explain(schema, error.errors())
        if len(lines) > 1:
            lines = [f"{len(lines)} problems:", *(f"  - {line}" for line in lines)]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from None


def dump(settings: Settings) -> str:
    """The settings as YAML that load() reads back."""
    return dump_values(settings.model_dump(mode="json"))


def given(settings: Settings) -> dict[str, Any]:
    """The fields that have a value, ready for a message of the contract."""
    return {
        key: value for key, value in settings.model_dump(exclude_none=True).items() if value != []
    }


def _read_cluster(path: Path) -> dict[str, Any]:
    """The raw values of a cluster file, which can be used."""
    values = read_mapping(path)
    ClusterSettings.anchor(values, path.parent)
    validate(ClusterSettings, values, f"cluster: {path}")
    return values


def _absolute(path: str, base: Path) -> str:
    return os.path.normpath(base / path)


def _explain(schema: type[BaseModel], problems: Sequence[Any]) -> list[str]:
    """A line for every problem; the known keys of a section are listed once."""
    lines: list[str] = []
    listed: set[Any] = set()
    for problem in problems:
        *section, key = problem["loc"] or ("the file",)
        path = ".".join(map(str, [*section, key]))
        if problem["type"] != "extra_forbidden":
            lines.append(f"{path}: {problem['msg'].removeprefix('Value error, ')}")
            continue
        known = _fields_at(schema, section)
        close = difflib.get_close_matches(str(key), known, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        if not close and tuple(section) not in listed:
            listed.add(tuple(section))
            advice = f"; known: {', '.join(known)}"
        lines.append(f"{path}: unknown key{advice}")
    return lines


def _fields_at(schema: type[BaseModel], path: Iterable[Any]) -> list[str]:
    for part in path:
        field = schema.model_fields.get(str(part))
        inner = next(_models_in(field.annotation), None) if field else None
        if inner is None:
            return []
        schema = inner
    return list(schema.model_fields)


def _models_in(annotation: Any) -> typing.Iterator[type[BaseModel]]:
    for kind in _kinds_in(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _kinds_in(annotation: Any) -> typing.Iterator[Any]:
    """The types, and the literal values, that a field may have."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _kinds_in(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType, list):
        for argument in typing.get_args(annotation):
            yield from _kinds_in(argument)
    elif origin is Literal:
        yield from typing.get_args(annotation)
    else:
        yield annotation
