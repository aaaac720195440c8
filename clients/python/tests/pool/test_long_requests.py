"""Requests that take longer than one call of a server may."""

import time

import fake_fleet
import fakes
import pytest
from fake_fleet import RETRY, FakeReplica

from tandem.errors import DeadlineError
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.pool.scoring import SCORE_TOKENS
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt

# Seconds that a call may take.
DEADLINE = 0.5


@pytest.fixture
def replicas(world):
    """Two replicas."""
    return [FakeReplica(world) for _ in range(2)]


@pytest.fixture
def pool(replicas):
    """A pool of them, whose calls have a short deadline."""
    with fake_fleet.serve(replicas):
        clients = [
            RolloutClient(replica.address, timeout_seconds=DEADLINE, retry=RETRY)
            for replica in replicas
        ]
        pool = RolloutPool([Replica(one, 2, 4096, has_junior=True) for one in clients])
        try:
            yield pool
        finally:
            pool.close()


def test_a_share_may_take_longer_than_a_call(replicas, pool, notes):
    for replica in replicas:
        replica.delay = lambda: time.sleep(0.04)
    prompts = [Prompt([i], seed=i, num_samples=2, sampling={"max_tokens": 4}) for i in range(30)]
    answers = pool.generate(prompts)
    assert answers == [
        [fakes.sample(prompt.message(), i, 0) for i in range(2)] for prompt in prompts
    ]
    assert len([note for note in notes if "of its prompts are retried" in note]) >= 2
    assert not [note for note in notes if "left out" in note]
    assert pool.take_counts().retried >= 2


def test_a_call_without_any_sample_ends_the_request_at_its_deadline(replicas, pool):
    for replica in replicas:
        replica.delay = lambda: time.sleep(3 * DEADLINE)
    with pytest.raises(DeadlineError):
        pool.generate([Prompt([i], seed=i, sampling={"max_tokens": 4}) for i in range(4)])


def test_a_response_that_takes_longer_than_a_call_ends_the_request(replicas, pool):
    for replica in replicas:
        draw = replica._sample

        def sample(prompt, index, context, draw=draw):
            if prompt.seed == 0 and index == 1:
                time.sleep(3 * DEADLINE)
            return draw(prompt, index, context)

        replica._sample = sample
    # Each call brings the other sample of that prompt, and some all of the other prompts.
    with pytest.raises(DeadlineError):
        pool.generate(
            [Prompt([i], seed=i, num_samples=2, sampling={"max_tokens": 4}) for i in range(6)]
        )


def test_every_call_is_admitted(replicas, pool):
    """So that none reaches a server that restarted after the call before."""
    sequences = [([1] * (SCORE_TOKENS // 4), SCORE_TOKENS // 4 - 1) for _ in range(32)]
    for clients in (2, 1):
        admitted = []
        calls = replicas[0].world.scores
        used = RolloutPool(pool.replicas[:clients])
        assert len(used.score(sequences, senior=True, admit=admitted.append)) == 32
        calls = replicas[0].world.scores - calls
        assert calls >= 8
        assert len(admitted) >= calls
