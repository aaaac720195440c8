"""The laws of tandem rollouts for a senior of another family than its junior.

The servers compute with the CPU's own kernels, so that everything is the same to the bit.
"""

from __future__ import annotations

import dataclasses
import subprocess

import harness
import numpy as np
import pytest
from family_models import SENIORS, make_senior
from harness import (
    STRATEGIES,
    TANDEM,
    assert_same_bits,
    derived_mask,
    flat,
    logprobs,
    mask,
    prompts,
    tokens,
)
from tandem.cluster.local import find_binary
from tandem.pool.rollout_pool import response_to_score
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.rpc.wire import from_tensor

GREEDY = {"max_tokens": 24, "temperature": 0.0}
OFF = {"enabled": False}


@pytest.fixture(scope="module", params=SENIORS)
def pair(request, models, tmp_path_factory):
    """The models of a run whose senior is of another family than its junior."""
    folder = tmp_path_factory.mktemp(request.param)
    return dataclasses.replace(
        models, senior=make_senior(folder / "senior", request.param, models.junior)
    )


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    """All three servers, whose tests leave versions as they were."""
    folder = tmp_path_factory.mktemp("server")
    with harness.cluster(folder, pair, trainer={}, critic={}) as running:
        yield running


@pytest.fixture
def rollout(server):
    with harness.rollout_client(server) as client:
        yield client


@pytest.fixture
def trainer(server):
    with harness.trainer_client(server) as client:
        yield client
        client.load_base_model()


@pytest.fixture(scope="module")
def junior_alone(models, tmp_path_factory):
    alone = dataclasses.replace(models, senior=models.junior)
    with (
        harness.cluster(
            tmp_path_factory.mktemp("junior"), alone, rollout={"junior_model": ""}
        ) as running,
        harness.rollout_client(running) as client,
    ):
        yield client


def assert_same_responses(ours, theirs, *models):
    """Fails unless tokens are the same, and log-probs under `models` have the same bits."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert tokens(a) == tokens(b)
        for model in models:
            np.testing.assert_array_equal(logprobs(a, model), logprobs(b, model))


def samples_of(trajectories):
    return [
        PolicySample(t, f"g{i // 3}", reward=float(i % 3) - 0.2 * (i // 3))
        for i, t in enumerate(trajectories)
    ]


def step(trainer, samples, number=1, version=0, **objective):
    return trainer.train_step(
        samples, run_id="r", step=number, expected_version=version, objective=objective
    ).report


def test_law_1_equal_models_write_greedily_what_the_senior_writes_alone(pair, tmp_path):
    same = dataclasses.replace(pair, junior=pair.senior)
    with harness.cluster(tmp_path, same) as running, harness.rollout_client(running) as client:
        alone = flat(client.generate(prompts(5, OFF, sampling=GREEDY)))
        for strategy in STRATEGIES:
            for prob_senior in (0.0, 0.3, 1.0):
                tandem = TANDEM[strategy] | {"prob_senior": prob_senior}
                together = flat(client.generate(prompts(5, tandem, sampling=GREEDY)))
                assert_same_responses(together, alone, "author")


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_senior_is_tandem_switched_off(rollout, trainer, strategy):
    off = flat(rollout.generate(prompts(5, OFF, num_samples=3)))
    tandem = TANDEM[strategy] | {"prob_senior": 1.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=3)))
    assert_same_responses(certain, off, "senior")
    for t in (*off, *certain):
        assert mask(t) == [1] * len(tokens(t))
    steps = []
    for trajectories in (off, certain):
        trainer.load_base_model()
        report = step(trainer, samples_of(trajectories))
        assert report.metrics["policy/grad_norm"] > 0
        steps.append((dict(report.metrics), report.weights.digest))
    for metrics, _ in steps:
        for name in [name for name in metrics if name.startswith("time/")]:
            del metrics[name]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
def test_law_2_a_certain_junior_is_the_junior_alone(rollout, trainer, junior_alone, strategy):
    tandem = TANDEM[strategy] | {"prob_senior": 0.0}
    certain = flat(rollout.generate(prompts(5, tandem, num_samples=3, return_other_logprobs=True)))
    alone = flat(junior_alone.generate(prompts(5, OFF, num_samples=3)))
    assert_same_responses(certain, alone, "author")
    for t in certain:
        assert mask(t) == [0] * len(tokens(t))
    before = trainer.info()
    report = step(trainer, samples_of(certain), junior_token_loss_weight=0.0)
    assert report.skipped
    assert report.skip_reason
    assert trainer.info().server.weights == before.server.weights
    assert trainer.info().optimizer_steps == before.optimizer_steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_3_a_sample_does_not_depend_on_its_company(rollout, strategy):
    batch = prompts(6, TANDEM[strategy], num_samples=3, return_other_logprobs=True)
    together = flat(rollout.generate(batch))
    assert_same_bits(flat(rollout.generate(batch[::-1])[::-1]), together)
    assert_same_bits([t for p in batch for t in flat(rollout.generate([p]))], together)


def test_law_3_a_sample_does_not_depend_on_the_servers_limits(rollout, pair, tmp_path):
    batch = prompts(5, TANDEM["word"], num_samples=2, return_other_logprobs=True)
    expected = flat(rollout.generate(batch))
    # Few sequences, prompts in chunks of five tokens, two threads, another process.
    limits = {"max_num_seqs": 2, "max_batched_tokens": 5, "compute": {"num_threads": 2}}
    with (
        harness.cluster(tmp_path, pair, rollout=limits) as running,
        harness.rollout_client(running) as client,
    ):
        assert_same_bits(flat(client.generate(batch)), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_laws_4_and_6_the_mask_follows_from_the_request(rollout, strategy):
    info = rollout.info()
    # Boundary ids that do occur: the tiny models seldom write the default ones.
    tandem = TANDEM[strategy] | {"boundary_token_ids": list(range(2, 90))}
    samples = []
    for config in (TANDEM[strategy], tandem):
        samples = flat(rollout.generate(prompts(6, config, num_samples=4)))
        for t in samples:
            assert mask(t) == derived_mask(t, info)
            assert len(mask(t)) == len(logprobs(t, "author")) == len(tokens(t))
            assert sum(run.count for run in t.senior_versions) == len(tokens(t))
    # A response without an environment is one turn, the senior's.
    expected = {1} if strategy == "turn" else {0, 1}
    assert {author for t in samples for author in mask(t)} == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_law_5_lazy_lanes_equal_both_models_on_every_token(rollout, pair, strategy):
    samples = flat(
        rollout.generate(prompts(5, TANDEM[strategy], num_samples=2, return_other_logprobs=True))
    )
    scores = rollout.score([response_to_score(t) for t in samples], junior=True)
    for t, score in zip(samples, scores.sequences, strict=True):
        for model in ("senior", "junior"):
            expected = from_tensor(getattr(score, f"{model}_logprobs"))
            np.testing.assert_array_equal(logprobs(t, model), expected)
    for t in samples[::3]:
        for model in ("senior", "junior"):
            expected = harness.reference_logprobs(
                getattr(pair, model), t.prompt_token_ids, tokens(t)
            )
            np.testing.assert_allclose(logprobs(t, model), expected, rtol=0, atol=2e-4)


def test_the_trainer_and_the_critic_compute_alike_alone_and_together(rollout, trainer, server):
    trajectories = flat(
        rollout.generate(prompts(4, TANDEM["word"], num_samples=2, return_other_logprobs=True))
    )
    asked = [SupervisedSample(t.prompt_token_ids, tokens(t)) for t in trajectories]
    replies = trainer.compute_log_probs(asked)
    for t, reply in zip(trajectories, replies, strict=True):
        np.testing.assert_array_equal(from_tensor(reply.logprobs), logprobs(t, "senior"))
    with harness.critic_client(server) as critic:
        together = [from_tensor(reply.values) for reply in critic.compute_values(asked)]
        for one, expected in zip(asked, together, strict=True):
            [alone] = critic.compute_values([one])
            np.testing.assert_array_equal(from_tensor(alone.values), expected)


def test_training_goes_on_from_a_checkpoint(rollout, trainer, pair, tmp_path):
    samples = samples_of(flat(rollout.generate(prompts(2, TANDEM["word"], num_samples=3))))
    first = step(trainer, samples)
    saved = trainer.save_checkpoint(str(tmp_path), "one")
    stale = {"max_staleness": 1}
    second = step(trainer, samples, number=2, version=1, **stale)
    assert second.weights.digest != first.weights.digest
    loaded = trainer.load_checkpoint(saved)
    assert (loaded.version, loaded.digest) == (1, first.weights.digest)
    assert step(trainer, samples, number=2, version=1, **stale).weights == second.weights
    trainer.export_model(str(tmp_path / "exported"))
    names = harness.weights(tmp_path / "exported").keys()
    assert names == harness.weights(pair.senior).keys()


def test_a_model_is_no_speculator_of_its_own(pair):
    """DeepSeek-V3's layers for multi-token prediction are refused with it."""
    done = subprocess.run(
        [
            find_binary("tandem-rollout-server"),
            "--check-config",
            f"senior_model={pair.senior}",
            f"senior_speculator={pair.senior}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "senior_speculator" in done.stderr
    assert "ForCausalLM is not supported" in done.stderr
