"""The schema of run files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator

from tandem._proto.trainer.v1.objective_pb2 import PolicyObjective
from tandem.errors import ConfigError
from tandem.metrics import KEYS
from tandem.rpc.wire import enum_names
from tandem.settings.asynchronous import MOST_VERSIONS, AsyncSettings
from tandem.settings.base import (
    Address,
    Count,
    FrozenModel,
    Name,
    NonEmptyPath,
    Pattern,
    Settings,
    Text,
    TokenId,
    not_empty,
)
from tandem.settings.bounds import INT32_MAX, MAX_REWARD
from tandem.settings.cluster import (
    ClusterSettings,
    CredentialsSettings,
    ServersSettings,
    read_cluster,
)
from tandem.settings.environment import EnvironmentSettings
from tandem.settings.paths import absolute, name_model, senior_of
from tandem.settings.teachers import DEFAULT_TOP_K, Teachers
from tandem.stores.store import is_url

# Steps of a run that names neither `steps` nor `epochs`.
DEFAULT_STEPS = 10

# Reward functions of this package.
BUILTIN_REWARDS = ("exact_match", "gsm8k", "math", "reasoning_gym", "environment", "none")

# The one of them that gives what the environment's get_reward() gives.
ENVIRONMENT_REWARD = "environment"

# Losses of a pair of responses (training/pair_losses.py).
PAIR_LOSSES = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
)

# Trackers of a run's numbers, in addition to metrics.jsonl.
TrackerName = Literal["tensorboard", "wandb", "mlflow"]

# The command that reads a run file; drafts stands for `tandem speculator eval`.
Purpose = Literal["train", "sft", "dpo", "reward-model", "eval", "drafts"]
# Evaluations, in the order in which they are explained.
EvalMode = Literal[
    "solo",
    "junior_solo",
    "tandem",
    "handoff",
    "legibility",
    "junior_takeover",
    "senior_takeover",
]

# Settings of `data` that say how a row becomes a prompt.
HOW_PROMPTS_ARE_WRITTEN = (
    "columns",
    "template",
    "chat_template_kwargs",
    "add_special_tokens",
    "format",
    "images",
    "system",
    "extract",
)


def _is_start(value: Any) -> Any:
    if value is not None and not isinstance(value, str | Path):
        raise ValueError(f"must be base, served or a path, not {value!r}")
    return not_empty(value)


def _is_store(text: str) -> str:
    if not is_url(text):
        raise ValueError(f"must be a URL, such as s3://bucket/runs/one, not {text!r}")
    return text


StorePlace = Annotated[Text, AfterValidator(_is_store)]


class ReasoningGymSettings(Settings):
    """A procedurally generated task of the reasoning-gym package."""

    name: Text
    config: dict[str, Any] = Field({})
    size: Count = 1000
    seed: int = 0


class HubDataSettings(Settings):
    """A data set of the Hugging Face Hub."""

    # ORG/NAME.
    name: Text
    # One of its configurations ("subsets"). May be left out if there is only one.
    config: Text | None = None
    # A split, or a slice of one ("train[:1000]").
    split: Text = "train"
    # A branch, a tag or a commit.
    revision: Text | None = None


class DataSettings(Settings):
    """The source of the prompts, exactly one, and how prompts are written."""

    # Lines of {"prompt" or "messages", "answer", ...}; every column reaches the reward function. A
    # `prompt` that is a list of messages is a conversation, too. One that ends in a message of the
    # assistant's is continued; `tandem sft` learns that message, unless the row has an `answer`.
    # `tandem dpo` and `tandem reward-model` read the columns `chosen` and `rejected`, texts or
    # conversations.
    jsonl: NonEmptyPath | None = None
    # A Parquet file with such rows, or a folder of *.parquet files.
    parquet: NonEmptyPath | None = None
    hub: HubDataSettings | None = None
    reasoning_gym: ReasoningGymSettings | None = None
    # Renames columns, new name first: {prompt: question}.
    columns: dict[Text, Text] = Field({})
    # raw: the prompt's text as it is. chat: the text goes through the tokenizer's chat template.
    template: Literal["raw", "chat"] = "raw"
    # Variables of the chat template, such as {enable_thinking: false}.
    chat_template_kwargs: dict[Text, Any] = Field({})
    # Whether raw prompts get the tokens that the tokenizer puts around every text, such as <s>.
    add_special_tokens: bool = True
    # Text of the prompt (with chat: the user's turn). Braces hold columns of the row.
    format: Text = "{prompt}"
    # Column with an image, or a list of images, of the prompt: a path, from the folder of the rows,
    # or what the Hub's data sets have as images. With chat they come before the text; with raw the
    # text has a token for each. Not set: none. (Rows with `messages` have them in their contents.)
    images: Text | None = None
    # System message of prompts with `template: chat`, and of rows with `messages` that begin with
    # none of their own. Empty: none. Not set: the chat template's own default.
    system: str | None = None
    # Regular expression whose first group, found in the prompt, becomes the row's `prompt`.
    extract: Pattern | None = None
    # Whether to leave out rows whose prompt came before.
    unique: bool = False
    # Number of rows to keep. Not set: all.
    limit: Count | None = None
    # Most tokens of a prompt. A longer one ends the start (fail), is left out (drop), or keeps its
    # last tokens (truncate_left); a note counts the prompts that were left out or cut.
    # Not set: the servers' max_model_len, and a longer prompt fails.
    max_prompt_tokens: Count | None = None
    too_long: Literal["fail", "drop", "truncate_left"] = "fail"

    @model_validator(mode="after")
    def _one_source(self) -> DataSettings:
        sources = (self.jsonl, self.parquet, self.hub, self.reasoning_gym)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give exactly one of jsonl, parquet, hub and reasoning_gym")
        if self.columns and self.reasoning_gym is not None:
            raise ValueError("columns does not apply to reasoning_gym")
        if self.max_prompt_tokens is None and self.too_long != "fail":
            raise ValueError(f"too_long: {self.too_long} needs max_prompt_tokens")
        return self


class OverlongBufferSettings(Settings):
    """The soft overlong punishment of DAPO (arXiv 2503.14476)."""

    # Length of the buffer, the last tokens before sampling.max_tokens. The reward of a response
    # that ends in it falls linearly with its length, by penalty_factor at most.
    len: Count
    penalty_factor: float = Field(1.0, gt=0)


class RewardFunctionSettings(Settings):
    """A function that judges responses, and the way to call it."""

    # "module:function", "path/file.py:function", or a builtin: "exact_match", "gsm8k", "math",
    # "reasoning_gym", "environment" (get_reward() of the run's environment), "none" (0 for every
    # response, which leaves distillation alone).
    function: Text = "exact_match"
    # HOST:PORT of a critic server, in the place of a function: the reward is the score that its
    # model gives the prompt with the response. No trainer teaches it.
    server: Address | None = None
    # Name in metrics and trajectories; the function's by default, reward_model of a server.
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")] | None = None
    # Factor of its reward in the sum.
    weight: float = Field(1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    # Folder in which modules are looked up after the installed ones. Default: the run file's.
    python_path: NonEmptyPath = Field(default_factory=Path.cwd)
    # Whether one call judges all responses of a step: rewards(prompts, responses, rows).
    batch: bool = False
    # Threads are for functions that wait, processes for functions that compute.
    executor: Literal["thread", "process"] = "thread"
    # Number of calls at a time. Not set: 16 with threads, one per CPU that this process may use
    # with processes, all with an `async def`. 1 with threads runs them one after the other in the
    # main thread.
    workers: Count | None = None
    # Most seconds of a call, which then fails. Not set: 600, or 3600 for the one call of `batch`.
    timeout_seconds: float | None = Field(None, gt=0, le=1e8)
    # A call that raises, gives no finite number, takes too long or loses its process ends the run
    # (fail) or leaves its response out of the step, counted in reward/failed (skip).
    on_error: Literal["fail", "skip"] = "fail"
    # exact_match and reasoning_gym judge the last match in the response (its first group, if it has
    # one). Not set: the whole response without surrounding space.
    answer_pattern: Pattern | None = None

    @property
    def is_builtin(self) -> bool:
        """Whether the function is one of this package, and no function of the user's."""
        return self.server is None and self.function in BUILTIN_REWARDS

    @property
    def limit_seconds(self) -> float:
        """The most seconds of a call: `timeout_seconds`, or its default."""
        return self.timeout_seconds or (3600.0 if self.batch else 600.0)

    @property
    def shown_name(self) -> str:
        """`name`, or by default the function's, or reward_model."""
        default = self.function.rpartition(":")[2] if self.server is None else "reward_model"
        return self.name or default

    @model_validator(mode="after")
    def _server_is_no_function(self) -> Self:
        fields = ("function", "batch", "executor", "workers", "answer_pattern")
        for name in fields if self.server is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does not apply to a reward of `server`")
        return self

    @model_validator(mode="after")
    def _one_way_to_call(self) -> Self:
        many = self.executor == "process" or self.workers is not None
        # math has processes of its own, of which `workers` is the number.
        many_of_builtin = self.executor == "process" if self.function == "math" else many
        if self.is_builtin and (many_of_builtin or self.batch):
            raise ValueError(f"batch, executor and workers do not apply to {self.function}")
        if self.batch and many:
            raise ValueError("batch is one call: executor: process and workers do not apply")
        return self

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also anchors the file of a function and the folder of modules."""
        values.setdefault("python_path", str(base))
        super().anchor(values, base)
        file, colon, function = str(values.get("function")).rpartition(":")
        if file.endswith(".py"):
            values["function"] = absolute(file, base) + colon + function


class RewardSettings(RewardFunctionSettings):
    """The judgement of a response: by one function, or with `rewards` by the sum of several."""

    # Least reward of a correct answer in an evaluation.
    correct_at: float = 1.0
    # Punishes responses that are almost too long, only in training.
    overlong_buffer: OverlongBufferSettings | None = None


class SamplingSettings(Settings):
    """Fields of SamplingParams, with its defaults."""

    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(0, ge=0, le=INT32_MAX)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: Count = 64
    stop_token_ids: list[TokenId] = Field([])
    # Texts that end a response, over however many tokens each. The token that completes one of them
    # is the response's last. The name of a special token is that token. At most 16 texts of 256
    # bytes.
    stop: list[Text] = Field([])
    ignore_eos: bool = False


class TandemSettings(Settings):
    """Fields of TandemConfig. A field that is not set takes the rollout server's value."""

    # Always sent: a server without a junior then refuses instead of training plain GRPO.
    enabled: bool = True
    # turn: whole turns of an episode in alternation, the senior first; with `environment` alone.
    selection_strategy: (
        Literal["bernoulli", "chunk", "alternating", "sentence", "word", "turn"] | None
    ) = None
    prob_senior: float | None = Field(None, ge=0, le=1)
    chunk_size: Count | None = None
    max_gap_tokens: Count | None = None
    boundary_token_ids: list[TokenId] = Field([])


class SpeculativeSettings(Settings):
    """Fields of SpeculativeConfig, with its defaults."""

    # ngram: what followed the last tokens earlier. junior: the junior drafts the senior's tokens.
    # heads: those of the rollout servers' senior.speculator.
    method: Literal["none", "ngram", "junior", "heads"] = "none"
    # Most drafts in one forward pass.
    num_speculative_tokens: int = Field(5, ge=1, le=15)
    # Fewest and most final tokens that ngram looks up.
    prompt_lookup_min: int = Field(2, ge=1, le=16)
    prompt_lookup_max: int = Field(4, ge=1, le=16)
    # exact: drafts change only the speed. rejection_sampling: they preserve only the distribution
    # of the responses, and more drafts of the junior are accepted.
    acceptance_rule: Literal["exact", "rejection_sampling"] = "exact"

    @model_validator(mode="after")
    def _lookups_in_order(self) -> SpeculativeSettings:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max, "
                f"{self.prompt_lookup_max}"
            )
        return self

    def fields(self) -> dict[str, Any]:
        """Returns the fields of SpeculativeConfig for a prompt; none without drafts."""
        return {} if self.method == "none" else self.model_dump()

    @property
    def changes_responses(self) -> bool:
        """Whether responses depend on the drafts."""
        return self.method != "none" and self.acceptance_rule != "exact"


def _objective_settings(message: Descriptor, name: str) -> type[Settings]:
    """Returns the section whose fields are those of an objective, with the contract's types."""
    types: dict[int, Any] = {
        FieldDescriptor.TYPE_DOUBLE: float,
        FieldDescriptor.TYPE_INT32: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)],
        FieldDescriptor.TYPE_BOOL: bool,
    }
    fields: dict[str, Any] = {}
    for field in message.fields:
        if field.name == "reference_logprobs":
            continue  # It follows from the run's `reference`.
        if field.message_type is not None:
            inner = field.message_type
            kind = _objective_settings(inner, f"{inner.name}Settings")
        elif field.enum_type is None:
            kind = types[field.type]
        else:
            # Only a training loop of the user's own can give numbers with each sample.
            kind = Literal[
                tuple(name for name in enum_names(field.enum_type) if name != "provided")
            ]
        fields[field.name] = (kind | None, None)
    return create_model(name, __base__=Settings, **fields)


# A field that is not set takes the trainer's default; objective.proto explains every field.
ObjectiveSettings = _objective_settings(PolicyObjective.DESCRIPTOR, "ObjectiveSettings")


class KlControlSettings(Settings):
    """The adaptive coefficient of the KL to the reference policy (arXiv 1909.08593)."""

    # KL of a response that the coefficient steers towards, in nats: the sum over the tokens that
    # have a weight.
    target: float = Field(6.0, gt=0)
    # Number of responses over which the coefficient can change by a fifth of itself.
    horizon: Count = 10000


class FilterGroupsSettings(Settings):
    """The dynamic sampling of DAPO (arXiv 2503.14476)."""

    # Most times that prompts are drawn for a step, the first time included. A step that is not full
    # by then trains on the groups that it has.
    max_num_gen_batches: Count = 10


class BatchSettings(Settings):
    """Size of a step."""

    prompts_per_step: Count = 8
    samples_per_prompt: Count = 8
    # Drops groups whose rewards are all the same, and draws further prompts in their place.
    filter_groups: FilterGroupsSettings | None = None

    @property
    def samples_per_step(self) -> int:
        """The number of responses of a full step."""
        return self.prompts_per_step * self.samples_per_prompt

    @model_validator(mode="after")
    def _step_fits(self) -> BatchSettings:
        if self.samples_per_step > INT32_MAX:
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
    # Source of the texts to learn. rows: `response`. senior: one response to each prompt, which the
    # senior writes alone with `sampling`; the data that a speculator learns from.
    responses: Literal["rows", "senior"] = "rows"
    # With `responses: rows`: text to learn after the prompt. Braces hold columns of the row.
    response: Text = "{answer}"
    # With `responses: rows`: whether the tokenizer's end-of-sequence token ends the response.
    append_eos: bool = True
    # Factor of the cross-entropy beside objective.distillation; 0 learns only from the teacher.
    cross_entropy_coefficient: float = Field(1.0, ge=0)


class DpoSettings(Settings):
    """Training on pairs of a chosen and a rejected response (`tandem dpo`)."""

    # Number of pairs in a step.
    batch_size: Count = 16
    # The loss of a pair, by TRL's names (docs/guides/losses/preferences.md).
    loss_type: Literal[PAIR_LOSSES] = "sigmoid"
    # Strength of the pull towards the reference policy; of ipo its tau.
    beta: float = Field(0.1, gt=0)
    # Probability that a pair is labelled the wrong way round. Only for sigmoid, robust (below 0.5)
    # and exo_pair (above 0).
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    # Margin of simpo, which its paper writes gamma.
    simpo_gamma: float = Field(0.5, ge=0)
    # Temperature of the mixture of discopop.
    discopop_tau: float = Field(0.05, gt=0)
    # Weight of the cross-entropy of the chosen responses beside the loss of the pairs, a mean over
    # their tokens. 0: none.
    rpo_alpha: float = Field(0.0, ge=0)
    # Source of the reference policy's log-probabilities. model: the run's `reference`. rows: the
    # columns `ref_chosen_logps` and `ref_rejected_logps`, sums over the tokens of a response. none:
    # 0 for every response. Not set: model, and none for simpo, which has no reference.
    reference_logprobs: Literal["model", "rows", "none"] | None = None
    # Whether the tokenizer's end-of-sequence token ends the responses.
    append_eos: bool = True

    @property
    def reference_source(self) -> str:
        """`reference_logprobs`, or its default."""
        return self.reference_logprobs or ("none" if self.loss_type == "simpo" else "model")

    @model_validator(mode="after")
    def _loss_has_settings(self) -> DpoSettings:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust", "exo_pair"):
            raise ValueError(f"label_smoothing does not apply to {self.loss_type}")
        if self.loss_type == "robust" and self.label_smoothing >= 0.5:
            raise ValueError("label_smoothing must be below 0.5 for robust")
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError("label_smoothing must be above 0 for exo_pair; its paper takes 0.001")
        if self.loss_type == "simpo" and self.reference_source != "none":
            raise ValueError("reference_logprobs does not apply to simpo")
        for name, loss_type in (("simpo_gamma", "simpo"), ("discopop_tau", "discopop")):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and self.loss_type != loss_type:
                raise ValueError(f"{name} only applies to {loss_type}")
        return self


class RewardModelSettings(Settings):
    """Training of a reward model on pairs (`tandem reward-model`)."""

    # Number of pairs in a step.
    batch_size: Count = 16
    # Weight of the mean square of the sum of a pair's scores, which keeps them around 0
    # (arXiv 2312.09244). 0: none.
    center_rewards_coefficient: float = Field(0.0, ge=0)
    # Whether the tokenizer's end-of-sequence token, whose score counts then, ends the responses.
    append_eos: bool = True


class CheckpointSettings(Settings):
    """The steps after which a run saves, and the number of checkpoints that it keeps."""

    # Steps between checkpoints, the most that a crash costs. 0: save only at the end.
    every: int = Field(10, ge=0)
    # Number of checkpoints to keep, the newest. 0: all.
    keep: int = Field(2, ge=0, le=INT32_MAX)
    # Whether to save after the last step.
    at_end: bool = True
    # URL of a copy of the run: checkpoints, and what resuming needs, are uploaded beside the next
    # steps, and --resume with an empty run_dir begins with them. Not set: none.
    upload: StorePlace | None = None
    # Whether an upload that fails, after some tries, ends the run. If false, it is logged and
    # counted, and the next checkpoint is uploaded.
    upload_required: bool = False


class TrajectorySettings(Settings):
    """The responses that a run keeps on disk."""

    # Steps between those whose responses are kept. 0: none.
    every: int = Field(1, ge=0)
    # Number of steps to keep, the newest, and of evaluations of each mode; or "all".
    keep: Count | Literal["all"] = "all"
    # Whether to keep the log-probabilities of the tokens, most of a file's size.
    logprobs: bool = True


class TakeoverSettings(Settings):
    """The place in an answer at which one model takes over from the other."""

    # Number of tokens of the answer, instead of after_share.
    after_tokens: Count | None = None
    # Share of the tokens of the answer that the first model would give alone. Default, without
    # after_tokens: 0.5.
    after_share: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _one_place(self) -> TakeoverSettings:
        if self.after_tokens is not None and self.after_share is not None:
            raise ValueError("after_tokens and after_share: set one of them")
        return self


class EvalSettings(Settings):
    """Evaluations on held-out prompts."""

    # Source of the held-out prompts. Settings of `data` that say how prompts are written (columns,
    # template, chat_template_kwargs, add_special_tokens, format, images, system, extract) hold
    # here, too, unless they are set.
    data: DataSettings | None = None
    # solo: the senior answers alone. junior_solo: the junior does. tandem: both answer, as the
    # section `tandem` says. handoff: senior and junior take turns. legibility: the junior predicts
    # the senior's solo answers. junior_takeover: the junior finishes what the senior began.
    # senior_takeover: the senior finishes what the junior began.
    modes: list[EvalMode] = Field(["solo"], min_length=1)
    # Text that ends a turn of the handoff: every token whose own text ends with this text ends a
    # turn. Default: a blank line, which not every tokenizer writes as one token.
    handoff_boundary: Text = "\n\n"
    # Whether a turn of the handoff is a whole turn of an episode instead: senior and junior write
    # them in alternation.
    handoff_turns: bool = False
    # The place at which a takeover happens.
    takeover: TakeoverSettings = TakeoverSettings()
    # Regular expressions by name: a mode that judges answers also gives the share of answers in
    # which one is found, as `pattern/NAME`. For a dialect that is recognised by its words.
    patterns: dict[Name, Pattern] = Field({})
    # Number of responses to each prompt, and the k of pass@k.
    samples: Count = 1
    k: list[int] = Field([1], min_length=1)
    temperature: float = Field(0.0, ge=0)
    # Default: sampling.max_tokens.
    max_tokens: Count | None = None
    # Steps between evaluations during training. 0: none.
    every: int = Field(0, ge=0)
    # Whether to evaluate before the first step, and after the last one. Default: if `every` is
    # above 0.
    at_start: bool | None = None
    at_end: bool | None = None
    # Drafts of the answers. Not set: those of the run's `speculative`.
    speculative: SpeculativeSettings | None = None

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


class WandbSettings(Settings):
    """The place of a run among those of Weights & Biases, for `trackers: [wandb]`."""

    # Not set: the variable WANDB_PROJECT, else "tandem".
    project: Text | None = None
    # User or team. Not set: the account's default.
    entity: Text | None = None
    # Not set: the name of the run directory.
    name: Text | None = None
    # Runs of one group are shown together.
    group: Text | None = None
    tags: list[Text] = Field([])


class RunSettings(Settings):
    """A training run (`tandem train`, `sft`, `dpo`, `reward-model`), or `tandem eval`."""

    fetched: ClassVar[frozenset[str]] = frozenset({"start_from"})

    # Directory of the run's files.
    run_dir: NonEmptyPath
    seed: int = Field(0, ge=0, lt=2**64)
    # Number of steps. Default 10; with `epochs`, as many as these need.
    steps: int | None = Field(None, ge=1, lt=2**63)
    # Passes over the rows of `data`, instead of `steps`; with both the run ends at the first of
    # them. Rows that batch.filter_groups draws in the place of others do not count.
    epochs: float | None = Field(None, gt=0)
    # Peak learning rate of the trainer of `cluster`: cluster.trainer.optimizer.learning_rate. For
    # `tandem reward-model` that of its critic.
    learning_rate: float | None = Field(None, ge=0)
    # Longest sequence, prompt and response, of every server of `cluster`.
    max_model_len: Count | None = None
    # The senior's directory with tokenizer.json, or its name on the Hugging Face Hub. Default with
    # `cluster`: the cluster's senior.
    tokenizer: NonEmptyPath
    servers: ServersSettings = ServersSettings()
    credentials: CredentialsSettings = CredentialsSettings()
    # A cluster file, or its content: servers that live as long as the run, instead of `servers`.
    # Servers that the run does not use are not started.
    cluster: ClusterSettings | None = None
    # Weights that a new run starts from. Not set: the servers' base model; the start is refused
    # while they hold updates that no checkpoint has. "base": the base model, whatever they hold.
    # "served": the weights that they hold. Else a checkpoint, or a run directory for its last one;
    # it may be at a URL.
    start_from: Annotated[
        Literal["base", "served"] | NonEmptyPath | None, BeforeValidator(_is_start)
    ] = None
    # Moments of the optimizers, and their place in the schedule, of a new run whose start_from is a
    # checkpoint. fresh: they begin again. keep: those of the checkpoint.
    start_optimizer: Literal["fresh", "keep"] = "fresh"
    data: DataSettings
    reward: RewardSettings = RewardSettings()
    # Several functions in the place of reward.function: a response's reward is the weighted sum of
    # their rewards.
    rewards: list[RewardFunctionSettings] = Field([])
    # Draws episodes of several turns in the place of single responses.
    environment: EnvironmentSettings | None = None
    batch: BatchSettings = BatchSettings()
    # Draws the rollouts of the next steps while one trains.
    async_: Annotated[AsyncSettings, Field(alias="async")] = AsyncSettings()
    sampling: SamplingSettings = SamplingSettings()
    tandem: TandemSettings = TandemSettings()
    # Drafts of the responses.
    speculative: SpeculativeSettings = SpeculativeSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    # The reference of the KL of objective.kl_coefficient, and of `tandem dpo`. trainer: the
    # trainer's reference_model, or its model without adapters. junior: the frozen junior of the
    # rollout servers, not for `tandem dpo`. HOST:PORT: the senior of a rollout server that no
    # trainer publishes to.
    reference: FrozenModel = "trainer"
    # Teachers of objective.distillation, by name. trainer: the trainer's teacher_model, over the
    # whole vocabulary. junior: the frozen junior of the rollout servers. HOST:PORT: the senior of a
    # rollout server that no trainer publishes to. The last two are compared by their
    # distillation.top_k likeliest tokens (32 where it is not set).
    teachers: Teachers = Field({})
    # Column that names the teacher of a row, with several of them.
    teacher_column: Text | None = None
    # Adapts the KL coefficient during the run, which begins with objective.kl_coefficient.
    kl_control: KlControlSettings | None = None
    sft: SftSettings = SftSettings()
    dpo: DpoSettings = DpoSettings()
    reward_model: RewardModelSettings = RewardModelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    trajectories: TrajectorySettings = TrajectorySettings()
    eval: EvalSettings = EvalSettings()
    # TensorBoard events in the run directory, Weights & Biases, MLflow; the last two need their
    # packages.
    trackers: list[TrackerName] = Field(["tensorboard"])
    wandb: WandbSettings = WandbSettings()
    # Whether to record also the log-probability of every token under the model that did not write
    # it. On by default: the loss reads the senior's log-probability of junior-written tokens.
    return_other_logprobs: bool = True

    @model_validator(mode="after")
    def _rewards_have_names(self) -> RunSettings:
        if not self.rewards:
            return self
        # The other fields of `reward` concern the sum.
        default = RewardSettings(python_path=self.reward.python_path)
        for field in RewardFunctionSettings.model_fields:
            if getattr(self.reward, field) != getattr(default, field):
                raise ValueError(f"rewards: reward.{field} only applies to a run without `rewards`")
        names = [one.shown_name for one in self.rewards]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"rewards.{place}.name: {name!r} is taken")
            if f"reward/{name}" in KEYS:
                raise ValueError(f"rewards.{place}.name: reward/{name} is a metric already")
        return self

    @model_validator(mode="before")
    @classmethod
    def _environment_rewards(cls, values: Any) -> Any:
        """Lets a run that names no reward function have that of its environment."""
        if not isinstance(values, dict) or not values.get("environment") or values.get("rewards"):
            return values
        reward = values.get("reward")
        if reward is None or (isinstance(reward, dict) and not {"function", "server"} & {*reward}):
            return values | {"reward": {**(reward or {}), "function": ENVIRONMENT_REWARD}}
        return values

    @model_validator(mode="after")
    def _environment_fits(self) -> RunSettings:
        named = ENVIRONMENT_REWARD in [one.function for one in self.reward_functions]
        if self.environment is None:
            if named:
                raise ValueError(f"reward: {ENVIRONMENT_REWARD} needs the section `environment`")
            if self.tandem.selection_strategy == "turn":
                raise ValueError(
                    "tandem.selection_strategy: turn needs the section `environment`: without it "
                    "the senior writes every response"
                )
            return self
        if self.reward.overlong_buffer is not None:
            raise ValueError(
                "reward.overlong_buffer: does not apply to a run with `environment`; "
                "environment.max_episode_tokens bounds its episodes"
            )
        return self

    @model_validator(mode="after")
    def _some_steps(self) -> RunSettings:
        if self.steps is None and self.epochs is None:
            self.steps = DEFAULT_STEPS
        return self

    @model_validator(mode="after")
    def _cluster_takes_them(self) -> RunSettings:
        for field in ("learning_rate", "max_model_len"):
            if getattr(self, field) is not None and self.cluster is None:
                raise ValueError(
                    f"{field}: only applies to servers of `cluster`; running servers have their own"
                )
        return self

    @model_validator(mode="after")
    def _stale_rollouts_are_bounded(self) -> RunSettings:
        """Gives the objective of an asynchronous run the bound of its staleness in versions."""
        steps, updates = self.async_.max_staleness, self.updates_per_step
        if not steps:
            return self
        versions = steps * updates
        if versions > MOST_VERSIONS:
            raise ValueError(
                f"async.max_staleness: {steps} steps of {updates} updates are {versions:,} "
                f"versions, but the trainer looks back {MOST_VERSIONS:,} at most"
            )
        given = self.objective.given()
        if given.get("max_staleness", versions) < versions:
            raise ValueError(
                f"objective.max_staleness: {given['max_staleness']} versions, but "
                f"async.max_staleness: {steps} steps of {updates} updates are {versions}"
            )
        bound = given.get("max_staleness", versions)
        self.objective = self.objective.model_copy(update={"max_staleness": bound})
        return self

    def examples_per_step(self, purpose: Purpose) -> int:
        """Returns the number of rows that a step of training takes."""
        sizes = {
            "sft": self.sft.batch_size,
            "dpo": self.dpo.batch_size,
            "reward-model": self.reward_model.batch_size,
        }
        return sizes.get(purpose, self.batch.prompts_per_step)

    def with_steps_of(self, rows: int, purpose: Purpose) -> RunSettings:
        """Returns the settings with the number of steps that `epochs` comes to, for `rows` rows."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * rows / self.examples_per_step(purpose)))
        return self.model_copy(update={"steps": min(steps, self.steps or steps)})

    @property
    def updates_per_step(self) -> int:
        """Most optimizer updates of a step of policy training, of the senior and of a critic."""
        return (self.objective.num_mini_batches or 1) * (self.objective.num_epochs or 1)

    @property
    def reward_functions(self) -> list[RewardFunctionSettings]:
        """The functions whose weighted rewards are added up, at least one."""
        return self.rewards or [self.reward]

    @model_validator(mode="before")
    @classmethod
    def _eval_data_is_written_as_data(cls, values: Any) -> Any:
        """Gives eval.data the settings of `data` that say how prompts are written."""
        evaluation = values.get("eval") if isinstance(values, dict) else None
        held_out = evaluation.get("data") if isinstance(evaluation, dict) else None
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(held_out, dict) or not isinstance(data, dict):
            return values
        written = {key: data[key] for key in HOW_PROMPTS_ARE_WRITTEN if key in data}
        if "reasoning_gym" in held_out:
            written.pop("columns", None)
        return values | {"eval": evaluation | {"data": written | held_out}}

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_senior(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tokenizer" not in values:
            senior = senior_of(values.get("cluster"))
            return values | ({"tokenizer": senior} if senior else {})
        return values

    @property
    def reference_address(self) -> str | None:
        """The address of the rollout server that is the reference, if one is."""
        return self.reference if ":" in self.reference else None

    @property
    def eval_speculative(self) -> SpeculativeSettings:
        """The drafts of evaluations: their own, else the run's."""
        return self.eval.speculative or self.speculative

    def policy_objective(self) -> dict[str, Any]:
        """Returns the fields of PolicyObjective that a run sends with its steps."""
        source = {} if self.reference == "trainer" else {"reference_logprobs": "provided"}
        distillation = {"distillation": self.distillation()} if self.distils else {}
        return self.objective.given() | source | distillation

    @property
    def distils(self) -> bool:
        """Whether the run learns from teachers."""
        return bool(self.distillation().get("coefficient"))

    def distillation(self) -> dict[str, Any]:
        """Returns the fields of Distillation that a run sends with its steps."""
        by_trainer = not self.teachers or "trainer" in self.teachers.values()
        top_k = {"top_k": 0 if by_trainer else DEFAULT_TOP_K}
        return top_k | (self.objective.given().get("distillation") or {})

    def teachers_in(self, purpose: Purpose) -> dict[str, str]:
        """Returns the teachers that a command asks."""
        return dict(self.teachers) if purpose in ("train", "sft") and self.distils else {}

    def supervised_objective(self) -> dict[str, Any]:
        """Returns the fields of SupervisedObjective that a run sends with its steps."""
        if not self.distils:
            return {}
        return {
            "distillation": self.distillation(),
            "cross_entropy_coefficient": self.sft.cross_entropy_coefficient,
        }

    def derived(self) -> dict[str, int]:
        """Returns the sizes that follow from the settings, as --dry-run shows them."""
        samples, steps = self.batch.samples_per_step, self.steps or 0
        return {
            "samples_per_step": samples,
            "max_response_tokens_per_step": samples * self.sampling.max_tokens,
            "samples_in_run": samples * steps,
            "prompts_in_run": self.batch.prompts_per_step * steps,
            "updates_in_run": self.updates_per_step * steps,
            "sft_samples_in_run": self.sft.batch_size * steps,
            "dpo_pairs_in_run": self.dpo.batch_size * steps,
            "reward_model_pairs_in_run": self.reward_model.batch_size * steps,
        }

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also replaces the name of a cluster file by its content."""
        if isinstance(values.get("cluster"), str) and values["cluster"]:
            values["cluster"] = read_cluster(Path(absolute(values["cluster"], base)))
        rewards = values.get("rewards")
        for one in rewards if isinstance(rewards, list) else []:
            if isinstance(one, dict):
                RewardFunctionSettings.anchor(one, base)
        name_model(values, "tokenizer", base)
        super().anchor(values, base)

    @classmethod
    def require_kind(cls, path: Path, values: dict[str, Any]) -> None:
        """Raises ConfigError for a cluster file."""
        if {"rollout", "trainer", "critic"} & values.keys():
            raise ConfigError(
                f"{path} is a cluster file, not a run file",
                hint="`tandem up` starts its servers; `cluster` in a run file names it",
            )
