"""Synchronous clients of the three servers.

    with RolloutClient("127.0.0.1:7701") as rollout:
        [[trajectory]] = rollout.generate([Prompt(token_ids=[1, 2, 3])])

Every client is a context manager and may be shared by threads. A call carries a deadline and a
request id; what may pass by itself is tried again a bounded number of times with the same ids (see
transport.RetryPolicy). Failures are the exceptions of tandem.errors. Replies are the messages of
the contract.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from tandem import requests
from tandem.critic.v1 import critic_pb2, critic_pb2_grpc
from tandem.errors import RpcError
from tandem.requests import PolicySample, Prompt, SupervisedSample
from tandem.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem.transport import Connection, ResponseStream, RetryPolicy
from tandem.types.v1 import server_pb2, trajectory_pb2
from tandem.weights.v1 import weights_pb2, weights_pb2_grpc

Event = rollout_pb2.GenerateResponse


class RolloutClient(Connection):
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

    def info(self) -> rollout_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = rollout_pb2.GetServerInfoRequest()
        return self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    def stream(
        self, messages: Iterable[rollout_pb2.GenerateRequest], timeout_seconds: float | None = None
    ) -> ResponseStream[Event]:
        """The raw Generate call, which starts now: messages in, events out.

        Letting go of the events, or close(), cancels it.
        """
        return super().stream(
            "Generate", lambda o: self._stub.Generate(iter(messages), **o), timeout_seconds
        )

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """All samples of all prompts, in order; the prompts travel in one message.

        `on_event` sees every event as it arrives. When the connection breaks, the prompts that
        lack a sample are sent again; their samples come out the same, being a function of the seed.
        """
        collector = requests.Collector(prompts)
        attempt = 1
        while missing := collector.missing():
            try:
                for event in self.stream([requests.submit(missing)], timeout_seconds):
                    collector.add(event)
                    if on_event is not None:
                        on_event(event)
            except RpcError as error:
                wait = self.retry.wait_before(attempt, error)
                if wait is None:
                    raise
                time.sleep(wait)
            else:
                collector.require_complete(self.address)
            attempt += 1
        return collector.results()

    def open_stream(self, timeout_seconds: float | None = None) -> GenerateStream:
        """Starts a Generate call that stays open: submit and cancel at any time."""
        return GenerateStream(self, timeout_seconds)

    def score(
        self,
        sequences: Iterable[tuple[Sequence[int], int]],
        *,
        senior: bool = True,
        junior: bool = False,
        temperature: float | None = None,
    ) -> rollout_pb2.ScoreResponse:
        """Log-probabilities of (token ids, index of the first scored token)."""
        request = requests.score(sequences, senior, junior, temperature)
        return self.call("Score", lambda o: self._stub.Score(request, **o))

    def pause(self) -> int:
        """Stops at the next step boundary; returns the sequences that are held."""
        request = rollout_pb2.PauseRequest()
        return self.call("Pause", lambda o: self._stub.Pause(request, **o)).held_sequences

    def resume(self) -> None:
        """Goes on after pause()."""
        request = rollout_pb2.ResumeRequest()
        self.call("Resume", lambda o: self._stub.Resume(request, **o))

    def weights_version(self) -> server_pb2.WeightsVersion:
        """Version and digest of the weights being served."""
        request = weights_pb2.GetVersionRequest()
        return self.call("GetVersion", lambda o: self._weights.GetVersion(request, **o)).weights


class GenerateStream:
    """An open Generate call: iterate over its events while submitting and cancelling prompts.

    A context manager: leaving it cancels what is not finished. Letting go of it says that no more
    prompts come; letting go of its events too, that nobody waits for them: the call is cancelled.
    """

    def __init__(self, client: RolloutClient, timeout_seconds: float | None) -> None:
        # The call reads from the queue until None, and knows nothing of the stream.
        self._outgoing: SimpleQueue[rollout_pb2.GenerateRequest | None] = SimpleQueue()
        self._events = client.stream(iter(self._outgoing.get, None), timeout_seconds)

    def submit(self, prompts: Iterable[Prompt]) -> None:
        """Sends prompts; each needs its own request_id."""
        self._outgoing.put(requests.submit(prompts))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Gives prompts up."""
        cancel = rollout_pb2.CancelPrompts(request_ids=request_ids)
        self._outgoing.put(rollout_pb2.GenerateRequest(cancel=cancel))

    def half_close(self) -> None:
        """No more prompts come; the events end when every response is done."""
        self._outgoing.put(None)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __enter__(self) -> GenerateStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.half_close()
        self._events.close()

    def __del__(self) -> None:
        self.half_close()


class TrainerClient(Connection):
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

    def info(self) -> trainer_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = trainer_pb2.GetServerInfoRequest()
        return self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    def train_step(
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
        """One optimizer update, applied exactly once however often it has to be sent.

        `objective` has the fields of PolicyObjective (of SupervisedObjective for supervised
        samples), enums by short name.
        """
        messages = requests.train_step(
            samples,
            run_id=run_id,
            step=step,
            expected_version=expected_version,
            objective=objective or {},
            request_id=request_id,
        )
        return self.send_train_step(messages, timeout_seconds)

    def send_train_step(
        self,
        messages: Iterable[trainer_pb2.TrainStepRequest],
        timeout_seconds: float | None = None,
    ) -> trainer_pb2.TrainStepResponse:
        """The raw TrainStep call."""
        messages = list(messages)
        return self.call(
            "TrainStep", lambda o: self._stub.TrainStep(iter(messages), **o), timeout_seconds
        )

    def compute_log_probs(
        self, sequences: Iterable[SupervisedSample], temperature: float | None = None
    ) -> list[trainer_pb2.ComputeLogProbsResponse]:
        """Log-probabilities and entropies of the responses under the current weights."""
        messages = requests.log_prob_requests(sequences, temperature)
        return list(
            self.stream("ComputeLogProbs", lambda o: self._stub.ComputeLogProbs(messages, **o))
        )

    def publish_weights(self, targets: Iterable[str]) -> trainer_pb2.PublishWeightsResponse:
        """Sends the current weights to receivers; look at each result's status."""
        request = trainer_pb2.PublishWeightsRequest(targets=targets)
        return self.call("PublishWeights", lambda o: self._stub.PublishWeights(request, **o))

    def save_checkpoint(self, directory: str, name: str, keep: int = 0) -> str:
        """Writes an atomic checkpoint; returns its path on the server's file system."""
        request = trainer_pb2.SaveCheckpointRequest(directory=directory, name=name, keep=keep)
        return self.call("SaveCheckpoint", lambda o: self._stub.SaveCheckpoint(request, **o)).path

    def load_checkpoint(self, path: str) -> int:
        """Goes back to a checkpoint; returns its version."""
        request = trainer_pb2.LoadCheckpointRequest(path=path)
        reply = self.call("LoadCheckpoint", lambda o: self._stub.LoadCheckpoint(request, **o))
        return reply.weights.version

    def export_model(self, path: str, *, bfloat16: bool = False) -> str:
        """Writes the weights as a Hugging Face directory that must not exist yet."""
        dtype = requests.export_dtype(bfloat16)
        request = trainer_pb2.ExportModelRequest(path=path, dtype=dtype)
        return self.call("ExportModel", lambda o: self._stub.ExportModel(request, **o)).path

    def watch_steps(self) -> ResponseStream[trainer_pb2.WatchStepsResponse]:
        """A report after every train step from now on, until the loop is left."""
        request = trainer_pb2.WatchStepsRequest()
        return self.stream("WatchSteps", lambda o: self._stub.WatchSteps(request, **o))


class CriticClient(Connection):
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

    def info(self) -> critic_pb2.GetServerInfoResponse:
        """What the server is and holds."""
        request = critic_pb2.GetServerInfoRequest()
        return self.call("GetServerInfo", lambda o: self._stub.GetServerInfo(request, **o))

    def compute_values(
        self, sequences: Iterable[SupervisedSample]
    ) -> list[critic_pb2.ComputeValuesResponse]:
        """Values of the response tokens."""
        messages = requests.value_requests(sequences)
        return list(self.stream("ComputeValues", lambda o: self._stub.ComputeValues(messages, **o)))

    def send_train_step(
        self, messages: Iterable[critic_pb2.TrainStepRequest], timeout_seconds: float | None = None
    ) -> critic_pb2.TrainStepResponse:
        """The raw TrainStep call. In a PPO run the trainer makes it."""
        messages = list(messages)
        return self.call(
            "TrainStep", lambda o: self._stub.TrainStep(iter(messages), **o), timeout_seconds
        )

    def save_checkpoint(self, directory: str, name: str, keep: int = 0) -> str:
        """Writes an atomic checkpoint; returns its path on the server's file system."""
        request = critic_pb2.SaveCheckpointRequest(directory=directory, name=name, keep=keep)
        return self.call("SaveCheckpoint", lambda o: self._stub.SaveCheckpoint(request, **o)).path

    def load_checkpoint(self, path: str) -> int:
        """Goes back to a checkpoint; returns its version."""
        request = critic_pb2.LoadCheckpointRequest(path=path)
        reply = self.call("LoadCheckpoint", lambda o: self._stub.LoadCheckpoint(request, **o))
        return reply.weights.version

    def export_model(self, path: str, *, bfloat16: bool = False) -> str:
        """Writes a Hugging Face token-classification directory that must not exist yet."""
        dtype = requests.export_dtype(bfloat16)
        request = critic_pb2.ExportModelRequest(path=path, dtype=dtype)
        return self.call("ExportModel", lambda o: self._stub.ExportModel(request, **o)).path
