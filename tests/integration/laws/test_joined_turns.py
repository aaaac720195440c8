"""Turns that the client joins, on the real servers."""

from __future__ import annotations

import harness
import pytest
from harness import STRATEGIES, TANDEM, mask, prompts, tokens
from tandem import Prompt, ResponseSoFar, join
from tandem.rpc.requests import PolicySample

SAMPLES = 3
SAID = [5, 9, 17]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with harness.cluster(tmp_path_factory.mktemp("server"), models, trainer={}) as running:
        yield running


@pytest.fixture
def rollout(server):
    with harness.rollout_client(server) as client:
        yield client


def first_turns(rollout, prompt, length):
    """The first `length` tokens of the samples of a prompt."""
    [group] = rollout.generate([changed(prompt, max_tokens=length)])
    return group


def changed(prompt, max_tokens, **changes):
    sampling = dict(prompt.sampling) | {"max_tokens": max_tokens, "ignore_eos": True}
    return Prompt(
        prompt.token_ids,
        seed=prompt.seed,
        sampling=sampling,
        tandem=prompt.tandem,
        **{"num_samples": SAMPLES, "return_other_logprobs": True} | changes,
    )


def continued(rollout, prompt, before, said, max_tokens):
    """The next turn of each of the samples, behind what an environment said."""
    asked = [
        changed(
            prompt,
            max_tokens,
            num_samples=1,
            first_sample_index=one.sample_index,
            response=ResponseSoFar(
                [*one.response_token_ids, *said], [*one.authorship_mask, *[2] * len(said)]
            ),
        )
        for one in before
    ]
    return [group[0] for group in rollout.generate(asked)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_continued_response_equals_the_one_that_was_written_at_once(rollout, strategy):
    for prompt in prompts(3, TANDEM[strategy]):
        [whole] = rollout.generate([changed(prompt, 24)])
        first = first_turns(rollout, prompt, 9)
        rest = continued(rollout, prompt, first, [], 15)
        for expected, one, other in zip(whole, first, rest, strict=True):
            joined = join(one, [], other)
            assert tokens(joined) == tokens(expected)
            assert mask(joined) == mask(expected)
            assert joined.author_logprobs == expected.author_logprobs
            assert joined.other_logprobs == expected.other_logprobs
            assert joined.sampling == expected.sampling
            assert joined.senior_versions == expected.senior_versions


def test_a_trainer_takes_joined_responses(server, rollout):
    samples = []
    for number, prompt in enumerate(prompts(3, TANDEM["word"])):
        first = first_turns(rollout, prompt, 7)
        second = continued(rollout, prompt, first, SAID, 12)
        samples += [
            PolicySample(join(one, SAID, other), f"group-{number}", float(other.sample_index))
            for one, other in zip(first, second, strict=True)
        ]
    with harness.trainer_client(server) as trainer:
        reply = trainer.train_step(
            samples, run_id="turns", step=1, expected_version=0, objective={}, request_id="turns/1"
        )
    metrics = reply.report.metrics
    masks = [mask(one.trajectory) for one in samples]
    senior = sum(one.count(1) for one in masks)
    assert metrics["policy/weighted_tokens"] == senior
    # The environment's tokens count for nobody, and both models compute the same as before.
    assert metrics["tandem/senior_token_fraction"] == pytest.approx(
        senior / sum(len(one) - one.count(2) for one in masks)
    )
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0, abs=1e-4)
