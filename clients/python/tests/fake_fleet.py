"""Several fake rollout servers with weights, delays and losses of their own, and their trainer."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager

import fakes
from grpc_status import rpc_status

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.weights.v1 import weights_pb2
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.rpc.client import RolloutClient
from tandem.rpc.retry import ONCE, RetryPolicy

RETRY = RetryPolicy(initial_seconds=0.01, maximum_seconds=0.05)


class FakeReplica(fakes.FakeRollout):
    """A rollout server that draws one sample at a time, in the order of their submission.

    Attributes:
        version: the version of its weights; a restart makes it 0.
        address: where it listens.
        delay: called before every sample.
        losses: numbers of samples after which it is lost for a while.
        down_seconds: how long it is lost then; None: for ever.
        drawn: request_id and index of every sample, in order.
        cancelled: request_ids of cancelled prompts.
        submitted: request_ids of the prompts that have reached it.
        recalled: request_ids whose cancellation has reached it; it acts on it after its sample.
        contexts: those of its Generate calls.
        cut: number of Generate calls that did not come to their end.
        streams: number of Generate calls that are open.
        updates: `streams` at the time of each update of the weights.
        scored: number of sequences that it scored.
        refuses_updates: whether the trainer cannot reach it.
    """

    def __init__(self, world):
        super().__init__(world)
        self.version = 0
        self.address = ""
        self.delay = lambda: None
        self.losses = []
        self.down_seconds = 0.05
        self.drawn = []
        self.cancelled = []
        self.submitted = []
        self.recalled = []
        self.contexts = []
        self.cut = 0
        self.streams = 0
        self.updates = []
        self.scored = 0
        self.refuses_updates = False
        self._down_until = 0.0

    def lose(self):
        """Lets every call fail until the server is back, with the weights that it began with."""
        seconds = self.down_seconds
        self._down_until = float("inf") if seconds is None else time.monotonic() + seconds
        self.version = 0

    def come_back(self):
        """Ends a loss."""
        self._down_until = 0.0

    @property
    def is_down(self):
        """Whether every call fails."""
        return time.monotonic() < self._down_until

    def _require_up(self, context):
        if self.is_down:
            context.abort_with_status(rpc_status.to_status(fakes.error_status(14, "is down")))

    def GetServerInfo(self, request, context):
        self._require_up(context)
        reply = super().GetServerInfo(request, context)
        reply.server.advertised_address = self.address
        return reply

    def GetVersion(self, request, context):
        self._require_up(context)
        return weights_pb2.GetVersionResponse(weights=fakes.weights(self.version))

    def Score(self, request, context):
        self._require_up(context)
        self.delay()
        self.scored += len(request.sequences)
        reply = super().Score(request, context)
        reply.weights.CopyFrom(fakes.weights(self.version))
        return reply

    def Generate(self, requests, context):
        self._require_up(context)
        self.contexts.append(context)
        self.streams += 1
        whole = False
        try:
            yield from self._draw(requests, context)
            whole = context.is_active()
        finally:
            self.streams -= 1
            self.cut += not whole

    def _draw(self, requests, context):
        arrived = queue.SimpleQueue()

        def read():
            try:
                for request in requests:
                    arrived.put(request)
                    self.recalled += request.cancel.request_ids
                    self.submitted += [one.request_id for one in request.submit.prompts]
            except Exception:  # The call was cancelled.
                pass
            arrived.put(None)

        threading.Thread(target=read, daemon=True).start()
        waiting, half_closed = deque(), False
        while waiting or not half_closed:
            while not half_closed and (not waiting or not arrived.empty()):
                request = arrived.get()
                if request is None:
                    half_closed = True
                elif request.HasField("cancel"):
                    names = set(request.cancel.request_ids)
                    self.cancelled += sorted(names)
                    waiting = deque(one for one in waiting if one[0].request_id not in names)
                    for name in names:
                        status = fakes.error_status(1, "the caller cancelled")
                        failed = rollout_pb2.FailedEvent(request_id=name, status=status)
                        yield rollout_pb2.GenerateResponse(failed=failed)
                else:
                    for prompt in request.submit.prompts:
                        assert prompt.request_id not in {one[0].request_id for one in waiting}
                        first = prompt.first_sample_index
                        indices = range(first, first + max(1, prompt.num_samples))
                        waiting += ((prompt, i) for i in indices)
            if not context.is_active():
                return
            if waiting:
                yield self._sample(*waiting.popleft(), context)

    def _sample(self, prompt, index, context):
        self.delay()
        if self.losses and len(self.drawn) >= self.losses[0]:
            self.losses.pop(0)
            self.lose()
        self._require_up(context)
        self.drawn.append((prompt.request_id, index))
        if prompt.sampling.top_k < 0:
            status = fakes.error_status(3, "must not be negative", field="sampling.top_k")
            failed = rollout_pb2.FailedEvent(request_id=prompt.request_id, status=status)
            return rollout_pb2.GenerateResponse(failed=failed)
        return rollout_pb2.GenerateResponse(
            finished=rollout_pb2.FinishedEvent(
                request_id=prompt.request_id,
                trajectory=self.world.sample(prompt, index, self.version),
            )
        )


class FleetTrainer(fakes.FakeTrainer):
    """A trainer that publishes to the replicas that it is told to."""

    def __init__(self, world, replicas):
        super().__init__(world)
        self.replicas = replicas
        world.targets_of_publications = []

    def PublishWeights(self, request, context):
        world = self.world
        world.publications.append((world.version, request.allow_rollback))
        reply = trainer_pb2.PublishWeightsResponse(weights=fakes.weights(world.version))
        world.targets_of_publications.append(list(request.targets))
        by_address = {replica.address: replica for replica in self.replicas}
        for target in request.targets:
            result = reply.results.add(target=target)
            replica = by_address[target]
            if replica.is_down or replica.refuses_updates:
                result.status.CopyFrom(fakes.error_status(14, "is down"))
                continue
            replica.updates.append(replica.streams)
            replica.version, result.digest = world.version, "d"
        return reply


@contextmanager
def serve(replicas, world=None):
    """Serves every replica at an address of its own, and a trainer at the address it yields."""
    world = world or replicas[0].world
    with ExitStack() as stack:
        for replica in replicas:
            replica.address = stack.enter_context(fakes.serve(world, rollout=replica))
        yield stack.enter_context(fakes.serve(world, trainer=FleetTrainer(world, replicas)))


@contextmanager
def pool_of(replicas, capacity=2, retry=RETRY):
    """A pool of served replicas, which retries quickly."""
    with serve(replicas):
        clients = [RolloutClient(replica.address, retry=ONCE) for replica in replicas]
        members = [Replica(client, capacity, 4096, has_junior=True) for client in clients]
        pool = RolloutPool(members, retry=retry)
        try:
            yield pool
        finally:
            pool.close()


def random_delay(seed, seconds):
    """A delay of 0 to 2 × `seconds`, by the seed."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.uniform(0, 2 * seconds))


def meet(replicas):
    """Lets no replica draw before each of them has prompts."""
    for replica in replicas:
        before = replica.delay
        replica.delay = lambda before=before: (
            before(),
            fakes.wait_until(lambda: all(one.submitted for one in replicas)),
        )
