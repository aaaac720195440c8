"""Laws of responses in turns, on the real servers: what an environment says, and what follows."""

from __future__ import annotations

import dataclasses

import harness
import numpy as np
import pytest
import tandem
from harness import (
    SAMPLING,
    STRATEGIES,
    TANDEM,
    assert_scored,
    derived_mask,
    flat,
    logprobs,
    mask,
    prompts,
    tokens,
)
from page_blocks import blocks_of
from tandem.errors import InvalidArgumentError
from tandem.pool.rollout_pool import response_to_score
from tandem.rpc.requests import PolicySample, Prompt, ResponseSoFar, ScoredTokens
from tandem.rpc.wire import from_tensor
from turns import SAID, continued, episodes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_continued_response_is_the_uninterrupted_one(numerics, rollout, strategy):
    def drawn(count):
        sampling = SAMPLING | {"top_p": 0.9, "ignore_eos": True, "max_tokens": count}
        return prompts(
            4, TANDEM[strategy], sampling=sampling, num_samples=2, return_other_logprobs=True
        )

    wholes = rollout.generate(drawn(24))
    for count in (1, 11, 23):
        begun, ends = rollout.generate(drawn(count)), drawn(24 - count)
        for prompt, firsts, expected in zip(ends, begun, wholes, strict=True):
            for first, whole in zip(firsts, expected, strict=True):
                [[rest]] = rollout.generate([continued(prompt, first)])
                assert rest.response_offset == count
                joined = tandem.join(first, [], rest)
                assert joined.sample_index == whole.sample_index
                assert joined.sampling == whole.sampling
                assert joined.senior_versions == whole.senior_versions
                if numerics.common_tokens < 1:
                    continue
                assert (tokens(joined), mask(joined)) == (tokens(whole), mask(whole))
                for model in ("senior", "junior"):
                    np.testing.assert_allclose(
                        logprobs(joined, model),
                        logprobs(whole, model),
                        rtol=0,
                        atol=numerics.atol,
                    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_authors_and_log_probs_of_an_episode_follow_from_its_record(numerics, rollout, strategy):
    info = rollout.info()
    # Boundary ids that do occur, in turns and in what is said.
    config = TANDEM[strategy] | {"boundary_token_ids": list(range(2, 90))}
    batch = prompts(4, config, num_samples=3, return_other_logprobs=True)
    samples = flat(episodes(rollout, batch))
    assert {author for one in samples for author in mask(one)} == {0, 1, 2}
    scores = rollout.score([response_to_score(one) for one in samples], junior=True)
    for one, score in zip(samples, scores.sequences, strict=True):
        said = [t for t, author in enumerate(mask(one)) if author == 2]
        assert [tokens(one)[t] for t in said] == [*SAID[0], *SAID[1]]
        assert mask(one) == derived_mask(one, info)
        assert_scored(one, score, numerics.atol)
        assert (logprobs(one, "author")[said] == 0).all()


@pytest.mark.parametrize("successor", ["junior", "senior"])
def test_one_model_goes_on_with_what_the_other_began(numerics, rollout, successor):
    rules = {"senior": {"enabled": False}, "junior": {"enabled": True, "prob_senior": 0.0}}
    rules["junior"] |= {"selection_strategy": "bernoulli"}
    first = "senior" if successor == "junior" else "junior"
    batch = prompts(4, rules[first], sampling=SAMPLING | {"ignore_eos": True, "max_tokens": 9})
    begun = flat(rollout.generate(batch))
    authors = {"senior": 1, "junior": 0}
    for said in ((), SAID[0]):
        asked = [
            continued(prompt, one, said=said, tandem=rules[successor])
            for prompt, one in zip(batch, begun, strict=True)
        ]
        for one, rest in zip(begun, flat(rollout.generate(asked)), strict=True):
            assert mask(one) == [authors[first]] * 9
            assert mask(rest) == [authors[successor]] * 9
            # The successor has read all of it: prompt, the other's tokens, the environment's.
            ids = [*one.prompt_token_ids, *tokens(one), *said, *tokens(rest)]
            [score] = rollout.score([ScoredTokens(ids, len(ids) - 9)], junior=True).sequences
            np.testing.assert_allclose(
                from_tensor(getattr(score, f"{successor}_logprobs")),
                logprobs(rest, "author"),
                rtol=0,
                atol=numerics.atol,
            )


def test_a_turn_does_not_depend_on_its_company_or_the_cache(numerics, rollout, models, tmp_path):
    batch = prompts(5, TANDEM["word"], num_samples=3, return_other_logprobs=True)
    together = flat(episodes(rollout, batch))
    with (
        harness.cluster(tmp_path, models, rollout=numerics.settings(max_num_seqs=2)) as running,
        harness.rollout_client(running) as client,
    ):
        alone = [
            one for prompt in reversed(batch) for one in reversed(flat(episodes(client, [prompt])))
        ][::-1]
    if numerics.exact:
        harness.assert_same_bits(together, alone)


def test_a_turn_reuses_what_the_server_has_read(models, tmp_path):
    with (
        harness.cluster(tmp_path, models) as running,
        harness.rollout_client(running) as client,
    ):
        [prompt] = prompts(1, {"enabled": False}, sampling=SAMPLING | {"ignore_eos": True})
        prompt = dataclasses.replace(prompt, token_ids=list(range(2, 62)))
        [[first]] = client.generate([prompt])
        before = harness.gauge(running.rollouts[0], "tandem_prefix_cache_hit_tokens_total")
        client.generate([continued(prompt, first, said=SAID[0])])
        after = harness.gauge(running.rollouts[0], "tandem_prefix_cache_hit_tokens_total")
        # All but the last token: nothing has read that one.
        assert after - before == 60 + 24 - 1


def test_the_own_loop_of_the_page_joins_two_turns_in_at_most_five_lines(rollout):
    page = "docs/guides/environments.md"
    text = (harness.REPOSITORY / page).read_text()
    *_, block = [one for one in blocks_of(page, text) if one.language == "python"]
    assert block.what == "tests/integration/laws/test_turn_laws.py"
    assert len(block.text.splitlines()) <= 5
    assert all(len(line) <= 100 and ";" not in line for line in block.text.splitlines())
    given = {"client": rollout, "ids": [5, 6, 7], "k": 2, "said": SAID[0]}
    given |= {"Prompt": Prompt, "ResponseSoFar": ResponseSoFar, "join": tandem.join}
    exec(block.text, given)
    first, second, whole = (given[name] for name in ("first", "second", "whole"))
    assert (first.sample_index, second.sample_index, whole.sample_index) == (2, 2, 2)
    assert tokens(whole) == [*tokens(first), *SAID[0], *tokens(second)]
    assert mask(whole)[len(tokens(first)) :][: len(SAID[0])] == [2, 2, 2]
    assert second.response_offset == len(tokens(first)) + 3


def test_bad_responses_so_far_are_refused(rollout):
    [prompt] = prompts(1, TANDEM["word"])

    def refused(ids, authors, field):
        bad = dataclasses.replace(prompt, response=ResponseSoFar(ids, bytes(authors)))
        with pytest.raises(InvalidArgumentError) as caught:
            rollout.generate([bad])
        assert field in str(caught.value)

    refused([5, 6], [2, 1], "response.authorship_mask[0]")
    refused([5, 6], [1, 3], "response.authorship_mask[1]")
    refused([5, 6], [1], "response.authorship_mask")
    refused([5, 300], [1, 0], "response.token_ids[1]")


def test_a_step_takes_whole_responses_alone(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        [prompt] = prompts(1, TANDEM["word"])
        [[first]] = rollout.generate([prompt])
        [[turn]] = rollout.generate([continued(prompt, first, said=SAID[0])])
        with pytest.raises(InvalidArgumentError, match="response_offset"):
            trainer.train_step(
                [PolicySample(turn, "g", reward=1.0)],
                run_id="r",
                step=1,
                expected_version=0,
                objective={},
            )
