"""Valid calls of every method of the contract, which the mutations start from."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import harness
import numpy as np
from family_models import make_vision_model
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from harness import TANDEM
from steadiness import SEQUENCES, Servers
from tandem._proto.blobs.v1 import blobs_pb2
from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem._proto.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem.rpc import requests
from tandem.rpc.images import VisionInput
from tandem.rpc.requests import PolicySample, Prompt, ScoredTokens, SupervisedSample, TeacherTokens
from tandem.rpc.wire import from_tensor, to_tensor

ROLLOUT = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
WEIGHTS = weights_pb2.DESCRIPTOR.services_by_name["WeightService"]
TRAINER = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]
CRITIC = critic_pb2.DESCRIPTOR.services_by_name["CriticService"]
BLOBS = blobs_pb2.DESCRIPTOR.services_by_name["BlobService"]
# The server that calls of a service go to; every server has the BlobService.
_ROLES = {
    ROLLOUT: "rollout", WEIGHTS: "rollout", TRAINER: "trainer", CRITIC: "critic", BLOBS: "rollout"
}  # fmt: skip

_CHANGING = frozenset(
    {
        "Pause", "BeginUpdate", "UploadWeights", "CommitUpdate", "TrainStep", "PublishWeights",
        "LoadCheckpoint",
    }
)  # fmt: skip
# Methods that write to the disk or wait for other hosts: mutated less often, as they cost more.
_COSTLY = frozenset({"SaveCheckpoint", "LoadCheckpoint", "ExportModel", "PublishWeights"})
# The last two of the 300 ids of make_models().
_IMAGE_TOKEN, _VIDEO_TOKEN = 298, 299


@dataclass(frozen=True)
class ValidCall:
    """A call that servers answer with OK when they are in their first state.

    Attributes:
        name: the role, the method, and what is particular to this call.
        role: the kind of server that it goes to.
        prelude: calls that have to be made first.
    """

    name: str
    role: str
    method: MethodDescriptor
    messages: tuple[Message, ...]
    prelude: tuple[ValidCall, ...] = ()

    @property
    def path(self) -> str:
        """The method as gRPC names it."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    @property
    def changes_state(self) -> bool:
        """Whether the servers may be in another state afterwards."""
        return self.method.name in _CHANGING

    @property
    def weight(self) -> float:
        """Relative frequency with which the call is mutated."""
        return 1.0 if self.method.input_type.fields and self.method.name not in _COSTLY else 0.15

    @property
    def endless(self) -> bool:
        """Whether the call goes on until the client ends it."""
        return self.method.name == "WatchSteps"


def make_models(directory: Path) -> harness.Models:
    """Makes a senior and a junior that take images, as the calls with images need."""
    models = harness.make_models(directory)
    seeing = replace(models, senior=directory / "sees", junior=directory / "sees-too")
    make_vision_model(seeing.senior, "Qwen2_5_VL", models.senior)
    make_vision_model(seeing.junior, "Qwen2_5_VL", models.junior, seed=8)
    return seeing


def valid_calls(servers: Servers) -> list[ValidCall]:
    """The corpus, which is the same for the same models; seniors and juniors take images."""
    calls = [
        *_image_calls(),
        *_rollout_calls(),
        *_weight_calls(servers),
        *_trainer_calls(servers),
        *_critic_calls(servers),
    ]
    named = {call.method.full_name for call in calls}
    for service in _ROLES:
        for method in service.methods:
            assert method.full_name in named, f"no valid call of {method.full_name}"
    return calls


def _call(
    service: ServiceDescriptor,
    name: str,
    messages: Iterable[Message],
    prelude: Iterable[ValidCall] = (),
    role: str | None = None,
) -> ValidCall:
    """A call of the method whose name is the first word of `name`."""
    role = role or _ROLES[service]
    return ValidCall(
        f"{role} {name}",
        role,
        service.methods_by_name[name.partition(" ")[0]],
        tuple(messages),
        tuple(prelude),
    )


def _image_calls() -> list[ValidCall]:
    image = VisionInput(np.linspace(-1, 1, 8 * 96).reshape(8, 96), (1, 2, 4))
    video = VisionInput(np.linspace(-2, 2, 8 * 96).reshape(8, 96), (2, 2, 2), "video", 0.5)
    shown = [image, video]
    prompt = [5, *image.rows(2) * [_IMAGE_TOKEN], 6, *video.rows(2) * [_VIDEO_TOKEN], 7]
    uploads = {
        role: [_call(BLOBS, f"UploadBlob of {one.kind}", _upload(one), role=role) for one in shown]
        for role in ("rollout", "trainer", "critic")
    }
    generate = Prompt(prompt, sampling={"max_tokens": 4}, vision_inputs=shown, request_id="seen")
    score = requests.score([ScoredTokens([*prompt, 8], len(prompt), shown)], True, True, 1.0)
    sequences = [SupervisedSample(prompt, [8, 9], vision_inputs=shown)]
    learn = requests.train_step(
        sequences,
        run_id="run",
        step=1,
        expected_version=0,
        objective={"aggregation": "token_mean"},
        request_id="seen",
    )
    calls = [
        _call(
            BLOBS,
            "FindMissingBlobs",
            [blobs_pb2.FindMissingBlobsRequest(digests=[image.digest, video.digest, "0" * 64])],
        ),
        _call(ROLLOUT, "Generate with images", requests.submit([generate])),
        _call(ROLLOUT, "Score with images", [score]),
        _call(TRAINER, "TrainStep with images", learn),
        _call(TRAINER, "ComputeLogProbs with images", requests.log_prob_requests(sequences, 0.7)),
        _call(CRITIC, "ComputeValues with images", requests.value_requests(sequences)),
    ]
    with_blobs = [replace(call, prelude=tuple(uploads[call.role])) for call in calls]
    return [*with_blobs, *(upload for of_role in uploads.values() for upload in of_role)]


def _upload(image: VisionInput) -> list[Message]:
    data = image.pixels.tobytes()
    header = blobs_pb2.BlobHeader(digest=image.digest, total_bytes=len(data))
    chunks = [data[:1000], data[1000:]]
    return [
        blobs_pb2.UploadBlobRequest(header=header),
        *(blobs_pb2.UploadBlobRequest(chunk=chunk) for chunk in chunks),
    ]


def _rollout_calls() -> list[ValidCall]:
    sampling = {"max_tokens": 6, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    together = [
        Prompt(
            [5 + index, 6, 7],
            seed=index,
            num_samples=2,
            sampling=sampling | {"stop_token_ids": [9, 11], "stop": ["</answer>", "\n\n"]},
            tandem=tandem | {"boundary_token_ids": [40, 41]},
            return_other_logprobs=True,
            stream_tokens=True,
            request_id=f"prompt-{index}",
            priority=index - 2,
            speculative={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
                "acceptance_rule": "exact",
            },
        )
        for index, tandem in enumerate(TANDEM.values())
    ]
    alone = [Prompt([50], sampling={"max_tokens": 4}, tandem={"enabled": False}, request_id="a")]
    halves = [rollout_pb2.SubmitPrompts(prompts=[prompt.message()]) for prompt in together[:2]]
    halves[0].more_follow = True
    score = requests.score([([3, 4, 5, 6], 1), ([7, 8], 1)], True, True, 0.7)
    cancel = rollout_pb2.CancelPrompts(request_ids=["prompt-1", "unknown"])
    submitted = requests.submit(together[:3])
    return [
        _call(ROLLOUT, "GetServerInfo", [rollout_pb2.GetServerInfoRequest()]),
        _call(ROLLOUT, "Generate", requests.submit(together)),
        _call(ROLLOUT, "Generate by the senior alone", requests.submit(alone)),
        _call(
            ROLLOUT,
            "Generate in two messages",
            [rollout_pb2.GenerateRequest(submit=half) for half in halves],
        ),
        _call(
            ROLLOUT,
            "Generate and cancel",
            [*submitted, rollout_pb2.GenerateRequest(cancel=cancel)],
        ),
        _call(ROLLOUT, "Score", [score]),
        _call(ROLLOUT, "Pause", [rollout_pb2.PauseRequest()]),
        _call(ROLLOUT, "Resume", [rollout_pb2.ResumeRequest()]),
    ]


def _weight_calls(servers: Servers) -> list[ValidCall]:
    sent = _record_publication(servers)
    begin = _call(WEIGHTS, "BeginUpdate", [sent.begin])
    upload = _call(WEIGHTS, "UploadWeights", sent.chunks, [begin])
    commit = weights_pb2.CommitUpdateRequest(update_id=sent.begin.update_id)
    abort = weights_pb2.AbortUpdateRequest(update_id=sent.begin.update_id)
    return [
        begin,
        upload,
        _call(WEIGHTS, "CommitUpdate", [commit], [begin, upload]),
        _call(WEIGHTS, "AbortUpdate", [abort], [begin]),
        _call(WEIGHTS, "GetVersion", [weights_pb2.GetVersionRequest()]),
    ]


def _trainer_calls(servers: Servers) -> list[ValidCall]:
    groups = servers.rollout.generate(
        [
            Prompt(
                [20 + index, 30],
                seed=index,
                num_samples=2,
                sampling={"max_tokens": 8, "top_p": 0.9},
                tandem=TANDEM["word"],
                return_other_logprobs=True,
            )
            for index in range(2)
        ]
    )
    written = [
        (f"group-{group}", index + 0.5, trajectory)
        for group, trajectories in enumerate(groups)
        for index, trajectory in enumerate(trajectories)
    ]
    # The trainer refuses numbers that the objective does not use.
    rewarded = [PolicySample(trajectory, group, reward) for group, reward, trajectory in written]
    with_advantages = [
        replace(sample, reward=None, advantages=[0.5] * len(harness.tokens(sample.trajectory)))
        for sample in rewarded
    ]
    with_logprobs = [
        replace(sample, old_logprobs=harness.logprobs(sample.trajectory, "author").tolist())
        for sample in rewarded
    ]
    taught = [
        replace(sample, teacher=_teacher(len(harness.tokens(sample.trajectory))))
        for sample in rewarded
    ]
    objectives: dict[str, tuple[list[PolicySample], dict[str, Any]]] = {
        "with given advantages": (with_advantages, {
            "loss_kind": "ppo_clip", "junior_token_loss_weight": 0.5, "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3, "dual_clip": 3.0, "old_logprobs": "recomputed",
            "advantage_estimator": "provided", "aggregation": "seq_mean_token_sum_norm",
            "normalizer": "all_tokens", "norm_constant": 10.0, "kl_coefficient": 0.01,
            "kl_estimator": "k3", "entropy_coefficient": 0.01, "importance_sampling_cap": 2.0,
            "importance_sampling_floor": 0.5, "importance_sampling_level": "sequence",
            "importance_sampling_mode": "mask", "k3_cap": 10.0, "kl_importance_correction": True,
            "off_policy_mask_threshold": 0.5,
            "max_staleness": 1, "stale_samples": "drop", "mask_truncated_completions": False,
        }),
        "with given log-probabilities": (
            with_logprobs, {"old_logprobs": "provided", "whiten_advantages": True},
        ),
        "with a teacher": (taught, {
            "distillation": {
                "coefficient": 0.5, "kind": "jensen_shannon", "beta": 0.3, "top_k": 3,
                "temperature": 2.0,
            },
        }),
        "with GAE": (rewarded, {
            "advantage_estimator": "gae", "gae_gamma": 0.99, "gae_lambda": 0.95,
            "bootstrap_truncated": True, "gae_skip_junior_tokens": True,
        }),
    }  # fmt: skip
    step = {"run_id": "run", "step": 1, "expected_version": 0}
    policies = {
        name: requests.train_step(samples, objective=objective, request_id=name, **step)
        for name, (samples, objective) in objectives.items()
    }
    supervised = requests.train_step(
        SEQUENCES, objective={"aggregation": "token_mean"}, request_id="supervised", **step
    )
    weighted = requests.train_step(
        [replace(one, weights=[1.5 - t for t, _ in enumerate(one.response_token_ids)])
         for one in SEQUENCES],
        objective={"aggregation": "token_sum"},
        optimizer={
            "learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-12,
            "weight_decay": 0.1, "max_grad_norm": 1.0,
        },
        request_id="weighted",
        **step,
    )  # fmt: skip
    taught_rows = requests.train_step(
        [replace(one, teacher=_teacher(len(one.response_token_ids))) for one in SEQUENCES],
        objective={
            "distillation": {"coefficient": 1.0, "top_k": 3}, "cross_entropy_coefficient": 0.0,
        },
        request_id="taught",
        **step,
    )  # fmt: skip
    header = policies["with given advantages"][0].header
    objective = trainer_pb2.CheckObjectiveRequest(policy=header.policy)
    target = servers.cluster.rollouts[0].address
    base = str(servers.base / "trainer")
    return [
        _call(TRAINER, "GetServerInfo", [trainer_pb2.GetServerInfoRequest()]),
        *(_call(TRAINER, f"TrainStep {name}", step) for name, step in policies.items()),
        _call(TRAINER, "TrainStep supervised", supervised),
        _call(TRAINER, "TrainStep weighted", weighted),
        _call(TRAINER, "TrainStep taught", taught_rows),
        _call(TRAINER, "ComputeLogProbs", requests.log_prob_requests(SEQUENCES, 0.7)),
        _call(
            TRAINER,
            "ComputeLogProbs of the reference",
            requests.log_prob_requests(SEQUENCES, None, reference=True),
        ),
        _call(
            TRAINER,
            "PublishWeights",
            [trainer_pb2.PublishWeightsRequest(targets=[target], allow_rollback=True)],
        ),
        _call(
            TRAINER,
            "SaveCheckpoint",
            [trainer_pb2.SaveCheckpointRequest(directory="saved", name="trainer", keep=2)],
        ),
        _call(TRAINER, "LoadCheckpoint", [trainer_pb2.LoadCheckpointRequest(path=base)]),
        _call(
            TRAINER,
            "LoadCheckpoint of the base model",
            [trainer_pb2.LoadCheckpointRequest(base_model=True)],
        ),
        _call(TRAINER, "ExportModel", [trainer_pb2.ExportModelRequest(path="exported")]),
        _call(TRAINER, "CheckObjective", [objective]),
        _call(TRAINER, "WatchSteps", [trainer_pb2.WatchStepsRequest()]),
    ]


def _teacher(length: int) -> TeacherTokens:
    """A teacher's distributions over `length` tokens: three tokens at each place."""
    return TeacherTokens("large", [[5, 9, 7]] * length, [[-1.0, -2.0, -3.0]] * length)


def _critic_calls(servers: Servers) -> list[ValidCall]:
    sequences = list(requests.value_requests(SEQUENCES))
    values = servers.critic.compute_values(SEQUENCES)
    for_step = [critic_pb2.ComputeValuesRequest() for _ in sequences]
    identity = critic_pb2.StepIdentity(run_id="run", request_id="once")
    for message, sequence in zip(for_step, sequences, strict=True):
        message.CopyFrom(sequence)
        message.step.CopyFrom(identity)
    header = critic_pb2.TrainStepHeader(
        run_id="run", step=1, request_id="once", num_samples=len(values), value_clip=0.2
    )
    steps = [critic_pb2.TrainStepRequest(header=header)]
    for sequence, reply in zip(SEQUENCES, values, strict=True):
        sample = critic_pb2.ValueSample(
            prompt_token_ids=sequence.prompt_token_ids,
            response_token_ids=sequence.response_token_ids,
            old_values=reply.values,
            returns=to_tensor(from_tensor(reply.values) + 0.5),
            loss_mask=b"\1" * len(sequence.response_token_ids),
        )
        steps.append(critic_pb2.TrainStepRequest(sample=sample))
    weighted = requests.value_step(
        [
            requests.ValueSample(
                one.prompt_token_ids,
                one.response_token_ids,
                [*(0.0 for _ in one.response_token_ids), (-0.25, 0.5)[place % 2]],
            )
            for place, one in enumerate(SEQUENCES)
        ],
        run_id="run",
        step=1,
        expected_version=0,
        request_id="weighted",
    )
    return [
        _call(CRITIC, "GetServerInfo", [critic_pb2.GetServerInfoRequest()]),
        _call(CRITIC, "ComputeValues", sequences),
        _call(CRITIC, "ComputeValues for a step", for_step),
        _call(CRITIC, "TrainStep", steps),
        _call(CRITIC, "TrainStep weighted", weighted),
        _call(
            CRITIC,
            "SaveCheckpoint",
            [critic_pb2.SaveCheckpointRequest(directory="saved", name="critic", keep=2)],
        ),
        _call(
            CRITIC,
            "LoadCheckpoint",
            [critic_pb2.LoadCheckpointRequest(path=str(servers.base / "critic"))],
        ),
        _call(
            CRITIC,
            "LoadCheckpoint of the base model",
            [critic_pb2.LoadCheckpointRequest(base_model=True)],
        ),
        _call(CRITIC, "ExportModel", [critic_pb2.ExportModelRequest(path="exported-critic")]),
    ]


class _Recorder(weights_pb2_grpc.WeightServiceServicer):
    """A receiver of weights that keeps the messages of an update."""

    begin: weights_pb2.BeginUpdateRequest
    chunks: list[weights_pb2.UploadWeightsRequest]

    def BeginUpdate(self, request: Any, _: Any) -> weights_pb2.BeginUpdateResponse:  # noqa: N802
        self.begin = request
        return weights_pb2.BeginUpdateResponse()

    def UploadWeights(self, chunks: Any, _: Any) -> weights_pb2.UploadWeightsResponse:  # noqa: N802
        self.chunks = list(chunks)
        return weights_pb2.UploadWeightsResponse(next_chunk=len(self.chunks))

    def GetVersion(self, request: Any, _: Any) -> weights_pb2.GetVersionResponse:  # noqa: N802
        return weights_pb2.GetVersionResponse()

    def CommitUpdate(self, request: Any, _: Any) -> weights_pb2.CommitUpdateResponse:  # noqa: N802
        manifest = self.begin.manifest
        weights = server_pb2.WeightsVersion(version=manifest.version, digest=manifest.digest)
        return weights_pb2.CommitUpdateResponse(weights=weights)


def _record_publication(servers: Servers) -> _Recorder:
    """A whole update as the trainer sends it, of the served weights and the next version."""
    recorder = _Recorder()
    receiver = grpc.server(futures.ThreadPoolExecutor(2))
    weights_pb2_grpc.add_WeightServiceServicer_to_server(recorder, receiver)
    port = receiver.add_insecure_port("127.0.0.1:0")
    receiver.start()
    try:
        reply = servers.trainer.publish_weights([f"127.0.0.1:{port}"])
    finally:
        receiver.stop(None)
    assert not reply.results[0].status.code, reply
    recorder.begin.manifest.version += 1
    recorder.begin.allow_rollback = True
    return recorder
