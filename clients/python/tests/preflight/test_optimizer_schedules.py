"""A run's length and rate reach the servers of its cluster, and its schedules fit its length."""

from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.preflight.schedules import check_schedules, notes_on_schedules, with_run_settings
from tandem.settings.loading import validate
from tandem.settings.run import RunSettings


def run(**values: Any) -> RunSettings:
    base = {
        "run_dir": "run",
        "tokenizer": "model",
        "data": {"reasoning_gym": {"name": "chain_sum"}},
        "cluster": {
            "model": "model",
            "rollout": {},
            "trainer": {},
            "critic": {},
        },
    }
    return validate(RunSettings, base | values, "run.yaml")


def optimizer(**fields: Any) -> dict[str, Any]:
    return {"model": "model", "rollout": {}, "trainer": {"optimizer": fields}}


def planned_of(settings: RunSettings, purpose: Any = "train"):
    assert settings.cluster is not None
    return with_run_settings(settings.cluster, settings, purpose)


def test_a_schedule_without_an_end_ends_with_the_runs_updates() -> None:
    settings = run(
        steps=6,
        objective={"num_mini_batches": 2, "num_epochs": 3},
        cluster=optimizer(schedule="cosine"),
    )
    assert planned_of(settings).trainer["optimizer"]["total_steps"] == 36
    assert planned_of(settings, "sft").trainer["optimizer"]["total_steps"] == 6


def test_schedules_of_critic_and_speculator_end_with_the_run_too() -> None:
    linear = {"schedule": "linear", "learning_rate": 1e-5}
    settings = run(
        steps=5,
        cluster={
            "model": "model",
            "rollout": {},
            "trainer": {"speculator": {"adapter": "mlp", "optimizer": linear}},
            "critic": {"optimizer": linear},
        },
    )
    cluster = planned_of(settings)
    assert cluster.trainer["speculator"]["optimizer"]["total_steps"] == 5
    assert cluster.critic["optimizer"]["total_steps"] == 5
    assert "optimizer" not in cluster.trainer


def test_an_evaluation_changes_no_schedule() -> None:
    settings = run(cluster=optimizer(schedule="cosine"))
    assert "total_steps" not in planned_of(settings, "eval").trainer["optimizer"]


@pytest.mark.parametrize(
    ("steps", "objective", "total", "fits"),
    [
        (6, {}, 6, True),
        (6, {"num_mini_batches": 4}, 6, False),
        (6, {"num_epochs": 2}, 11, False),
        (6, {"num_mini_batches": 2, "num_epochs": 2}, 24, True),
        (12, {}, 6, False),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused(steps, objective, total, fits) -> None:
    settings = run(
        steps=steps, objective=objective, cluster=optimizer(schedule="linear", total_steps=total)
    )
    found = list(check_schedules(planned_of(settings), settings, "train"))
    assert not found if fits else "cluster.trainer.optimizer.total_steps" in found[0].message


def test_the_error_names_the_step_in_which_the_rate_is_zero() -> None:
    settings = run(
        steps=6,
        objective={"num_mini_batches": 4},
        cluster=optimizer(schedule="cosine", total_steps=6),
    )
    [error] = check_schedules(planned_of(settings), settings, "train")
    assert "ends after 6 optimizer updates, in step 2, with learning rate 0" in error.message
    assert "24 (6 steps of 4)" in error.message


def test_a_floor_is_noted_instead(notes) -> None:
    settings = run(
        steps=8,
        cluster=optimizer(schedule="linear", total_steps=6, min_learning_rate=1e-7),
    )
    assert not list(check_schedules(planned_of(settings), settings, "train"))
    notes_on_schedules(planned_of(settings), settings, "train")
    assert "the last 2 have min_learning_rate" in notes[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"warmup_steps": 10}, "it ends before learning_rate is reached"),
        ({"schedule": "linear", "total_steps": 99}, "does not reach its end"),
        ({"learning_rate": 0}, "the run changes no weight"),
    ],
)
def test_schedules_that_surprise_are_noted(fields, said, notes) -> None:
    settings = run(steps=10, cluster=optimizer(**fields))
    notes_on_schedules(planned_of(settings), settings, "train")
    assert said in notes[0]


def test_a_section_that_is_no_mapping_is_left_to_the_server() -> None:
    settings = run(
        learning_rate=1e-5, cluster={"model": "model", "rollout": {}, "trainer": {"optimizer": 3}}
    )
    assert planned_of(settings).trainer["optimizer"] == 3


def test_the_runs_rate_and_length_reach_the_servers() -> None:
    cluster = planned_of(run(learning_rate=1e-5, max_model_len=512))
    assert cluster.trainer == {"optimizer": {"learning_rate": 1e-5}, "max_model_len": 512}
    assert [one["max_model_len"] for one in cluster.rollout] == [512]
    assert cluster.critic == {"max_model_len": 512}
    # A reward model is the critic's.
    cluster = planned_of(run(learning_rate=1e-5), "reward-model")
    assert cluster.critic == {"optimizer": {"learning_rate": 1e-5}}
    assert "optimizer" not in cluster.trainer


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"learning_rate": 1e-5, "cluster": optimizer(learning_rate=1e-6)}, "learning_rate"),
        (
            {
                "max_model_len": 512,
                "cluster": {"model": "m", "rollout": [{}, {"max_model_len": 256}], "trainer": {}},
            },
            r"cluster.rollout.1.max_model_len is 256",
        ),
        (
            {
                "max_model_len": 512,
                "cluster": {"model": "m", "rollout": {"senior": {"max_model_len": 256}}}
                | {"trainer": {}},
            },
            r"cluster.rollout.senior.max_model_len is 256",
        ),
    ],
)
def test_two_values_of_one_setting_are_refused(values, named) -> None:
    with pytest.raises(ConfigError, match=named):
        planned_of(run(**values))


def test_running_servers_have_their_own_rate() -> None:
    with pytest.raises(ConfigError, match="running servers have their own"):
        run(learning_rate=1e-5, cluster=None)


def test_epochs_become_steps(subtests) -> None:
    for values, rows, steps in [
        ({}, 100, 10),
        ({"steps": 3}, 100, 3),
        ({"epochs": 2}, 100, 25),
        ({"epochs": 0.5}, 100, 7),
        ({"epochs": 1}, 3, 1),
        ({"epochs": 2, "steps": 5}, 100, 5),
        ({"epochs": 1, "steps": 50}, 100, 13),
    ]:
        with subtests.test(values=values, rows=rows, steps=steps):
            settings = run(batch={"prompts_per_step": 8}, **values)
            assert settings.with_steps_of(rows, "train").steps == steps


def test_epochs_of_supervised_training_count_its_batches() -> None:
    settings = run(epochs=1, sft={"batch_size": 4})
    assert settings.with_steps_of(10, "sft").steps == 3
