"""Speculative decoding: drafts change the speed of a response, and not one bit of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import harness
import pytest
from harness import TANDEM, flat, prompts
from tandem import requests
from tandem.client import RolloutClient
from tandem.errors import NotImplementedByServerError, RpcError
from tandem.requests import Prompt
from test_lane_laws import LANES, LONG, RANKED, assert_near, assert_same_bits, section, short_cache

METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "ngram", "num_speculative_tokens": 15, "acceptance_rule": "exact"},
    {"method": "junior"},
]
DRAFTS = "tandem_draft_tokens_total"
ACCEPTED = "tandem_accepted_draft_tokens_total"
GREEDY = LONG | {"temperature": 0.0}
CUT = LONG | {"temperature": 0.7, "top_p": 0.8}


def batch() -> list[Prompt]:
    """Prompts of every strategy and of the senior alone, greedy and sampled, that repeat."""
    found = []
    for index, tandem in enumerate([*TANDEM.values(), {"enabled": False}]):
        for sampling in (GREEDY, CUT):
            prompt = Prompt(
                [7, 8, 9, 10 + index] * 5,
                seed=len(found),
                sampling=sampling,
                tandem=tandem,
                return_other_logprobs=index % 2 == 0,
                stream_tokens=index % 3 == 0,
            )
            found.append(prompt)
    return found


def total(running: Any, name: str, method: str) -> float:
    """The value of a counter of drafts."""
    lines = harness.metrics_text(running.rollouts[0]).splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{method="{method}"')
    )


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_responses_are_those_without_drafts(models, tmp_path, lanes):
    with (
        harness.cluster(tmp_path, models, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        plain = flat(client.generate(batch()))
        for speculative in METHODS:
            # One after the other, since drafts are cut where many sequences run.
            drafted = [
                client.generate([dataclasses.replace(prompt, speculative=speculative)])[0][0]
                for prompt in batch()
            ]
            (assert_near if lanes in RANKED else assert_same_bits)(drafted, plain)
        assert 0 < total(running, ACCEPTED, "ngram") < total(running, DRAFTS, "ngram")
        assert total(running, DRAFTS, "junior") > 0


@pytest.mark.parametrize("lanes", ["float32", "bfloat16-int8"])
def test_responses_are_those_without_drafts_where_many_run_and_are_preempted(
    models, tmp_path, lanes
):
    config = section(lanes, kv_cache_bytes=short_cache(models, lanes))
    config |= {"eager_lanes": lanes == "float32", "max_batched_tokens": 16}
    with (
        harness.cluster(tmp_path, models, rollout=config) as running,
        harness.rollout_client(running) as client,
    ):
        plain = flat(client.generate(batch()))
        mixed = [
            dataclasses.replace(prompt, speculative=METHODS[index % 3])
            for index, prompt in enumerate(batch())
        ]
        before = harness.gauge(running.rollouts[0], "tandem_preemptions_total")
        assert_same_bits(flat(client.generate(mixed)), plain)
        assert harness.gauge(running.rollouts[0], "tandem_preemptions_total") > before


def finished(client: RolloutClient, prompt: Prompt) -> Any:
    """The event of a prompt's only sample."""
    for event in client.stream(requests.submit([prompt.named(0)])):
        if event.WhichOneof("event") == "finished":
            return event.finished
    raise AssertionError("no sample came")


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_a_junior_that_is_the_senior_is_right(models, tmp_path, lanes):
    """In other numerics than the senior's it is right now and then."""
    same = dataclasses.replace(models, junior=models.senior)
    with (
        harness.cluster(tmp_path, same, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        for sampling in (GREEDY, LONG, CUT):
            [prompt] = prompts(1, {"enabled": False}, sampling=sampling)
            drafted = dataclasses.replace(prompt, speculative={"method": "junior"})
            event = finished(client, drafted)
            expected = client.generate([prompt])[0]
            (assert_near if lanes in RANKED else assert_same_bits)([event.trajectory], expected)
            assert event.draft_tokens > 0
            if "bfloat16" not in lanes and "int" not in lanes:
                assert event.accepted_draft_tokens == event.draft_tokens == 90 * 5 / 6
        assert total(running, ACCEPTED, "junior") > total(running, DRAFTS, "junior") / 10


def test_what_is_not_there_is_refused_by_name(models, tmp_path):
    with (
        harness.cluster(tmp_path, models, rollout=section("float32")) as running,
        harness.rollout_client(running) as client,
    ):
        for field, speculative in {
            "method": {"method": "heads"},
            "acceptance_rule": {"method": "ngram", "acceptance_rule": "rejection_sampling"},
        }.items():
            with pytest.raises(NotImplementedByServerError) as refused:
                client.generate([Prompt([5], speculative=speculative)])
            assert refused.value.field == f"speculative.{field}"
        with pytest.raises(RpcError) as refused:
            client.generate([Prompt([5], speculative={"method": "ngram", "prompt_lookup_max": 17})])
        assert refused.value.field == "speculative.prompt_lookup_max"
