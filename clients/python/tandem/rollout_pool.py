"""Generation on several rollout servers at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from tandem.client import RolloutClient
from tandem.requests import Prompt
from tandem.types.v1 import trajectory_pb2


class RolloutPool:
    """Several rollout servers as one: prompts are dealt out in equal, contiguous parts.

    A server gets its part in batches of at most so many samples as its queue holds.
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
        count = len(self.clients)
        bounds = [len(named) * i // count for i in range(count + 1)]
        parts = [named[a:b] for a, b in itertools.pairwise(bounds)]

        def generate_at(server: int) -> list[list[trajectory_pb2.Trajectory]]:
            batches = _batches(parts[server], self._max_queue[server])
            client = self.clients[server]
            return [group for batch in batches for group in client.generate(batch)]

        # A single server is called from this thread, so that Ctrl-C reaches the call.
        if count == 1:
            return generate_at(0)
        futures = [self._threads.submit(generate_at, server) for server in range(count)]
        for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
            ended.result()
        return [samples for future in futures for samples in future.result()]

    def close(self) -> None:
        """Closes every client."""
        for client in self.clients:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _batches(prompts: Sequence[Prompt], max_samples: int) -> Iterator[list[Prompt]]:
    """The prompts in order, in lists of at most `max_samples` samples; one prompt at least."""
    batch: list[Prompt] = []
    samples = 0
    for prompt in prompts:
        wanted = max(1, prompt.num_samples)
        if batch and samples + wanted > max_samples:
            yield batch
            batch, samples = [], 0
        batch.append(prompt)
        samples += wanted
    if batch:
        yield batch
