"""The methods of the three servers, once for the synchronous and the asyncio clients.

Each is a coroutine over a Transport; tandem.rpc.client and tandem.rpc.aio make clients of them.
Replies are the messages of the contract, failures the exceptions of tandem.errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tandem._proto.blobs.v1 import blobs_pb2_grpc
from tandem._proto.critic.v1 import critic_pb2, critic_pb2_grpc
from tandem._proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem._proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem._proto.trainer.v1.objective_pb2 import PolicyObjective
from tandem._proto.types.v1 import optimizer_pb2, server_pb2, trajectory_pb2, vision_pb2
from tandem._proto.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem.rpc import delivery, requests
from tandem.rpc.requests import PolicySample, Prompt, SupervisedSample, ValueSample
from tandem.rpc.transport import Transport
from tandem.rpc.wire import to_message
from tandem.utils.number_formats import data_type

Event = rollout_pb2.GenerateResponse


def _images_of_prompts(
    messages: Iterable[rollout_pb2.GenerateRequest],
) -> Iterator[vision_pb2.VisionInput]:
    return (
        image
        for message in messages
        for prompt in message.submit.prompts
        for image in prompt.vision_inputs
    )


def _images_of_samples(
    messages: Iterable[trainer_pb2.TrainStepRequest],
) -> Iterator[vision_pb2.VisionInput]:
    for message in messages:
        yield from message.policy_sample.trajectory.vision_inputs
        yield from message.supervised_sample.vision_inputs


class RolloutCalls(Transport):
    """Samples from senior and junior."""

    role = "rollout"
    default_address = "127.0.0.1:7701"
    stubs = (
        rollout_pb2_grpc.RolloutServiceStub,
        weights_pb2_grpc.WeightServiceStub,
        blobs_pb2_grpc.BlobServiceStub,
    )
    streaming = frozenset({"Generate"})

    async def info(self) -> rollout_pb2.GetServerInfoResponse:
        """Returns the server's configuration, model and weights."""
        request = rollout_pb2.GetServerInfoRequest()
        return await self._call("GetServerInfo", request)

    def stream(
        self,
        messages: Iterable[rollout_pb2.GenerateRequest]
        | AsyncIterable[rollout_pb2.GenerateRequest],
        timeout_seconds: float | None = None,
    ) -> Any:
        """Starts a raw Generate call: it reads messages and returns the stream of events.

        Closing the stream, or dropping the last reference to it, cancels the call. An asyncio
        client also takes an asynchronous iterable of messages, which it reads while the call is
        open.
        """
        if isinstance(messages, Iterable):
            messages = iter(messages)
        return self._stream("Generate", messages, timeout_seconds)

    async def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns all samples of all prompts, in order; the server admits the prompts together.

        `on_event` is called with every event as it arrives. When the connection breaks, prompts
        that lack a sample are sent again, as the retry policy says; a sample is progress. It is a
        function of its seed and stays the same.
        """
        collector = requests.Collector(prompts, on_event)

        async def ask() -> None:
            messages = requests.submit(collector.missing())
            await self._with_images(
                _images_of_prompts(messages),
                lambda: self._each(self.stream(messages, timeout_seconds), collector.add),
            )
            collector.require_complete(self.address)

        if collector.missing():
            await self._retried(ask, lambda: collector.num_samples)
        return collector.results()

    async def upload_images(self, inputs: requests.VisionInputs) -> None:
        """Uploads the pixels that the server lacks, for calls that do not do so themselves.

        Those are stream() and open_stream().
        """
        if digests := sorted({one.digest for one in inputs}):
            await self._upload(digests)

    async def score(
        self,
        sequences: Iterable[requests.ToScore],
        *,
        senior: bool = True,
        junior: bool = False,
        temperature: float | None = None,
        num_top_logprobs: int = 0,
    ) -> rollout_pb2.ScoreResponse:
        """Returns the log-probabilities of (token ids, index of the first scored token).

        A sequence with images is a requests.ScoredTokens. With `num_top_logprobs` also as many of
        the likeliest tokens at each place, at most 128.
        """
        request = requests.score(sequences, senior, junior, temperature, num_top_logprobs)
        images = (image for one in request.sequences for image in one.vision_inputs)
        return await self._with_images(images, lambda: self._call("Score", request))

    async def pause(self) -> int:
        """Stops generation at the next step boundary; returns the number of held sequences."""
        request = rollout_pb2.PauseRequest()
        return (await self._call("Pause", request)).held_sequences

    async def resume(self) -> None:
        """Resumes generation after pause()."""
        request = rollout_pb2.ResumeRequest()
        await self._call("Resume", request)

    async def weights_version(self) -> server_pb2.WeightsVersion:
        """Returns version and digest of the weights that the server samples from."""
        request = weights_pb2.GetVersionRequest()
        return (await self._call("GetVersion", request)).weights


class CheckpointCalls(Transport):
    """Saves and loads what a server trains."""

    # The module with the server's messages.
    _messages: ClassVar[Any]

    async def save_checkpoint(
        self, directory: str, name: str, keep: int = 0, *, expected_version: int | None = None
    ) -> str:
        """Writes an atomic checkpoint; returns its path on the server's file system.

        A relative `directory` starts at the client's working directory. Raises
        FailedPreconditionError, with nothing written, if the server has another version than
        `expected_version`: the call is repeated when the server is lost, and a server that was
        restarted has its initial weights. Where start_checkpoint has begun it, this waits for its
        end, or raises what it failed with.
        """
        reply = await self._save(directory, name, keep, expected_version=expected_version)
        return reply.path

    async def start_checkpoint(
        self, directory: str, name: str, keep: int = 0, *, expected_version: int
    ) -> bool:
        """Begins an atomic checkpoint, which the server writes beside the calls that follow.

        Returns whether the checkpoint is still being written, then save_checkpoint with the same
        arguments waits for its end: before that there is no checkpoint. Errors as save_checkpoint.
        """
        reply = await self._save(
            directory, name, keep, expected_version=expected_version, in_background=True
        )
        return reply.pending

    async def _save(self, directory: str, name: str, keep: int, **fields: Any) -> Any:
        request = self._messages.SaveCheckpointRequest(
            directory=requests.server_path(directory), name=name, keep=keep, **fields
        )
        return await self._call("SaveCheckpoint", request)

    async def load_checkpoint(
        self, path: str, *, fresh_optimizer: bool = False
    ) -> server_pb2.WeightsVersion:
        """Loads a checkpoint and returns its weights.

        A relative path starts at the client's working directory. A run that continues
        needs the checkpoint's optimizer; with `fresh_optimizer` moments and learning-rate schedule
        start over, as for a new run from these weights.
        """
        request = self._messages.LoadCheckpointRequest(
            path=requests.server_path(path),
            optimizer=(
                optimizer_pb2.OPTIMIZER_STATE_FRESH
                if fresh_optimizer
                else optimizer_pb2.OPTIMIZER_STATE_KEEP
            ),
        )
        return (await self._call("LoadCheckpoint", request)).weights

    async def load_base_model(self) -> server_pb2.WeightsVersion:
        """Loads all weights of the start, version 0, with a new optimizer."""
        request = self._messages.LoadCheckpointRequest(base_model=True)
        return (await self._call("LoadCheckpoint", request)).weights


class TrainerCalls(CheckpointCalls):
    """Trains the senior."""

    role = "trainer"
    default_address = "127.0.0.1:7702"
    default_timeout_seconds = 3600.0
    stubs = (trainer_pb2_grpc.TrainerServiceStub, blobs_pb2_grpc.BlobServiceStub)
    streaming = frozenset({"ComputeLogProbs", "WatchSteps"})
    _messages = trainer_pb2

    async def info(self) -> trainer_pb2.GetServerInfoResponse:
        """Returns the server's configuration, model and weights."""
        request = trainer_pb2.GetServerInfoRequest()
        return await self._call("GetServerInfo", request)

    async def train_step(
        self,
        samples: Sequence[PolicySample] | Sequence[SupervisedSample],
        *,
        run_id: str,
        step: int,
        expected_version: int,
        objective: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
    ) -> trainer_pb2.TrainStepResponse:
        """Trains one step, which is applied exactly once however often it has to be sent.

        `objective` has the fields of PolicyObjective (of SupervisedObjective for supervised
        samples), enums by short name; `optimizer` those of OptimizerOverrides, in place of the
        server's numbers for this step alone.
        """
        messages = requests.train_step(
            samples,
            run_id=run_id,
            step=step,
            expected_version=expected_version,
            objective=objective or {},
            optimizer=optimizer,
            request_id=request_id,
        )
        return await self._with_images(
            _images_of_samples(messages),
            lambda: self._send("TrainStep", messages, timeout_seconds),
        )

    async def send_train_step(
        self,
        messages: Iterable[trainer_pb2.TrainStepRequest],
        timeout_seconds: float | None = None,
    ) -> trainer_pb2.TrainStepResponse:
        """Sends the messages of a raw TrainStep call."""
        return await self._send("TrainStep", messages, timeout_seconds)

    async def compute_log_probs(
        self,
        sequences: Iterable[SupervisedSample],
        temperature: float | None = None,
        *,
        reference: bool = False,
    ) -> list[trainer_pb2.ComputeLogProbsResponse]:
        """Returns log-probabilities and entropies of the responses under the current weights.

        With `reference` under the reference policy: the trainer's reference_model, or its model
        without adapters.
        """
        messages = list(requests.log_prob_requests(sequences, temperature, reference))
        return await self._with_images(
            (image for one in messages for image in one.vision_inputs),
            lambda: self._collect("ComputeLogProbs", messages),
        )

    async def publish(
        self, rollouts: Iterable[RolloutCalls], *, allow_rollback: bool = False
    ) -> server_pb2.WeightsVersion:
        """Sends the current weights to the servers of rollout clients; returns their version.

        Raises the error of a server that did not get them; the others have them then.
        `allow_rollback` is that of publish_weights().
        """
        # Methods of the classes, not of the objects: those of plain clients are not awaited.
        infos = [(one, await RolloutCalls.info(one)) for one in rollouts]
        targets = delivery.by_advertised_address(infos)
        reply = await TrainerCalls.publish_weights(
            self, list(targets), allow_rollback=allow_rollback
        )
        return delivery.delivered(reply)

    async def publish_weights(
        self, targets: Iterable[str], *, allow_rollback: bool = False
    ) -> trainer_pb2.PublishWeightsResponse:
        """Sends the current weights to receivers; every result has a status of its own.

        `allow_rollback` sends them also to receivers that hold the same version, or a newer one, of
        another run.
        """
        request = trainer_pb2.PublishWeightsRequest(targets=targets, allow_rollback=allow_rollback)
        return await self._call("PublishWeights", request)

    async def check_objective(self, objective: Mapping[str, Any]) -> PolicyObjective:
        """Returns the objective in force, with every field set; fails as train_step() would."""
        request = trainer_pb2.CheckObjectiveRequest()
        request.policy.SetInParent()
        to_message(objective, request.policy, "objective")
        return (await self._call("CheckObjective", request)).policy

    async def export_model(self, path: str, *, dtype: str = "fp32") -> str:
        """Writes the weights as a Hugging Face directory, which must not exist; returns its path.

        `dtype` is fp32, bf16 or fp16. A relative path starts at the client's working directory.
        """
        number_format = data_type(dtype, "dtype")
        place = requests.server_path(path)
        request = trainer_pb2.ExportModelRequest(path=place, dtype=number_format)
        return (await self._call("ExportModel", request)).path

    def watch_steps(self) -> Any:
        """Starts a stream of reports, one after every train step from now on."""
        request = trainer_pb2.WatchStepsRequest()
        return self._stream("WatchSteps", request)


class CriticCalls(CheckpointCalls):
    """Predicts returns with a value head."""

    role = "critic"
    default_address = "127.0.0.1:7703"
    default_timeout_seconds = 3600.0
    stubs = (critic_pb2_grpc.CriticServiceStub, blobs_pb2_grpc.BlobServiceStub)
    streaming = frozenset({"ComputeValues"})
    _messages = critic_pb2

    async def info(self) -> critic_pb2.GetServerInfoResponse:
        """Returns the server's configuration, model and weights."""
        request = critic_pb2.GetServerInfoRequest()
        return await self._call("GetServerInfo", request)

    async def compute_values(
        self, sequences: Iterable[SupervisedSample]
    ) -> list[critic_pb2.ComputeValuesResponse]:
        """Returns the values of the response tokens."""
        messages = list(requests.value_requests(sequences))
        return await self._with_images(
            (image for one in messages for image in one.vision_inputs),
            lambda: self._collect("ComputeValues", messages),
        )

    async def train_step(
        self,
        samples: Sequence[ValueSample],
        *,
        run_id: str,
        step: int,
        expected_version: int,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
    ) -> critic_pb2.TrainStepResponse:
        """Trains one step by derivatives, applied exactly once however often it has to be sent."""
        messages = requests.value_step(
            samples,
            run_id=run_id,
            step=step,
            expected_version=expected_version,
            request_id=request_id,
        )
        return await self._with_images(
            (image for one in messages for image in one.sample.vision_inputs),
            lambda: self._send("TrainStep", messages, timeout_seconds),
        )

    async def send_train_step(
        self, messages: Iterable[critic_pb2.TrainStepRequest], timeout_seconds: float | None = None
    ) -> critic_pb2.TrainStepResponse:
        """Sends the messages of a raw TrainStep call, which in a PPO run the trainer makes."""
        return await self._send("TrainStep", messages, timeout_seconds)

    async def export_model(self, path: str, *, dtype: str = "fp32") -> str:
        """Writes a Hugging Face token-classification directory as the trainer's export_model()."""
        number_format = data_type(dtype, "dtype")
        place = requests.server_path(path)
        request = critic_pb2.ExportModelRequest(path=place, dtype=number_format)
        return (await self._call("ExportModel", request)).path
