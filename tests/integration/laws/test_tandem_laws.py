"""The laws of tandem rollouts, on the real rollout server.

Except with the CPU kernels (see numerics.py), log-probs agree within a tolerance, and tokens up to
the first draw that falls between two values of the same probability.
"""

from __future__ import annotations

import dataclasses

import grpc
import harness
import numpy as np
import pytest
from harness import STRATEGIES, TANDEM, derived_mask, flat, logprobs, mask, prompts, tokens
from tandem._proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem.pool.rollout_pool import response_to_score
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tokenizers import Tokenizer

GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(models, numerics, tmp_path_factory):
    with harness.cluster(
        tmp_path_factory.mktemp("server"), models, rollout=numerics.settings()
    ) as running:
        yield running


@pytest.fixture
def rollout(server):
    with harness.rollout_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def self_paired(models, numerics, tmp_path_factory):
    same = dataclasses.replace(models, junior=models.senior)
    with harness.cluster(
        tmp_path_factory.mktemp("same"), same, rollout=numerics.settings()
    ) as running:
        yield running


@pytest.fixture(scope="module")
def junior_alone(models, numerics, tmp_path_factory):
    swapped = dataclasses.replace(models, senior=models.junior)
    with harness.cluster(
        tmp_path_factory.mktemp("junior"), swapped, rollout=numerics.settings(junior_model="")
    ) as running:
        yield running


def common_prefix(a, b) -> int:
    """Number of tokens before the first that differs."""
    both = zip(tokens(a), tokens(b), strict=False)
    return next((i for i, (x, y) in enumerate(both) if x != y), min(len(tokens(a)), len(tokens(b))))


def assert_same_samples(numerics, ours, theirs, *, same_authors=True):
    """Fails unless tokens, authors and log-probs are the same, as far as `numerics` promises."""
    assert len(ours) == len(theirs)
    shared = sum(common_prefix(a, b) for a, b in zip(ours, theirs, strict=True))
    assert shared >= numerics.common_tokens * sum(len(tokens(t)) for t in ours)
    for a, b in zip(ours, theirs, strict=True):
        n = common_prefix(a, b)
        if numerics.common_tokens == 1:
            assert len(tokens(a)) == len(tokens(b))
        if same_authors:
            assert mask(a)[:n] == mask(b)[:n]
        models = ("senior", "junior") if same_authors else ("author",)
        for model in models:
            # Compares the common prefix alone: behind it the models read different tokens.
            x, y = logprobs(a, model)[:n], logprobs(b, model)[:n]
            np.testing.assert_allclose(x, y, rtol=0, atol=numerics.atol)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_likeliest_tokens_are_those_of_the_author(numerics, rollout, temperature):
    sampling = GREEDY | {"temperature": temperature}
    plain = prompts(4, TANDEM["word"], sampling=sampling, num_samples=2)
    asked = [dataclasses.replace(prompt, num_top_logprobs=5) for prompt in plain]
    samples = flat(rollout.generate(asked))
    assert_same_samples(numerics, samples, flat(rollout.generate(plain)))
    scores = rollout.score(
        [response_to_score(t) for t in samples],
        junior=True,
        temperature=temperature or None,
        num_top_logprobs=5,
    )
    for t, score in zip(samples, scores.sequences, strict=True):
        ids, values = from_tensor(t.top_token_ids), from_tensor(t.top_logprobs)
        assert ids.shape == values.shape == (len(tokens(t)), 5)
        assert (np.diff(values) <= 0).all()
        assert (np.exp(values).sum(1) <= 1 + 1e-5).all()
        if temperature == 0:
            assert ids[:, 0].tolist() == tokens(t)
            np.testing.assert_array_equal(values[:, 0], logprobs(t, "author"))
        senior = np.array(mask(t), bool)[:, None]
        scored = np.where(
            senior, from_tensor(score.senior_top_logprobs), from_tensor(score.junior_top_logprobs)
        )
        np.testing.assert_allclose(values, scored, rtol=0, atol=numerics.atol)
        if numerics.common_tokens == 1:
            scored_ids = np.where(
                senior,
                from_tensor(score.senior_top_token_ids),
                from_tensor(score.junior_top_token_ids),
            )
            np.testing.assert_array_equal(ids, scored_ids)


def test_law_1_equal_models_write_greedily_what_the_senior_writes_alone(numerics, self_paired):
    with harness.rollout_client(self_paired) as client:
        alone = flat(client.generate(prompts(5, {"enabled": False}, sampling=GREEDY)))
        for strategy in STRATEGIES:
            for prob_senior in (0.0, 0.3, 1.0):
                tandem = TANDEM[strategy] | {"prob_senior": prob_senior}
                together = flat(client.generate(prompts(5, tandem, sampling=GREEDY)))
                assert_same_samples(numerics, together, alone, same_authors=False)


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_senior_is_tandem_switched_off(numerics, rollout, strategy):
    off = flat(rollout.generate(prompts(5, {"enabled": False}, num_samples=3)))
    tandem = TANDEM[strategy] | {"prob_senior": 1.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=3)))
    assert_same_samples(numerics, certain, off)
    for t in (*off, *certain):
        assert mask(t) == [1] * len(tokens(t))


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_junior_is_the_junior_alone(numerics, rollout, junior_alone, strategy):
    tandem = TANDEM[strategy] | {"prob_senior": 0.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=2)))
    with harness.rollout_client(junior_alone) as client:
        alone = flat(client.generate(prompts(5, {"enabled": False}, num_samples=2)))
    assert_same_samples(numerics, certain, alone, same_authors=False)
    for t in certain:
        assert mask(t) == [0] * len(tokens(t))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_3_a_sample_does_not_depend_on_its_company(numerics, rollout, strategy):
    batch = prompts(6, TANDEM[strategy], num_samples=3, return_other_logprobs=True)
    together = rollout.generate(batch)
    backwards = rollout.generate(batch[::-1])[::-1]
    alone = [rollout.generate([prompt])[0] for prompt in batch]
    for other in (backwards, alone):
        assert_same_samples(numerics, flat(together), flat(other))


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 2},
        {"max_batched_tokens": 5},
        {"compute": {"num_threads": 2}},
        {},
    ],
    ids=["few-sequences", "chunked-prefill", "two-threads", "restarted"],
)
def test_law_3_a_sample_does_not_depend_on_the_servers_limits(
    numerics, rollout, models, tmp_path, config
):
    batch = prompts(5, TANDEM["word"], num_samples=2, return_other_logprobs=True)
    expected = flat(rollout.generate(batch))
    with (
        harness.cluster(tmp_path, models, rollout=numerics.settings(**config)) as running,
        harness.rollout_client(running) as client,
    ):
        assert_same_samples(numerics, flat(client.generate(batch)), expected)


def test_law_3_a_batch_does_not_depend_on_its_split_into_messages(rollout):
    batch = prompts(6, TANDEM["word"], num_samples=3, return_other_logprobs=True)

    def generate(sizes):
        messages, begin = [], 0
        for size in sizes:
            submit = rollout_pb2.SubmitPrompts(more_follow=begin + size < len(batch))
            for index in range(begin, begin + size):
                submit.prompts.append(batch[index].named(index).message())
            messages.append(rollout_pb2.GenerateRequest(submit=submit))
            begin += size
        events = [e.finished for e in rollout.stream(messages)]
        return [
            (e.request_id, e.trajectory.SerializeToString(deterministic=True))
            for e in events
            if e.request_id
        ]

    at_once = generate([6])
    assert len(at_once) == 18
    # The order of events is the same, too: a batch is scheduled at once.
    assert generate([1, 2, 3]) == at_once
    assert generate([1] * 6) == at_once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_4_the_mask_follows_from_tokens_configuration_and_seed(rollout, strategy):
    info = rollout.info()
    # Boundary ids that do occur: the tiny models seldom write the default ones.
    own = list(range(2, 90))
    for tandem in (TANDEM[strategy], TANDEM[strategy] | {"boundary_token_ids": own}):
        samples = flat(rollout.generate(prompts(6, tandem, num_samples=4)))
        for t in samples:
            assert mask(t) == derived_mask(t, info)
    # A response without an environment is one turn, the senior's.
    expected = {1} if strategy == "turn" else {0, 1}
    assert {author for t in samples for author in mask(t)} == expected


def test_default_boundary_sets_are_what_the_tokenizer_says(rollout, models):
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
def test_law_5_lazy_lanes_equal_both_models_on_every_token(numerics, rollout, strategy):
    samples = flat(
        rollout.generate(prompts(5, TANDEM[strategy], num_samples=2, return_other_logprobs=True))
    )
    scores = rollout.score([response_to_score(t) for t in samples], junior=True)
    for t, score in zip(samples, scores.sequences, strict=True):
        for model in ("senior", "junior"):
            expected = from_tensor(getattr(score, f"{model}_logprobs"))
            np.testing.assert_allclose(logprobs(t, model), expected, rtol=0, atol=numerics.atol)


def test_law_5_asking_for_both_changes_neither_tokens_nor_authors(numerics, rollout):
    plain = flat(rollout.generate(prompts(5, TANDEM["word"], num_samples=2)))
    both = flat(
        rollout.generate(prompts(5, TANDEM["word"], num_samples=2, return_other_logprobs=True))
    )
    assert not any(t.HasField("other_logprobs") for t in plain)
    for t in both:
        t.ClearField("other_logprobs")
    assert_same_samples(numerics, plain, both)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_6_every_list_has_one_entry_per_token(rollout, strategy):
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
        assert np.all(from_tensor(t.log_keep_mass) <= 0)
        assert t.junior_version


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_recorded_log_probs_are_those_of_transformers(numerics, rollout, models, temperature):
    sampling = {"max_tokens": 20, "temperature": temperature, "top_p": 0.9}
    batch = prompts(5, TANDEM["word"], sampling=sampling, return_other_logprobs=True)
    for t in flat(rollout.generate(batch)):
        for model, directory in (("senior", models.senior), ("junior", models.junior)):
            expected = harness.reference_logprobs(
                directory, t.prompt_token_ids, tokens(t), temperature or 1.0
            )
            atol = numerics.reference_atol / (temperature or 1)
            np.testing.assert_allclose(logprobs(t, model), expected, rtol=0, atol=atol)


def test_a_publication_does_not_wait_for_scores(models, tmp_path):
    """Waiting is counted in forward passes: behind one score it would take all of the score's.

    The exact bound, two steps and one slice, is tested with the engine; here, passes go by while
    the counter is read over HTTP.
    """
    sequence = rollout_pb2.ScoreSequence(token_ids=[7] * 120, first_scored_token=1)
    request = rollout_pb2.ScoreRequest(senior=True)
    request.sequences.extend([sequence] * (4_000_000 // (sequence.ByteSize() + 3)))
    max_batched_tokens = 480
    passes_of_a_score = 120 * len(request.sequences) // max_batched_tokens
    settings = {"max_batched_tokens": max_batched_tokens}
    with (
        harness.cluster(tmp_path, models, rollout=settings, trainer={}) as running,
        harness.trainer_client(running) as trainer,
        harness.rollout_client(running) as rollout,
        grpc.insecure_channel(running.rollouts[0].address) as channel,
    ):
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        scores = [stub.Score.future(request, timeout=600) for _ in range(4)]

        def passes() -> float:
            return harness.gauge(running.rollouts[0], "tandem_forward_passes_total")

        harness.wait_until(lambda: passes() >= 8)
        samples = [SupervisedSample([5, 6], [7, 8])] * 3
        trainer.train_step(samples, run_id="r", step=1, expected_version=0, objective={})
        before = passes()
        trainer.publish_weights([running.rollouts[0].address])
        assert passes() - before < passes_of_a_score / 2
        [[t]] = rollout.generate(prompts(1, TANDEM["word"]))
        assert [run.weights.version for run in t.senior_versions] == [1]
        before = passes()
        for _ in range(20):
            assert rollout.info().server.weights.version == 1
        assert passes() - before < passes_of_a_score / 2
        assert not any(score.done() for score in scores)
        for score in scores:
            score.cancel()
