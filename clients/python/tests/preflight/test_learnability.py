"""Settings and rewards that a run cannot learn from are found."""

from pathlib import Path

import pytest

from tandem.preflight.learnability import FlatRewards, obstacles
from tandem.settings.run import DataSettings, RunSettings


def settings(**sections):
    return RunSettings(
        run_dir="run", tokenizer="model", data=DataSettings(jsonl=Path("rows")), **sections
    )


DISTILS = {"objective": {"distillation": {"coefficient": 1.0}}, "teachers": {"t": "junior"}}


def test_settings_that_cannot_learn_are_named(subtests):
    for sections, named in [
        ({"sampling": {"temperature": 0}, "tandem": {"enabled": False}}, "sampling.temperature"),
        (
            {"sampling": {"temperature": 0}, "tandem": {"selection_strategy": "sentence"}},
            "sampling.temperature",
        ),
        ({"sampling": {"temperature": 0}, "tandem": {"prob_senior": 1}}, "sampling.temperature"),
        ({"batch": {"samples_per_prompt": 1}}, "batch.samples_per_prompt"),
        (
            {
                "batch": {"samples_per_prompt": 1},
                "objective": {"advantage_estimator": "leave_one_out"},
            },
            "batch.samples_per_prompt",
        ),
        ({"tandem": {"prob_senior": 0}}, "tandem.prob_senior"),
        ({"reward": {"function": "none"}}, "reward.function"),
        (
            {"reward": {"function": "none"}, "batch": {"filter_groups": {}}, **DISTILS},
            "batch.filter_groups",
        ),
    ]:
        with subtests.test(sections=sections, named=named):
            [obstacle] = obstacles(settings(**sections))
            assert obstacle.startswith(f"{named}: ")


def test_settings_that_can_learn_are_left_alone(subtests):
    for sections in [
        {},
        # The authors are drawn: the responses to a prompt differ.
        {"sampling": {"temperature": 0}},
        {"sampling": {"temperature": 0}, "tandem": {"selection_strategy": "word"}},
        {
            "sampling": {"temperature": 0},
            "tandem": {"enabled": False},
            "objective": {"advantage_estimator": "gae"},
        },
        {"batch": {"samples_per_prompt": 1}, "objective": {"advantage_estimator": "gae"}},
        {
            "batch": {"samples_per_prompt": 1},
            "objective": {"advantage_estimator": "reinforce_plus_plus"},
        },
        {"tandem": {"prob_senior": 0}, "objective": {"junior_token_loss_weight": 0.5}},
        {"tandem": {"prob_senior": 0, "selection_strategy": "alternating"}},
        {"tandem": {"prob_senior": 0, "enabled": False}},
        # A teacher says something of every response.
        {"reward": {"function": "none"}, **DISTILS},
        {"batch": {"samples_per_prompt": 1}, "sampling": {"temperature": 0}, **DISTILS},
        {"reward": {"function": "none"}, "objective": {"junior_kl_coefficient": 0.1}},
    ]:
        with subtests.test(sections=sections):
            assert obstacles(settings(**sections)) == []


def line(zero_std, low=0.0, high=1.0):
    return {"reward/frac_zero_std": zero_std, "reward/min": low, "reward/max": high}


def test_groups_without_variance_in_the_first_steps_are_told_once():
    flat = FlatRewards(settings())
    told = [flat.add(line(1.0)) for _ in range(6)]
    assert [text is not None for text in told] == [False, False, True, False, False, False]
    assert "to the same prompt" in told[2]


def test_a_single_group_with_variance_is_enough():
    flat = FlatRewards(settings())
    assert [flat.add(line(share)) for share in (1.0, 0.9, 1.0, 1.0)] == [None] * 4


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_without_groups_rewards_may_be_equal_within_a_prompt(estimator):
    ungrouped = settings(objective={"advantage_estimator": estimator})
    flat = FlatRewards(ungrouped)
    assert [flat.add(line(1.0)) for _ in range(4)] == [None] * 4
    flat = FlatRewards(ungrouped)
    assert [flat.add(line(1.0, 1.0, 1.0)) is None for _ in range(4)] == [True, True, False, True]


def test_a_run_with_a_teacher_needs_no_rewards_that_differ():
    flat = FlatRewards(settings(**DISTILS))
    assert [flat.add(line(1.0, 0.0, 0.0)) for _ in range(5)] == [None] * 5
