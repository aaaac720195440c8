"""Asyncio twins of tandem.client: the same methods, retries and exceptions.

What returns a reply is awaited; stream() and watch_steps() start their call at once and return
events for `async for`. Only open_stream() has no twin: stream() takes an asynchronous iterator of
messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from typing import Any

from tandem import requests
from tandem.client import Event
from tandem.critic.v1 import critic_pb2, critic_pb2_grpc
from tandem.errors import RpcError
from tandem.requests import PolicySample, Prompt, SupervisedSample
from tandem.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem.transport import AsyncConnection, AsyncResponseStream, RetryPolicy
from tandem.types.v1 import server_pb2, trajectory_pb2
from tandem.weights.v1 import weights_pb2, weights_pb2_grpc


class AsyncRolloutClient(AsyncConnection):
    """Samples from senior and junior."""

    role = "rollout"

    def __init__(
        self,
        address: str = "127.0.0.1:7701",
        *,
        timeout_seconds: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds, retry=retry)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(self.channel)

    async def info(self) -> rollout_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = rollout_pb2.GetServerInfoRequest()
        return await self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    def stream(
        self,
        messages: Iterable[rollout_pb2.GenerateRequest]
        | AsyncIterable[rollout_pb2.GenerateRequest],
        timeout_seconds: float | None = None,
    ) -> AsyncResponseStream[Event]:
        """The raw Generate call, which starts now: messages in, events out.

        Letting go of the events, or aclose(), cancels it.
        """
        return super().stream(
            "Generate", lambda o: self._stub.Generate(messages, **o), timeout_seconds
        )

    async def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """All samples of all prompts, in order; see RolloutClient.generate."""
        collector = requests.Collector(prompts)
        attempt = 1
        while missing := collector.missing():
            try:
                async for event in self.stream([requests.submit(missing)], timeout_seconds):
                    collector.add(event)
                    if on_event is not None:
                        on_event(event)
            except RpcError as error:
                wait = self.retry.wait_before(attempt, error)
                if wait is None:
                    raise
                await asyncio.sleep(wait)
            else:
                collector.require_complete(self.address)
            attempt += 1
        return collector.results()

    async def score(
        self,
        sequences: Iterable[tuple[Sequence[int], int]],
        *,
        senior: bool = True,
        junior: bool = False,
        temperature: float | None = None,
    ) -> rollout_pb2.ScoreResponse:
        """Log-probabilities of (token ids, index of the first scored token)."""
        request = requests.score(sequences, senior, junior, temperature)
        return await self.call("Score", lambda o: self._stub.Score(request, **o))

    async def pause(self) -> int:
        """Stops at the next step boundary; returns the sequences that are held."""
        request = rollout_pb2.PauseRequest()
        return (await self.call("Pause", lambda o: self._stub.Pause(request, **o))).held_sequences

    async def resume(self) -> None:
        """Goes on after pause()."""
        request = rollout_pb2.ResumeRequest()
        await self.call("Resume", lambda o: self._stub.Resume(request, **o))

    async def weights_version(self) -> server_pb2.WeightsVersion:
        """Version and digest of the weights being served."""
        request = weights_pb2.GetVersionRequest()
        reply = await self.call("GetVersion", lambda o: self._weights.GetVersion(request, **o))
        return reply.weights


class AsyncTrainerClient(AsyncConnection):
    """Trains the senior."""

    role = "trainer"

    def __init__(
        self,
        address: str = "127.0.0.1:7702",
        *,
        timeout_seconds: float = 3600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds, retry=retry)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    async def info(self) -> trainer_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = trainer_pb2.GetServerInfoRequest()
        return await self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    async def train_step(
        self,
        samples: Sequence[PolicySample] | Sequence[SupervisedSample],
        *,
        run_id: str,
        step: int,
        expected_version: int,
        objective: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
    ) -> trainer_pb2.TrainStepResponse:
        """One optimizer update, applied exactly once; see TrainerClient.train_step."""
        messages = requests.train_step(
            samples,
            run_id=run_id,
            step=step,
            expected_version=expected_version,
            objective=objective or {},
            request_id=request_id,
        )
        return await self.send_train_step(messages, timeout_seconds)

    async def send_train_step(
        self,
        messages: Iterable[trainer_pb2.TrainStepRequest],
        timeout_seconds: float | None = None,
    ) -> trainer_pb2.TrainStepResponse:
        """The raw TrainStep call."""
        messages = list(messages)
        return await self.call(
            "TrainStep", lambda o: self._stub.TrainStep(iter(messages), **o), timeout_seconds
        )

    async def compute_log_probs(
        self, sequences: Iterable[SupervisedSample], temperature: float | None = None
    ) -> list[trainer_pb2.ComputeLogProbsResponse]:
        """Log-probabilities and entropies of the responses under the current weights."""
        messages = requests.log_prob_requests(sequences, temperature)
        replies = self.stream(
            "ComputeLogProbs", lambda o: self._stub.ComputeLogProbs(messages, **o)
        )
        return [reply async for reply in replies]

    async def publish_weights(self, targets: Iterable[str]) -> trainer_pb2.PublishWeightsResponse:
        """Sends the current weights to receivers; look at each result's status."""
        request = trainer_pb2.PublishWeightsRequest(targets=targets)
        return await self.call("PublishWeights", lambda o: self._stub.PublishWeights(request, **o))

    async def save_checkpoint(self, directory: str, name: str, keep: int = 0) -> str:
        """Writes an atomic checkpoint; returns its path on the server's file system."""
        request = trainer_pb2.SaveCheckpointRequest(directory=directory, name=name, keep=keep)
        reply = await self.call("SaveCheckpoint", lambda o: self._stub.SaveCheckpoint(request, **o))
        return reply.path

    async def load_checkpoint(self, path: str) -> int:
        """Goes back to a checkpoint; returns its version."""
        request = trainer_pb2.LoadCheckpointRequest(path=path)
        reply = await self.call("LoadCheckpoint", lambda o: self._stub.LoadCheckpoint(request, **o))
        return reply.weights.version

    async def export_model(self, path: str, *, bfloat16: bool = False) -> str:
        """Writes the weights as a Hugging Face directory that must not exist yet."""
        dtype = requests.export_dtype(bfloat16)
        request = trainer_pb2.ExportModelRequest(path=path, dtype=dtype)
        return (await self.call("ExportModel", lambda o: self._stub.ExportModel(request, **o))).path

    def watch_steps(self) -> AsyncResponseStream[trainer_pb2.WatchStepsResponse]:
        """A report after every train step from now on, until the loop is left."""
        request = trainer_pb2.WatchStepsRequest()
        return self.stream("WatchSteps", lambda o: self._stub.WatchSteps(request, **o))


class AsyncCriticClient(AsyncConnection):
    """Predicts returns with a value head."""

    role = "critic"

    def __init__(
        self,
        address: str = "127.0.0.1:7703",
        *,
        timeout_seconds: float = 3600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds, retry=retry)
        self._stub = critic_pb2_grpc.CriticServiceStub(self.channel)

    async def info(self) -> critic_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = critic_pb2.GetServerInfoRequest()
        return await self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    async def compute_values(
        self, sequences: Iterable[SupervisedSample]
    ) -> list[critic_pb2.ComputeValuesResponse]:
        """Values of the response tokens."""
        messages = requests.value_requests(sequences)
        replies = self.stream("ComputeValues", lambda o: self._stub.ComputeValues(messages, **o))
        return [reply async for reply in replies]

    async def send_train_step(
        self, messages: Iterable[critic_pb2.TrainStepRequest], timeout_seconds: float | None = None
    ) -> critic_pb2.TrainStepResponse:
        """The raw TrainStep call. In a PPO run the trainer makes it."""
        messages = list(messages)
        return await self.call(
            "TrainStep", lambda o: self._stub.TrainStep(iter(messages), **o), timeout_seconds
        )

    async def save_checkpoint(self, directory: str, name: str, keep: int = 0) -> str:
        """Writes an atomic checkpoint; returns its path on the server's file system."""
        request = critic_pb2.SaveCheckpointRequest(directory=directory, name=name, keep=keep)
        reply = await self.call("SaveCheckpoint", lambda o: self._stub.SaveCheckpoint(request, **o))
        return reply.path

    async def load_checkpoint(self, path: str) -> int:
        """Goes back to a checkpoint; returns its version."""
        request = critic_pb2.LoadCheckpointRequest(path=path)
        reply = await self.call("LoadCheckpoint", lambda o: self._stub.LoadCheckpoint(request, **o))
        return reply.weights.version

    async def export_model(self, path: str, *, bfloat16: bool = False) -> str:
        """Writes a Hugging Face token-classification directory that must not exist yet."""
        dtype = requests.export_dtype(bfloat16)
        request = critic_pb2.ExportModelRequest(path=path, dtype=dtype)
        return (await self.call("ExportModel", lambda o: self._stub.ExportModel(request, **o))).path
