"""Generation on several rollout servers at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tandem.client import RolloutClient
from tandem.requests import Prompt
from tandem.types.v1 import server_pb2, trajectory_pb2
from tandem.wire import from_tensor

# Most tokens of one Score call: their ids, at most 5 bytes each, fit into a message.
SCORE_TOKENS = 1 << 16

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a sequence's tokens, from the first scored one on.

    Attributes:
        senior: float32 [tokens scored], where it was asked for.
        junior: the same.
        weights: the senior's that the server held.
    """

    senior: np.ndarray | None
    junior: np.ndarray | None
    weights: server_pb2.WeightsVersion


def response_to_score(trajectory: trajectory_pb2.Trajectory) -> tuple[list[int], int]:
    """A response with its prompt, as score() takes it: token ids, index of the first scored one."""
    prompt = trajectory.prompt_token_ids
    return [*prompt, *trajectory.response_token_ids], len(prompt)


class RolloutPool:
    """Several rollout servers as one: what is asked is dealt out in equal, contiguous parts.

    A server gets its part in batches: of at most so many samples as its queue holds, or of
    SCORE_TOKENS.
    """

    def __init__(self, clients: Sequence[RolloutClient], max_queue: Sequence[int]) -> None:
        self.clients = list(clients)
        self._max_queue = list(max_queue)
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="rollout")

    def generate(self, prompts: Sequence[Prompt]) -> list[list[trajectory_pb2.Trajectory]]:
        """The samples of every prompt, in order.

        The first failure is raised at once; what the other servers do then ends with close().
        """
        named = [prompt.named(index) for index, prompt in enumerate(prompts)]

        def generate_at(
            server: int, part: Sequence[Prompt]
        ) -> list[list[trajectory_pb2.Trajectory]]:
            batches = _batches(part, lambda one: max(1, one.num_samples), self._max_queue[server])
            client = self.clients[server]
            return [group for batch in batches for group in client.generate(batch)]

        return self._deal_out(named, generate_at)

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        *,
        senior: bool = False,
        junior: bool = False,
        temperature: float = 1.0,
    ) -> list[Scored]:
        """Scores of every (token ids, index of the first scored token), in order, under the models
        that are asked for.

        Failures as in generate(); FailedPreconditionError (NO_JUNIOR) from a server without one.
        """

        def score_at(server: int, part: Sequence[tuple[Sequence[int], int]]) -> list[Scored]:
            scored = []
            for batch in _batches(part, lambda one: len(one[0]), SCORE_TOKENS):
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
        """Asks every server, by its index, for the results of its part."""
        count = len(self.clients)
        bounds = [len(items) * i // count for i in range(count + 1)]
        parts = [items[a:b] for a, b in itertools.pairwise(bounds)]
        # A single server is called from this thread, so that Ctrl-C reaches the call.
        if count == 1:
            return ask(0, parts[0])
        futures = [self._threads.submit(ask, server, part) for server, part in enumerate(parts)]
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
    """The items in order, in lists whose sizes sum to at most `most`; one item at least."""
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
