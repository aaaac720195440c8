"""A step is the same whether trainer, junior or another server gives the reference policy."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from harness import TANDEM, flat, logprobs, prompts
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.session.reference import JuniorReference

KL = {"kl_coefficient": 0.1, "kl_estimator": "k3"}


def first_step(directory, models, *, reference="trainer", trainer=None, objective=None, **changes):
    """Metrics of the first step of a run on servers of its own, the rollout one with a junior."""
    with harness.cluster(directory / "cluster", models, trainer=trainer or {}) as running:
        config = harness.run_settings(
            directory,
            models,
            running,
            steps=1,
            reference=reference,
            objective=KL | (objective or {}),
            **changes,
        )
        [line] = harness.metrics_without_clock(harness.run_training(config))
    return line


@pytest.fixture(scope="module")
def by_the_trainer(models, tmp_path_factory):
    """Steps by placement of the KL; the trainer's reference model has the junior's weights."""
    made = {}

    def step(placement):
        if placement not in made:
            made[placement] = first_step(
                tmp_path_factory.mktemp(placement),
                models,
                trainer={"reference_model": str(models.junior)},
                objective={"kl_placement": placement},
            )
        return made[placement]

    return step


def require_same_step(line, expected):
    """Fails unless loss, KL and gradient are those that the trainer's own reference gives."""
    assert expected["policy/kl_to_ref"] > 0.1
    assert line.keys() == expected.keys()
    keys = ["loss/total", "policy/kl_to_ref", "policy/grad_norm"]
    keys.append("loss/kl" if expected["reward/kl_penalty"] is None else "reward/kl_penalty")
    for key in keys:
        assert abs(expected[key]) > 1e-3, key
        assert line[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("recorded", [True, False])
def test_the_junior_gives_the_step_of_a_reference_model_with_its_weights(
    by_the_trainer, models, tmp_path, recorded, placement
):
    line = first_step(
        tmp_path,
        models,
        reference="junior",
        return_other_logprobs=recorded,
        objective={"kl_placement": placement},
    )
    require_same_step(line, by_the_trainer(placement))


def test_another_rollout_server_gives_the_step_of_a_reference_model_with_its_weights(
    by_the_trainer, models, tmp_path
):
    alone = {"senior_model": str(models.junior), "junior_model": ""}
    with harness.cluster(tmp_path / "reference", models, rollout=alone) as running:
        [server] = running.rollouts
        line = first_step(tmp_path, models, reference=server.address)
    require_same_step(line, by_the_trainer("loss"))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_recorded_log_probs_of_the_junior_are_those_of_score(models, tmp_path, temperature):
    sampling = {"max_tokens": 24, "temperature": temperature}
    with (
        harness.cluster(tmp_path, models) as running,
        harness.rollout_client(running) as client,
    ):
        both = flat(
            client.generate(
                prompts(4, TANDEM["word"], sampling=sampling, return_other_logprobs=True)
            )
        )
        plain = flat(client.generate(prompts(4, TANDEM["word"], sampling=sampling)))
        pool = RolloutPool([Replica.of(client, client.info())])
        recorded, scored = (JuniorReference(pool).logprobs(some) for some in (both, plain))
        pool.close()
    for response, first, second in zip(both, recorded, scored, strict=True):
        np.testing.assert_array_equal(first, logprobs(response, "junior"))
        np.testing.assert_array_equal(first, second)
