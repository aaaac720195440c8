"""Warnings about runs that look healthy for hours and cannot learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.settings.run import RunSettings

# Number of steps without variance in the rewards after which a warning is due.
FLAT_STEPS = 3
# Estimators that compare the responses of different prompts.
UNGROUPED = frozenset({"gae", "reinforce_plus_plus"})


def obstacles(settings: RunSettings) -> list[str]:
    """Returns the known reasons why a policy-gradient run with these settings cannot learn."""
    found = []
    estimator = _estimator(settings)
    tandem = settings.tandem
    coins = tandem.enabled and tandem.selection_strategy in (None, "bernoulli", "word")
    # A teacher says something of every response, whatever its reward.
    by_reward = not settings.distils and estimator not in UNGROUPED
    mixed = coins and tandem.prob_senior not in (0, 1)
    if settings.sampling.temperature == 0 and by_reward and not mixed:
        found.append(
            "sampling.temperature: 0: all responses to a prompt are the same, and each gets "
            "advantage 0"
        )
    if settings.batch.samples_per_prompt == 1 and by_reward:
        found.append(
            f"batch.samples_per_prompt: 1: {estimator} compares the responses to a prompt, and a "
            "single one gets advantage 0"
        )
    if all(one.function == "none" for one in settings.reward_functions):
        if settings.batch.filter_groups is not None:
            found.append("batch.filter_groups: drops every group of reward.function: none")
        elif not (settings.distils or settings.objective.junior_kl_coefficient):
            found.append(
                "reward.function: none: every response gets 0, and there is no teacher to learn "
                "from (objective.distillation)"
            )
    if coins and tandem.prob_senior == 0 and not settings.objective.junior_token_loss_weight:
        found.append(
            "tandem.prob_senior: 0: the junior writes every token, but "
            "objective.junior_token_loss_weight gives them no weight"
        )
    return found


class FlatRewards:
    """Notices that no group of the first steps had rewards that differ."""

    def __init__(self, settings: RunSettings) -> None:
        self._distils = settings.distils
        self._by_group = _estimator(settings) not in UNGROUPED
        self._steps = 0
        self._varied = False

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Takes a line of metrics.jsonl; a warning after FLAT_STEPS steps without variance."""
        if self._distils or line["reward/min"] is None:
            return None  # A teacher is learnt from, or no response has a reward.
        self._steps += 1
        if self._by_group:
            self._varied |= line["reward/frac_zero_std"] < 1
        else:
            self._varied |= line["reward/min"] < line["reward/max"]
        if self._varied or self._steps != FLAT_STEPS:
            return None
        where = "to the same prompt " if self._by_group else ""
        return (
            f"after {FLAT_STEPS} steps all responses {where}have had the same reward: there is "
            "nothing to learn from; is the reward function right, is the task too hard or too easy?"
        )


def _estimator(settings: RunSettings) -> str:
    return settings.objective.advantage_estimator or "group_relative"
