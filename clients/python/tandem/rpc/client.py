"""Synchronous clients of the three servers.

    with RolloutClient("127.0.0.1:7701") as rollout:
        [[trajectory]] = rollout.generate([Prompt(token_ids=[1, 2, 3])])

Every client is a context manager and may be shared by threads. A call carries a deadline and a
request id. A call whose error may pass by itself is tried again, a bounded number of times with the
same ids (see retry.RetryPolicy). Failures are the exceptions of tandem.errors. Replies are the
messages of the contract. The methods are described in tandem.rpc.calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue

from tandem._proto.rollout.v1 import rollout_pb2
from tandem.errors import RpcError
from tandem.rpc import requests
from tandem.rpc.calls import CriticCalls, Event, RolloutCalls, TrainerCalls
from tandem.rpc.generate_events import PromptFailed, SampleFinished, read_event
from tandem.rpc.requests import Prompt
from tandem.rpc.transport import Connection, blocking

# Seconds in which a server may end a call whose prompts are all finished.
_END_SECONDS = 5.0


class RolloutClient(Connection, RolloutCalls):
    """Samples from senior and junior; stream() returns a ResponseStream."""

    info = blocking(RolloutCalls.info)
    generate = blocking(RolloutCalls.generate)
    upload_images = blocking(RolloutCalls.upload_images)
    score = blocking(RolloutCalls.score)
    pause = blocking(RolloutCalls.pause)
    resume = blocking(RolloutCalls.resume)
    weights_version = blocking(RolloutCalls.weights_version)

    def open_stream(self, timeout_seconds: float | None = None) -> GenerateStream:
        """Starts a Generate call that stays open: submit and cancel at any time."""
        return GenerateStream(self, timeout_seconds)


class GenerateStream:
    """An open Generate call: iterate over its events while submitting and cancelling prompts.

    A context manager: leaving it ends the call, and cancels prompts that are not finished. Dropping
    the last reference to the stream ends the requests; dropping that to its events, too, cancels
    the call.
    """

    def __init__(self, client: RolloutClient, timeout_seconds: float | None) -> None:
        # The call reads from the queue until None, and knows nothing of the stream.
        self._outgoing: SimpleQueue[rollout_pb2.GenerateRequest | None] = SimpleQueue()
        self._call = client.stream(iter(self._outgoing.get, None), timeout_seconds)
        # Samples that are not finished, by request_id.
        self._left: dict[str, int] = {}
        self._events = _counted(self._call, self._left)

    def submit(self, prompts: Iterable[Prompt]) -> None:
        """Sends prompts, which are admitted together; each needs its own request_id.

        Their images must have been uploaded (RolloutClient.upload_images).
        """
        prompts = list(prompts)
        self._left |= {prompt.request_id: max(1, prompt.num_samples) for prompt in prompts}
        for message in requests.submit(prompts):
            self._outgoing.put(message)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancels prompts."""
        cancel = rollout_pb2.CancelPrompts(request_ids=request_ids)
        self._outgoing.put(rollout_pb2.GenerateRequest(cancel=cancel))

    def half_close(self) -> None:
        """Ends the requests: the events end when every response is done."""
        self._outgoing.put(None)

    def close(self) -> None:
        """Ends the call, and cancels prompts that are not finished."""
        self.half_close()
        if not self._left:
            # The server ends the call, as nothing is left to do: it need not be cancelled.
            late = threading.Timer(_END_SECONDS, self._call.close)
            late.daemon = True
            late.start()
            with suppress(RpcError):
                for _ in self._call:
                    pass
            late.cancel()
        self._call.close()

    def abandon(self) -> None:
        """Cancels the call, whatever it has to tell. For another thread than the reader's."""
        self.half_close()
        self._call.close()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __enter__(self) -> GenerateStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.half_close()


def _counted(events: Iterator[Event], left: dict[str, int]) -> Iterator[Event]:
    """Yields the events, and takes samples that are finished or have failed out of `left`."""
    for event in events:
        told = read_event(event)
        if isinstance(told, SampleFinished | PromptFailed):
            name = told.request_id
            left[name] = left.get(name, 1) - 1
            if isinstance(told, PromptFailed) or left[name] <= 0:
                del left[name]
        yield event


class TrainerClient(Connection, TrainerCalls):
    """Trains the senior; watch_steps() returns a ResponseStream."""

    info = blocking(TrainerCalls.info)
    train_step = blocking(TrainerCalls.train_step)
    send_train_step = blocking(TrainerCalls.send_train_step)
    compute_log_probs = blocking(TrainerCalls.compute_log_probs)
    publish = blocking(TrainerCalls.publish)
    publish_weights = blocking(TrainerCalls.publish_weights)
    check_objective = blocking(TrainerCalls.check_objective)
    save_checkpoint = blocking(TrainerCalls.save_checkpoint)
    start_checkpoint = blocking(TrainerCalls.start_checkpoint)
    load_checkpoint = blocking(TrainerCalls.load_checkpoint)
    load_base_model = blocking(TrainerCalls.load_base_model)
    export_model = blocking(TrainerCalls.export_model)


class CriticClient(Connection, CriticCalls):
    """Predicts returns with a value head."""

    info = blocking(CriticCalls.info)
    compute_values = blocking(CriticCalls.compute_values)
    train_step = blocking(CriticCalls.train_step)
    send_train_step = blocking(CriticCalls.send_train_step)
    save_checkpoint = blocking(CriticCalls.save_checkpoint)
    start_checkpoint = blocking(CriticCalls.start_checkpoint)
    load_checkpoint = blocking(CriticCalls.load_checkpoint)
    load_base_model = blocking(CriticCalls.load_base_model)
    export_model = blocking(CriticCalls.export_model)
