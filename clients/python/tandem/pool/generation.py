"""The samples of prompts, drawn by the replicas of a pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import DeadlineError, RpcError
from tandem.pool.replicas import Replica
from tandem.pool.request import Admit, PoolRequest, PoolState
from tandem.rpc.client import GenerateStream
from tandem.rpc.generate_events import PromptFailed, SampleFinished, read_event
from tandem.rpc.requests import Prompt
from tandem.utils.progress import Progress


@dataclass
class _Stream:
    """An open Generate call.

    Attributes:
        call: the call.
        items: the item of each request_id that is not finished.
        half_closed: whether nothing more is sent.
        answered: whether it finished a prompt.
    """

    call: GenerateStream
    items: dict[str, int] = field(default_factory=dict)
    half_closed: bool = False
    answered: bool = False


def _limits(replicas: Sequence[Replica]) -> list[tuple[int, int]]:
    """Returns capacity and window of each replica; see Shares.

    A single replica gets batches of all that its queue holds: no other one could take over what
    waits, and what runs at the same time does then not depend on the clock.
    """
    if len(replicas) == 1:
        return [(replicas[0].capacity, replicas[0].max_queue)]
    return [(replica.capacity, replica.window) for replica in replicas]


class PoolGeneration(PoolRequest[Prompt, list[trajectory_pb2.Trajectory]]):
    """A request for the samples of prompts, each with its own request_id.

    Prompts that begin alike are dealt out side by side, so that most of them meet on one replica.
    """

    def __init__(
        self,
        state: PoolState,
        prompts: Sequence[Prompt],
        admit: Admit,
        progress: Progress,
        on_answer: Callable[[int, list[trajectory_pb2.Trajectory]], None] | None = None,
    ) -> None:
        """`on_answer` is called with the number of a prompt and its samples, with the lock."""
        super().__init__(
            state,
            prompts,
            units=[max(1, prompt.num_samples) for prompt in prompts],
            order=sorted(range(len(prompts)), key=lambda item: tuple(prompts[item].token_ids)),
            limits=_limits(state.replicas),
            admit=admit,
        )
        self._streams: dict[int, _Stream] = {}
        self._samples: list[dict[int, trajectory_pb2.Trajectory]] = [{} for _ in prompts]
        self._times_sent = [0] * len(prompts)
        self._progress = progress
        self._on_answer = on_answer

    def serve(self, index: int) -> None:
        """Keeps a Generate call open, and the replica's window full, until its share is done.

        The deadline of a call that finished a prompt ends that call alone, and the next one has the
        rest: a share may take longer than a call.
        """
        client = self.replicas[index].client
        client.upload_images(image for prompt in self.items for image in prompt.vision_inputs)
        with self.changed:
            items = self.take(index)
            if not items:
                return
            stream = self._streams[index] = _Stream(client.open_stream())
            self._submit(stream, items)
        try:
            with stream.call:
                for event in stream.call:
                    with self.changed:
                        self._take_event(index, stream, event)
                        self._top_up(index, stream)
        except DeadlineError as error:
            if not stream.answered:
                raise
            self.take_back(index, error)
            return
        finally:
            with self.changed:
                del self._streams[index]
        if unfinished := self.shares.sent(index):
            raise RpcError(
                f"{client.address} ended the stream with {len(unfinished)} prompts unfinished",
                code=grpc.StatusCode.INTERNAL,
                method="Generate",
            )

    def answer(self, index: int, item: int, answer: list[trajectory_pb2.Trajectory]) -> None:
        """Keeps the replica's answer to an item. Needs the lock."""
        super().answer(index, item, answer)
        if self._on_answer is not None:
            self._on_answer(item, answer)

    def recall(self, index: int, items: list[int]) -> None:
        """Cancels prompts. Their events are ignored from now on."""
        if stream := self._streams.get(index):
            recalled = set(items)
            ids = [name for name, item in stream.items.items() if item in recalled]
            for name in ids:
                del stream.items[name]
            stream.call.cancel(ids)

    def stop(self) -> None:
        """Cancels every open call."""
        for stream in self._streams.values():
            stream.call.abandon()

    def _submit(self, stream: _Stream, items: Sequence[int]) -> None:
        prompts = []
        for item in items:
            prompt = self.items[item]
            # Those of a prompt that is sent again come again.
            self._progress.advance(-len(self._samples[item]))
            self._samples[item] = {}
            self._times_sent[item] += 1
            if self._times_sent[item] > 1:
                # A stream may still have the cancelled prompt of that name.
                name = f"{prompt.request_id}~{self._times_sent[item]}"
                prompt = dataclasses.replace(prompt, request_id=name)
            stream.items[prompt.request_id] = item
            prompts.append(prompt)
        stream.call.submit(prompts)

    def _top_up(self, index: int, stream: _Stream) -> None:
        if stream.half_closed or (len(self.replicas) == 1 and self.shares.sent(index)):
            return
        if items := self.take(index):
            self._submit(stream, items)
        elif not self.shares.sent(index):
            stream.call.half_close()
            stream.half_closed = True

    def _take_event(self, index: int, stream: _Stream, event: rollout_pb2.GenerateResponse) -> None:
        told = read_event(event)
        if not isinstance(told, SampleFinished | PromptFailed):
            return
        item = stream.items.get(told.request_id)
        if item is None:  # It was recalled.
            return
        if isinstance(told, PromptFailed):
            raise told.error
        samples = self._samples[item]
        tokens = len(told.trajectory.response_token_ids)
        self._progress.advance(1, tokens)
        samples[told.sample_index] = told.trajectory
        if self.shares.answer(index, item):
            del stream.items[told.request_id]
            stream.answered = True
            self.answer(index, item, [samples[i] for i in sorted(samples)])
