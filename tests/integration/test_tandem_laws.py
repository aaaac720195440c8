"""The laws of tandem rollouts, over the real rollout server."""

from __future__ import annotations

import dataclasses

import harness
import numpy as np
import pytest
from harness import STRATEGIES, TANDEM, flat, logprobs, mask, prompts, tokens
from tandem.schedule import authorship_mask
from tandem.wire import tandem_record

GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def self_paired(models, tmp_path_factory):
    same = dataclasses.replace(models, junior=models.senior)
    with harness.cluster(tmp_path_factory.mktemp("same"), same) as running:
        yield running


@pytest.fixture(scope="module")
def junior_alone(models, tmp_path_factory):
    swapped = dataclasses.replace(models, senior=models.junior)
    with harness.cluster(
        tmp_path_factory.mktemp("junior"), swapped, rollout={"junior_model": ""}
    ) as running:
        yield running


def test_law_1_equal_models_write_greedily_what_the_senior_writes_alone(self_paired):
    with harness.rollout_client(self_paired) as client:
        alone = flat(client.generate(prompts(5, {"enabled": False}, sampling=GREEDY)))
        for strategy in STRATEGIES:
            for prob_senior in (0.0, 0.3, 1.0):
                tandem = TANDEM[strategy] | {"prob_senior": prob_senior}
                together = flat(client.generate(prompts(5, tandem, sampling=GREEDY)))
                assert [tokens(t) for t in together] == [tokens(t) for t in alone]


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_senior_is_tandem_switched_off_bit_for_bit(rollout, strategy):
    off = flat(rollout.generate(prompts(5, {"enabled": False}, num_samples=3)))
    tandem = TANDEM[strategy] | {"prob_senior": 1.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=3)))
    for a, b in zip(off, certain, strict=True):
        assert tokens(a) == tokens(b)
        assert a.author_logprobs == b.author_logprobs
        assert mask(a) == mask(b) == [1] * len(tokens(a))


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_junior_is_the_junior_alone(rollout, junior_alone, strategy):
    tandem = TANDEM[strategy] | {"prob_senior": 0.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=2)))
    with harness.rollout_client(junior_alone) as client:
        alone = flat(client.generate(prompts(5, {"enabled": False}, num_samples=2)))
    for a, b in zip(certain, alone, strict=True):
        assert tokens(a) == tokens(b)
        assert mask(a) == [0] * len(tokens(a))
        np.testing.assert_array_equal(logprobs(a, "author"), logprobs(b, "author"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_3_a_sample_does_not_depend_on_its_company(rollout, strategy):
    batch = prompts(6, TANDEM[strategy], num_samples=3, return_other_logprobs=True)
    together = rollout.generate(batch)
    backwards = rollout.generate(batch[::-1])[::-1]
    alone = [rollout.generate([prompt])[0] for prompt in batch]
    for other in (backwards, alone):
        for a, b in zip(flat(together), flat(other), strict=True):
            assert_same_sample(a, b)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 2},
        {"max_batched_tokens": 5},
        {"compute": {"num_threads": 2}},
        {},
    ],
    ids=["few-slots", "chunked-prefill", "two-threads", "restarted"],
)
def test_law_3_a_sample_does_not_depend_on_the_servers_limits(rollout, models, tmp_path, config):
    batch = prompts(5, TANDEM["word"], num_samples=2, return_other_logprobs=True)
    expected = flat(rollout.generate(batch))
    with (
        harness.cluster(tmp_path, models, rollout=config) as running,
        harness.rollout_client(running) as client,
    ):
        for a, b in zip(expected, flat(client.generate(batch)), strict=True):
            assert_same_sample(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_4_the_mask_follows_from_tokens_configuration_and_seed(rollout, strategy):
    info = rollout.info()
    defaults = {
        "sentence": info.sentence_boundary_token_ids,
        "word": info.word_boundary_token_ids,
    }
    # Own boundary ids that do occur: the tiny models seldom write the default ones.
    own = list(range(2, 90))
    for tandem in (TANDEM[strategy], TANDEM[strategy] | {"boundary_token_ids": own}):
        samples = flat(rollout.generate(prompts(6, tandem, num_samples=4)))
        for t in samples:
            derived = authorship_mask(
                tokens(t),
                tandem_record(t.tandem),
                t.seed,
                t.sample_index,
                defaults.get(strategy, ()),
            )
            assert mask(t) == derived
    assert {author for t in samples for author in mask(t)} == {0, 1}


def test_default_boundary_sets_are_what_the_tokenizer_says(rollout, models):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models.tokenizer / "tokenizer.json"))
    pieces = {i: p for p, i in tokenizer.get_vocab().items() if p not in ("<eos>", "<pad>")}
    words = sorted(i for i, piece in pieces.items() if piece.startswith("Ġ"))
    sentences = sorted(i for i in pieces if tokenizer.decode([i]).endswith("\n\n"))
    info = rollout.info()
    assert words
    assert sentences
    assert sorted(info.word_boundary_token_ids) == words
    assert sorted(info.sentence_boundary_token_ids) == sentences


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_5_lazy_lanes_equal_both_models_on_every_token(rollout, strategy):
    samples = flat(
        rollout.generate(prompts(5, TANDEM[strategy], num_samples=2, return_other_logprobs=True))
    )
    scores = rollout.score(
        [([*t.prompt_token_ids, *tokens(t)], len(t.prompt_token_ids)) for t in samples],
        junior=True,
    )
    for t, score in zip(samples, scores.sequences, strict=True):
        for model in ("senior", "junior"):
            expected = harness.from_tensor(getattr(score, f"{model}_logprobs"))
            np.testing.assert_array_equal(logprobs(t, model), expected)


def test_law_5_asking_for_both_changes_neither_tokens_nor_authors(rollout):
    plain = flat(rollout.generate(prompts(5, TANDEM["word"], num_samples=2)))
    both = flat(
        rollout.generate(prompts(5, TANDEM["word"], num_samples=2, return_other_logprobs=True))
    )
    for a, b in zip(plain, both, strict=True):
        assert (tokens(a), mask(a)) == (tokens(b), mask(b))
        assert not a.HasField("other_logprobs")
        np.testing.assert_array_equal(logprobs(a, "author"), logprobs(b, "author"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_6_every_list_has_one_entry_a_token(rollout, strategy):
    cut = {"max_tokens": 9, "temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.01}
    for t in flat(
        rollout.generate(prompts(4, TANDEM[strategy], sampling=cut, return_other_logprobs=True))
    ):
        length = len(tokens(t))
        assert 1 <= length <= 9
        assert len(t.authorship_mask) == length
        for tensor in (t.author_logprobs, t.other_logprobs, t.log_keep_mass):
            assert list(tensor.shape) == [length]
        assert sum(run.count for run in t.senior_versions) == length
        assert np.all(harness.from_tensor(t.log_keep_mass) <= 0)
        assert t.junior_version


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_recorded_log_probs_are_those_of_transformers(rollout, models, temperature):
    sampling = {"max_tokens": 20, "temperature": temperature, "top_p": 0.9}
    batch = prompts(5, TANDEM["word"], sampling=sampling, return_other_logprobs=True)
    for t in flat(rollout.generate(batch)):
        for model, directory in (("senior", models.senior), ("junior", models.junior)):
            expected = harness.reference_logprobs(
                directory, t.prompt_token_ids, tokens(t), temperature or 1.0
            )
            np.testing.assert_allclose(logprobs(t, model), expected, rtol=0, atol=2e-4)


def assert_same_sample(a, b):
    assert tokens(a) == tokens(b)
    assert mask(a) == mask(b)
    for model in ("senior", "junior"):
        np.testing.assert_array_equal(logprobs(a, model), logprobs(b, model))
