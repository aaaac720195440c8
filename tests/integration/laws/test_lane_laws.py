"""Law 3 where blocks of the KV cache are shared, given up and forgotten, for every kind of lane.

Each kind computes with the CPU's own kernels, so that a sample has the same bits whatever the
server did before and does beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial

import harness
import numpy as np
import pytest
from family_models import SENIORS, make_senior
from harness import TANDEM, assert_same_bits, flat, logprobs, mask, prompts, tokens
from lanes import LANES, LONG, RANKED, section, short_cache
from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc import requests
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt
from tandem.rpc.wire import from_tensor
from weight_sets import WeightSet

# Difference of log-probs that the order of additions of several ranks explains.
RANKS_ATOL = 5e-5


def assert_near(
    ours: Sequence[trajectory_pb2.Trajectory], theirs: Sequence[trajectory_pb2.Trajectory]
) -> None:
    """Fails unless responses and authors are the same, and log-probs within RANKS_ATOL."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (tokens(a), mask(a)) == (tokens(b), mask(b))
        for model in ("senior", "junior"):
            x, y = logprobs(a, model), logprobs(b, model)
            np.testing.assert_allclose(x, y, rtol=0, atol=RANKS_ATOL)


@pytest.fixture(scope="module")
def models_of(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], harness.Models]:
    """The models of lanes of this kind."""

    @cache
    def make(lanes: str) -> harness.Models:
        if lanes not in SENIORS:
            return models
        senior = make_senior(tmp_path_factory.mktemp(lanes) / "senior", lanes, models.junior)
        return dataclasses.replace(models, senior=senior)

    return make


@pytest.fixture(scope="module")
def answers(
    models_of: Callable[[str], harness.Models], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], tuple[list[trajectory_pb2.Trajectory], float]]:
    """The responses of a server with these lanes and bytes of cache, and its preemptions."""
    batch = prompts(5, TANDEM["word"], num_samples=2, sampling=LONG, return_other_logprobs=True)

    @cache
    def ask(lanes: str, kv_cache_bytes: int) -> tuple[list[trajectory_pb2.Trajectory], float]:
        config = section(lanes, kv_cache_bytes=kv_cache_bytes)
        with (
            harness.cluster(
                tmp_path_factory.mktemp(lanes), models_of(lanes), rollout=config
            ) as running,
            harness.rollout_client(running) as client,
        ):
            responses = flat(client.generate(batch))
            return responses, harness.gauge(running.rollouts[0], "tandem_preemptions_total")

    return ask


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_law_3_a_sample_does_not_depend_on_preemption(models_of, answers, lanes):
    wide, none = answers(lanes, 0)
    narrow, some = answers(lanes, short_cache(models_of(lanes), lanes))
    assert_same_bits(narrow, wide)
    assert none == 0
    assert some > 0


@pytest.mark.parametrize("lanes", RANKED)
def test_preempted_samples_of_two_ranks_are_those_of_one(models, answers, lanes):
    alone, _ = answers("float32", 0)
    ranked, preemptions = answers(lanes, short_cache(models, lanes))
    assert preemptions > 0
    assert_near(ranked, alone)


@pytest.mark.parametrize("lanes", LANES)
def test_law_3_a_sample_does_not_depend_on_what_others_left_in_the_cache(
    models_of, tmp_path, lanes
):
    models = models_of(lanes)
    stem = np.random.default_rng(3).integers(2, 280, size=70).tolist()
    batch = [
        Prompt(
            [*stem, *range(10, 10 + 7 * index)],
            seed=index,
            num_samples=2,
            sampling={"max_tokens": 30},
            tandem=tandem,
            return_other_logprobs=True,
        )
        for index, tandem in enumerate((TANDEM["word"], TANDEM["alternating"], {"enabled": False}))
    ]
    first, last = batch[0], batch[-1]
    with (
        harness.cluster(tmp_path, models, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        base = WeightSet(models.senior, 0)
        num_token_ids = client.info().server.model.num_token_ids
        found: dict[int, list[list[trajectory_pb2.Trajectory]]] = {}
        # New weights, though the same ones, share nothing with the old: the first prompt is cold.
        for version, order in enumerate((batch, batch[::-1], [*batch, first]), 1):
            base.install(client.channel, version, num_token_ids)
            for prompt in order:
                found.setdefault(prompt.seed, []).extend(client.generate([prompt]))
        hits = harness.gauge(running.rollouts[0], "tandem_prefix_cache_hit_tokens_total")
        assert hits > 0
    assert len(found[first.seed]) == 4
    assert len(found[last.seed]) == 3
    for same in found.values():
        for one in same[1:]:
            assert_same_bits(one, same[0])


@pytest.mark.parametrize("lanes", LANES)
def test_tokens_after_an_update_are_those_of_the_new_weights(models_of, tmp_path, lanes):
    """Score gives the log-probs of every token under the weights that its label names."""
    models = models_of(lanes)
    old, new = WeightSet(models.senior, 0), WeightSet(models.senior, 1)
    config = section(lanes, kv_cache_bytes=short_cache(models, lanes))
    with (
        harness.cluster(tmp_path, models, rollout=config) as running,
        harness.rollout_client(running) as client,
    ):
        num_token_ids = client.info().server.model.num_token_ids
        version = 0
        found: list[trajectory_pb2.Trajectory] = []
        # A batch may be done before generation pauses.
        while not any(len(trajectory.senior_versions) == 2 for trajectory in found):
            old.install(client.channel, version + 1, num_token_ids)
            version += 2
            update = partial(new.install, client.channel, version, num_token_ids)
            found = written_over(client, update)
        require_scores(client, found, new.digest)
        old.install(client.channel, version + 1, num_token_ids)
        require_scores(client, found, old.digest)


def written_over(
    client: RolloutClient, update: Callable[[], None]
) -> list[trajectory_pb2.Trajectory]:
    """The responses of a batch that is paused for an update as soon as there are tokens."""
    batch = prompts(
        5,
        TANDEM["word"],
        num_samples=2,
        sampling=LONG,
        return_other_logprobs=True,
        stream_tokens=True,
    )
    found = []
    named = [prompt.named(index) for index, prompt in enumerate(batch)]
    for number, event in enumerate(client.stream(requests.submit(named))):
        if number == 0:
            client.pause()
            update()
            client.resume()
        if event.WhichOneof("event") == "finished":
            found.append(event.finished.trajectory)
    assert len(found) == 10
    return found


def require_scores(
    client: RolloutClient, trajectories: Sequence[trajectory_pb2.Trajectory], digest: str
) -> None:
    """Fails unless Score gives the same log-probs for the tokens under the weights `digest`."""
    sequences = [([*t.prompt_token_ids, *tokens(t)], len(t.prompt_token_ids)) for t in trajectories]
    reply = client.score(sequences, junior=True)
    assert reply.weights.digest == digest
    for t, scores in zip(trajectories, reply.sequences, strict=True):
        under = np.concatenate(
            [np.full(run.count, run.weights.digest == digest) for run in t.senior_versions]
        )
        senior = from_tensor(scores.senior_logprobs)
        assert np.array_equal(logprobs(t, "senior")[under], senior[under])
        assert np.array_equal(logprobs(t, "junior"), from_tensor(scores.junior_logprobs))
