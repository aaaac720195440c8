"""Generation and scoring on one or several rollout servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import DeadlineError, RpcError
from tandem.pool.generation import PoolGeneration
from tandem.pool.replicas import PoolCounts, Replica
from tandem.pool.request import Admit, PoolState
from tandem.pool.scoring import PoolScoring, Scored, ScoreOptions
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Collector, Prompt, ScoredTokens, SupervisedSample, ToScore
from tandem.rpc.retry import ONCE, RetryPolicy
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


# Seconds in which the threads of requests that were given up may notice it.
_LEAVE_SECONDS = 10.0


def response_to_score(trajectory: trajectory_pb2.Trajectory) -> ScoredTokens:
    """Returns a response as score() takes it: ids with the prompt's, index of its first token."""
    prompt = trajectory.prompt_token_ids
    ids = [*prompt, *trajectory.response_token_ids]
    return ScoredTokens(ids, len(prompt), tuple(trajectory.vision_inputs))


def text_to_score(text: SupervisedSample) -> ScoredTokens:
    """Returns a prompt with a given response as a sequence; only the response is scored."""
    prompt = text.prompt_token_ids
    return ScoredTokens([*prompt, *text.response_token_ids], len(prompt), tuple(text.vision_inputs))


def _require_answer(client: RolloutClient) -> None:
    """Raises RpcError if the server does not answer."""
    client.weights_version()


class RolloutPool:
    """One or several rollout servers (replicas) as one. Thread-safe.

    A sample is a function of its prompt, its seed and the weights, so it does not matter which
    replica draws it. Each replica gets a share of a request in proportion to its capacity; prompts
    that begin alike go to the same one as far as the shares allow. A replica is sent a window of
    its share at a time. One that is done takes over what a slower one was not sent, or has not
    begun. What a replica was sent and did not answer before it failed goes to the others, or to
    itself once it answers again.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        progress: Progress | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Makes a pool that closes the replicas' clients, which make one attempt from now on.

        `progress` is told how much is answered. `retry` says how long a request waits for replicas
        that fail.
        """
        for replica in replicas:
            replica.client.retry = ONCE
        self._state = PoolState(
            list(replicas),
            retry or RetryPolicy(),
            progress=progress or Progress(),
        )

    @property
    def replicas(self) -> Sequence[Replica]:
        """The rollout servers, in the order of the settings."""
        return self._state.replicas

    @property
    def clients(self) -> list[RolloutClient]:
        """The clients of the rollout servers."""
        return [replica.client for replica in self._state.replicas]

    def generate(
        self,
        prompts: Sequence[Prompt],
        admit: Admit | None = None,
        on_answer: Callable[[int, list[trajectory_pb2.Trajectory]], None] | None = None,
        progress: Progress | None = None,
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the samples of every prompt, in order.

        `admit` is called with the client of a replica before each of its calls, in any thread: it
        makes sure that the replica may be used, or raises. By default one that answers may.
        `on_answer` is called with the number of a prompt and its samples as soon as it has all of
        them, in any thread and order; it must return at once. `progress` is told how many there
        are, by default that of the pool.

        Raises:
            ConfigError: two prompts have the same request_id.
            RpcError: a replica refused a prompt, or none has answered for as long as the policy
                waits. The first such failure is raised at once, and the calls of the others are
                cancelled.
        """
        named = Collector(prompts).prompts
        progress = progress or self._state.progress
        progress.expect(sum(max(1, one.num_samples) for one in named))
        admit = admit or _require_answer
        return PoolGeneration(self._state, named, admit, progress, on_answer).run()

    def score(
        self,
        sequences: Sequence[ToScore],
        *,
        senior: bool = False,
        junior: bool = False,
        temperature: float | None = None,
        num_top_logprobs: int = 0,
        admit: Admit | None = None,
    ) -> list[Scored]:
        """Scores every (token ids, index of the first scored token), in order.

        `senior` and `junior` choose the models; with `num_top_logprobs` as many of their likeliest
        tokens come, too. `admit` and failures are as in generate(); a
        server without a junior raises FailedPreconditionError (NO_JUNIOR).
        """
        options = ScoreOptions(senior, junior, temperature, num_top_logprobs)
        self._state.progress.expect(len(sequences))
        return PoolScoring(self._state, sequences, options, admit or _require_answer).run()

    @contextmanager
    def drained(self, replica: Replica) -> Iterator[None]:
        """Waits for the replica's running calls, then keeps it free of the pool's calls.

        The other replicas continue, and get what it has not begun.

        Raises DeadlineError if its calls take longer than a call of its client may.
        """
        state, seconds = self._state, replica.client.timeout_seconds
        try:
            with state.changed:
                replica.updates += 1
                self._settle(replica)
                if not state.changed.wait_for(lambda: replica.calls == 0, seconds):
                    raise DeadlineError(
                        f"{replica.client.address} has calls that run for more than {seconds:g} s",
                        code=grpc.StatusCode.DEADLINE_EXCEEDED,
                    )
            yield
        finally:
            with state.changed:
                replica.updates -= 1
                self._settle(replica)

    def leave_out(self, client: RolloutClient, error: RpcError) -> None:
        """Marks a replica as lost: the next request tries whether it answers again."""
        with self._state.changed:
            for replica in self.replicas:
                replica.lost |= replica.client is client
        _log.info(f"{client.address}: {error.message}: it is left out until it answers again")

    def give_up(self) -> None:
        """Ends the requests that run: their callers get StopRequested."""
        with self._state.changed:
            for request in self._state.running:
                request.give_up()

    def take_counts(self) -> PoolCounts:
        """Returns what was counted since the last time."""
        with self._state.changed:
            counts, self._state.counts = self._state.counts, PoolCounts()
            return counts

    def close(self) -> None:
        """Closes every client, once the threads of requests have left them."""
        state = self._state
        with state.changed:
            idle = lambda: not any(replica.calls for replica in state.replicas)  # noqa: E731
            state.changed.wait_for(idle, _LEAVE_SECONDS)
        for client in self.clients:
            client.close()

    def _settle(self, replica: Replica) -> None:
        for request in self._state.running:
            request.settle(self.replicas.index(replica))
        self._state.changed.notify_all()
