"""The messages of requests, built from plain values for both kinds of client."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import tensor_pb2, trajectory_pb2
from tandem.errors import ConfigError, RpcError
from tandem.rpc.generate_events import PromptFailed, SampleFinished, read_event
from tandem.rpc.images import VisionInput, VisionInputs, messages
from tandem.rpc.transport import MAX_SEND_BYTES
from tandem.rpc.wire import to_message, to_tensor
from tandem.utils.authors import ENVIRONMENT

# The fields of TandemConfig with which one model writes every token.
SENIOR_ALONE: Mapping[str, Any] = {"enabled": False}
JUNIOR_ALONE: Mapping[str, Any] = {
    "enabled": True,
    "selection_strategy": "bernoulli",
    "prob_senior": 0.0,
}

# Upper bound of the bytes before an inner message: its tag and its length.
_TAG_BYTES = 6
# Bytes for the prompts of one message, without the message around them and its last flag.
_PROMPT_BYTES = MAX_SEND_BYTES - _TAG_BYTES - 2

# Bytes of a record of routing beside the rest of its sample in one message.
_ROUTING_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class ResponseSoFar:
    """The tokens of a response that a prompt continues; none by default.

    Attributes:
        token_ids: turns of the models, and between them what an environment said.
        authorship_mask: the author of each token: 1 senior, 0 junior, 2 environment.
    """

    token_ids: Sequence[int] = ()
    authorship_mask: Sequence[int] = ()

    @classmethod
    def after(
        cls, turn: trajectory_pb2.Trajectory, environment_token_ids: Sequence[int] = ()
    ) -> ResponseSoFar:
        """Returns a whole response, with what an environment said behind it."""
        said = [ENVIRONMENT] * len(environment_token_ids)
        return cls(
            [*turn.response_token_ids, *environment_token_ids], [*turn.authorship_mask, *said]
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt to continue.

    Attributes:
        token_ids: the ids of the prompt.
        seed: determines, with the sample's index, every random draw (schedule.prompt_seed).
        num_samples: number of responses; 0 means 1.
        sampling: fields of SamplingParams.
        tandem: fields of TandemConfig; the server has defaults for the others.
        return_other_logprobs: also compute the log-probability under the other model.
        stream_tokens: send tokens while they are written.
        request_id: unique in the stream; an empty one is replaced.
        priority: a 32-bit integer; prompts of a higher one come first. The response is the same.
        speculative: fields of SpeculativeConfig. The response is the same, but for the
            acceptance_rule rejection_sampling, which preserves only its distribution.
        return_routed_experts: also record the experts that the senior's routers chose.
        vision_inputs: images and videos, in the order of their tokens.
        response: the response so far, which the server continues; what it returns are the new
            tokens alone, which tandem.join() puts behind the others. `max_tokens` bounds them.
        first_sample_index: index of the first sample. A sample that is continued names its own,
            with num_samples 1.
        num_top_logprobs: number of the likeliest tokens that are returned for each place, with
            their log-probabilities, at most 128 (Trajectory.top_token_ids).
    """

    token_ids: Sequence[int]
    seed: int = 0
    num_samples: int = 1
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 64})
    tandem: Mapping[str, Any] = field(default_factory=dict)
    return_other_logprobs: bool = False
    stream_tokens: bool = False
    request_id: str = ""
    priority: int = 0
    speculative: Mapping[str, Any] = field(default_factory=dict)
    return_routed_experts: bool = False
    vision_inputs: Sequence[VisionInput] = ()
    response: ResponseSoFar = ResponseSoFar()
    first_sample_index: int = 0
    num_top_logprobs: int = 0

    @property
    def sample_indices(self) -> range:
        """The indices of its samples."""
        return range(self.first_sample_index, self.first_sample_index + max(1, self.num_samples))

    def named(self, index: int) -> Prompt:
        """Returns the prompt with a request_id, made of `index` where it has none."""
        if self.request_id:
            return self
        return dataclasses.replace(self, request_id=f"prompt-{index}")

    def message(self) -> rollout_pb2.Prompt:
        """Returns the message; raises ConfigError for a value that does not fit its field."""
        try:
            return self._message()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"prompt {self.request_id!r}: {error}") from None

    def _message(self) -> rollout_pb2.Prompt:
        prompt = rollout_pb2.Prompt(
            request_id=self.request_id,
            prompt_token_ids=self.token_ids,
            seed=self.seed,
            num_samples=self.num_samples,
            return_other_logprobs=self.return_other_logprobs,
            return_routed_experts=self.return_routed_experts,
            stream_tokens=self.stream_tokens,
            priority=self.priority,
            vision_inputs=messages(self.vision_inputs),
            first_sample_index=self.first_sample_index,
            num_top_logprobs=self.num_top_logprobs,
        )
        if self.response.token_ids:
            prompt.response.token_ids.extend(self.response.token_ids)
            prompt.response.authorship_mask = bytes(self.response.authorship_mask)
        place = f"prompt {self.request_id!r}: "
        to_message(self.sampling, prompt.sampling, f"{place}sampling")
        to_message(self.tandem, prompt.tandem, f"{place}tandem")
        to_message(self.speculative, prompt.speculative, f"{place}speculative")
        return prompt


def submit(prompts: Iterable[Prompt]) -> list[rollout_pb2.GenerateRequest]:
    """Returns the messages of one batch, which the server admits as a whole.

    Raises ConfigError for a prompt that no message can hold.
    """
    messages: list[list[rollout_pb2.Prompt]] = [[]]
    free = _PROMPT_BYTES
    for prompt in prompts:
        message = prompt.message()
        size = message.ByteSize() + _TAG_BYTES
        if size > _PROMPT_BYTES:
            raise ConfigError(
                f"prompt {prompt.request_id!r}: {size} bytes, but a message holds at most "
                f"{_PROMPT_BYTES}"
            )
        if size > free:
            messages.append([])
            free = _PROMPT_BYTES
        messages[-1].append(message)
        free -= size
    batch = [rollout_pb2.SubmitPrompts(prompts=held, more_follow=True) for held in messages]
    batch[-1].more_follow = False
    return [rollout_pb2.GenerateRequest(submit=submitted) for submitted in batch]


class Collector:
    """A collector of the samples of a set of prompts, over all attempts of the call.

    `on_event` is called with every event. Raises ConfigError for two prompts with one request_id.

    Attributes:
        num_samples: number of samples that have come.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        on_event: Callable[[rollout_pb2.GenerateResponse], None] | None = None,
    ) -> None:
        self._on_event = on_event or (lambda _: None)
        self.prompts = [prompt.named(index) for index, prompt in enumerate(prompts)]
        self._samples: dict[str, dict[int, trajectory_pb2.Trajectory]] = {}
        self._failures: dict[str, RpcError] = {}
        self.num_samples = 0
        for index, prompt in enumerate(self.prompts):
            if prompt.request_id in self._samples:
                raise ConfigError(
                    f"prompts[{index}].request_id: {prompt.request_id!r} is taken by another prompt"
                )
            self._samples[prompt.request_id] = {}

    def missing(self) -> list[Prompt]:
        """Returns the prompts that lack a sample."""
        return [
            prompt
            for prompt in self.prompts
            if len(self._samples[prompt.request_id]) < len(prompt.sample_indices)
        ]

    def add(self, event: rollout_pb2.GenerateResponse) -> None:
        """Takes an event; raises the error of a prompt that failed while others are not finished.

        If none are, the call ends by itself, and require_complete() raises the error.
        """
        told = read_event(event)
        if isinstance(told, SampleFinished):
            self._samples[told.request_id][told.sample_index] = told.trajectory
            self.num_samples += 1
        elif isinstance(told, PromptFailed):
            self._failures[told.request_id] = told.error
            if any(prompt.request_id not in self._failures for prompt in self.missing()):
                raise self._first_failure()
            return
        self._on_event(event)

    def require_complete(self, address: str) -> None:
        """Raises RpcError if the stream ended with a sample missing."""
        if self._failures:
            raise self._first_failure()
        if missing := self.missing():
            raise RpcError(
                f"{address} ended the stream with {len(missing)} prompts unfinished",
                code=grpc.StatusCode.INTERNAL,
                method="Generate",
            )

    def _first_failure(self) -> RpcError:
        """Returns a failure of the attempt, and forgets all: the next attempt asks again."""
        failure = next(iter(self._failures.values()))
        self._failures.clear()
        return failure

    def results(self) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the samples of every prompt, in order."""
        return [
            [self._samples[prompt.request_id][index] for index in prompt.sample_indices]
            for prompt in self.prompts
        ]


@dataclass(frozen=True)
class TeacherTokens:
    """A teacher's distributions over the tokens of a response, for distillation.

    Attributes:
        name: the teacher's name in the report; may be empty.
        top_token_ids: the likeliest tokens of the teacher at each place of the response, int32
            [tokens, top_k], or the message that Score gave; None where the trainer's teacher_model
            is the teacher.
        top_logprobs: their log-probabilities, float32 of the same shape, or the message.
    """

    name: str = ""
    top_token_ids: Any = None
    top_logprobs: Any = None

    def message(self) -> trainer_pb2.TeacherTokens:
        """Returns the message of the contract."""
        message = trainer_pb2.TeacherTokens(name=self.name)
        if self.top_token_ids is not None:
            message.top_token_ids.CopyFrom(_tensor(self.top_token_ids, "<i4"))
        if self.top_logprobs is not None:
            message.top_logprobs.CopyFrom(_tensor(self.top_logprobs, "<f4"))
        return message


def _tensor(values: Any, dtype: str) -> tensor_pb2.Tensor:
    return values if isinstance(values, tensor_pb2.Tensor) else to_tensor(values, dtype)


@dataclass(frozen=True)
class PolicySample:
    """One response with its reward, for a policy-gradient step."""

    trajectory: trajectory_pb2.Trajectory
    group_id: str
    reward: float | None = None
    advantages: Sequence[float] | None = None
    old_logprobs: Sequence[float] | None = None
    reference_logprobs: Sequence[float] | None = None
    teacher: TeacherTokens | None = None

    def messages(self) -> list[trainer_pb2.TrainStepRequest]:
        """Returns the messages of the contract: parts of a long routing record, then the sample."""
        sample = trainer_pb2.PolicySample(trajectory=self.trajectory, group_id=self.group_id)
        # Depends on the load: a step that is repeated with responses drawn again is the same step.
        sample.trajectory.ClearField("accepted_draft_mask")
        for unread in ("top_token_ids", "top_logprobs"):
            sample.trajectory.ClearField(unread)
        if self.reward is not None:
            sample.reward = self.reward
        if self.advantages is not None:
            sample.advantages.CopyFrom(to_tensor(self.advantages))
        if self.old_logprobs is not None:
            sample.old_logprobs.CopyFrom(to_tensor(self.old_logprobs))
        if self.reference_logprobs is not None:
            sample.reference_logprobs.CopyFrom(to_tensor(self.reference_logprobs))
        if self.teacher is not None:
            sample.teacher.CopyFrom(self.teacher.message())
        parts = []
        if self.trajectory.HasField("routed_experts"):
            data = sample.trajectory.routed_experts.data
            starts = range(0, len(data), _ROUTING_PART_BYTES)
            *parts, rest = [data[at : at + _ROUTING_PART_BYTES] for at in starts] or [b""]
            sample.trajectory.routed_experts.data = rest
        return [
            *(trainer_pb2.TrainStepRequest(routed_experts_part=part) for part in parts),
            trainer_pb2.TrainStepRequest(policy_sample=sample),
        ]


@dataclass(frozen=True)
class SupervisedSample:
    """A prompt, with its images and videos, and the response to learn.

    `weights` are of any sign, one for each token of the response; None: each is 1. They need the
    aggregation `token_sum`: the loss is the sum of -weight * log-probability. `teacher` is for
    distillation.
    """

    prompt_token_ids: Sequence[int]
    response_token_ids: Sequence[int]
    vision_inputs: VisionInputs = ()
    weights: Sequence[float] | None = None
    teacher: TeacherTokens | None = None

    def messages(self) -> list[trainer_pb2.TrainStepRequest]:
        """Returns the message of the contract, in a list as for every sample."""
        sample = trainer_pb2.SupervisedSample(
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=self.response_token_ids,
            vision_inputs=messages(self.vision_inputs),
        )
        if self.weights is not None:
            sample.weights.CopyFrom(to_tensor(self.weights))
        if self.teacher is not None:
            sample.teacher.CopyFrom(self.teacher.message())
        return [trainer_pb2.TrainStepRequest(supervised_sample=sample)]


@dataclass(frozen=True)
class ValueSample:
    """A prompt and response whose values a critic learns by the derivatives of a loss.

    `weights` are of any sign, of the value before each token of the response and, the last, of the
    value after it: the loss is the sum of weight * value.
    """

    prompt_token_ids: Sequence[int]
    response_token_ids: Sequence[int]
    weights: Sequence[float]
    vision_inputs: VisionInputs = ()

    def message(self) -> critic_pb2.TrainStepRequest:
        """Returns the message of the contract."""
        sample = critic_pb2.ValueSample(
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=self.response_token_ids,
            weights=to_tensor(self.weights),
            vision_inputs=messages(self.vision_inputs),
        )
        return critic_pb2.TrainStepRequest(sample=sample)


def value_step(
    samples: Sequence[ValueSample],
    *,
    run_id: str,
    step: int,
    expected_version: int,
    request_id: str | None = None,
) -> list[critic_pb2.TrainStepRequest]:
    """Returns the messages of one train step of a critic; a repeated call sends them again."""
    header = critic_pb2.TrainStepHeader(
        run_id=run_id,
        step=step,
        request_id=request_id or uuid.uuid4().hex,
        expected_version=expected_version,
        num_samples=len(samples),
    )
    return [critic_pb2.TrainStepRequest(header=header), *(one.message() for one in samples)]


def train_step(
    samples: Sequence[PolicySample] | Sequence[SupervisedSample],
    *,
    run_id: str,
    step: int,
    expected_version: int,
    objective: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    request_id: str | None = None,
) -> list[trainer_pb2.TrainStepRequest]:
    """Returns the messages of one train step; a repeated call sends the same list again.

    Raises ConfigError for an objective or an optimizer that does not fit the contract.
    """
    header = trainer_pb2.TrainStepHeader(
        run_id=run_id,
        step=step,
        request_id=request_id or uuid.uuid4().hex,
        expected_version=expected_version,
        num_samples=len(samples),
    )
    if samples and isinstance(samples[0], SupervisedSample):
        header.supervised.SetInParent()
        to_message(objective, header.supervised, "objective")
    else:
        header.policy.SetInParent()
        to_message(objective, header.policy, "objective")
    if optimizer:
        to_message(optimizer, header.optimizer, "optimizer")
    return [
        trainer_pb2.TrainStepRequest(header=header),
        *(message for sample in samples for message in sample.messages()),
    ]


def log_prob_requests(
    sequences: Iterable[SupervisedSample], temperature: float | None, reference: bool = False
) -> Iterator[trainer_pb2.ComputeLogProbsRequest]:
    """Yields the messages of ComputeLogProbs."""
    for sequence in sequences:
        request = trainer_pb2.ComputeLogProbsRequest(
            prompt_token_ids=sequence.prompt_token_ids,
            response_token_ids=sequence.response_token_ids,
            vision_inputs=messages(sequence.vision_inputs),
            reference=reference,
        )
        if temperature is not None:
            request.temperature = temperature
        yield request


def value_requests(
    sequences: Iterable[SupervisedSample],
) -> Iterator[critic_pb2.ComputeValuesRequest]:
    """Yields the messages of ComputeValues."""
    for sequence in sequences:
        yield critic_pb2.ComputeValuesRequest(
            prompt_token_ids=sequence.prompt_token_ids,
            response_token_ids=sequence.response_token_ids,
            vision_inputs=messages(sequence.vision_inputs),
        )


class ScoredTokens(NamedTuple):
    """Tokens to score; a plain tuple of the first two, or all three, will do."""

    token_ids: Sequence[int]
    first_scored_token: int
    vision_inputs: VisionInputs = ()


# A sequence as score() takes it.
ToScore = tuple[Sequence[int], int] | ScoredTokens


def score(
    sequences: Iterable[ToScore],
    senior: bool,
    junior: bool,
    temperature: float | None,
    num_top_logprobs: int = 0,
) -> rollout_pb2.ScoreRequest:
    """Returns the message of Score for (token ids, index of the first scored token)."""
    request = rollout_pb2.ScoreRequest(
        senior=senior, junior=junior, num_top_logprobs=num_top_logprobs
    )
    for one in (ScoredTokens(*sequence) for sequence in sequences):
        request.sequences.add(
            token_ids=one.token_ids,
            first_scored_token=one.first_scored_token,
            vision_inputs=messages(one.vision_inputs),
        )
    if temperature is not None:
        request.temperature = temperature
    return request


def server_path(path: str) -> str:
    """Returns a path for a server: a relative path starts at this process's working directory.

    An empty path stays empty; the server refuses it.
    """
    return path and str(Path(path).absolute())
