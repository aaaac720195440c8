"""Generation and scoring on several rollout servers at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tandem.client import RolloutClient
from tandem.requests import Prompt
from tandem.types.v1 import server_pb2, trajectory_pb2
from tandem.wire import from_tensor

# Most tokens of one Score call: their ids, of 5 bytes at most, fit into a message.
SCORE_TOKENS = 1 << 16

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scored:
    """The log-probabilities of a sequence's tokens, from the first scored token on.

    Attributes:
        senior: under the senior, float32 [tokens scored]; None if it was not requested.
        junior: under the junior, in the same way.
        weights: the weights of the senior that the server held.
    """

    senior: np.ndarray | None
    junior: np.ndarray | None
    weights: server_pb2.WeightsVersion


def response_to_score(trajectory: trajectory_pb2.Trajectory) -> tuple[list[int], int]:
    """Returns a response as score() takes it: ids with the prompt's, index of its first token."""
    prompt = trajectory.prompt_token_ids
    return [*prompt, *trajectory.response_token_ids], len(prompt)


class RolloutPool:
    """Several rollout servers as one: every server gets an equal, contiguous slice of a request.

    A server gets its slice in batches, of at most as many samples as its queue holds, or of at most
    SCORE_TOKENS tokens.
    """

    def __init__(self, clients: Sequence[RolloutClient], max_queue: Sequence[int]) -> None:
        self.clients = list(clients)
        self._max_queue = list(max_queue)
        self._threads = ThreadPoolExecutor(max(1, len(clients)), thread_name_prefix="rollout")

    def generate(self, prompts: Sequence[Prompt]) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the samples of every prompt, in order.

        The first failure is raised at once; calls of other servers that still run end with close().
        """
        named = [prompt.named(index) for index, prompt in enumerate(prompts)]

        def generate_at(
            server: int, own: Sequence[Prompt]
        ) -> list[list[trajectory_pb2.Trajectory]]:
            batches = _batches(own, lambda one: max(1, one.num_samples), self._max_queue[server])
            client = self.clients[server]
            return [group for batch in batches for group in client.generate(batch)]

        return self._deal_out(named, generate_at)

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        *,
        senior: bool = False,
        junior: bool = False,
        temperature: float | None = None,
    ) -> list[Scored]:
        """Scores every (token ids, index of the first scored token), in order.

        `senior` and `junior` say under which models. Failures are raised as in generate(); a server
        without a junior raises FailedPreconditionError (NO_JUNIOR).
        """

        def score_at(server: int, own: Sequence[tuple[Sequence[int], int]]) -> list[Scored]:
            scored = []
            for batch in _batches(own, lambda one: len(one[0]), SCORE_TOKENS):
                reply = self.clients[server].score(
                    batch, senior=senior, junior=junior, temperature=temperature
                )
                scored += [
                    Scored(
                        from_tensor(one.senior_logprobs) if senior else None,
                        from_tensor(one.junior_logprobs) if junior else None,
                        reply.weights,
                    )
                    for one in reply.sequences
                ]
            return scored

        return self._deal_out(sequences, score_at)

    def _deal_out(
        self, items: Sequence[Item], ask: Callable[[int, Sequence[Item]], list[Result]]
    ) -> list[Result]:
        """Asks every server, by its index, for the results of its slice."""
        count = len(self.clients)
        bounds = [len(items) * i // count for i in range(count + 1)]
        slices = [items[a:b] for a, b in itertools.pairwise(bounds)]
        # A single server is called from this thread, so that Ctrl-C reaches the call.
        if count == 1:
            return ask(0, slices[0])
        # A call in another thread belongs to the caller's span, too.
        futures = [
            self._threads.submit(copy_context().run, ask, server, own)
            for server, own in enumerate(slices)
        ]
        for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
            ended.result()
        return [result for future in futures for result in future.result()]

    def close(self) -> None:
        """Closes every client."""
        for client in self.clients:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _batches(
    items: Sequence[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Yields the items in order, in lists whose sizes sum to at most `most`, or of one item."""
    batch: list[Item] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
