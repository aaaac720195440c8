"""The cluster that a run starts itself: planned, and checked with the run's settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tandem.cluster.plan import learner_of, planned, trains, uses_of
from tandem.errors import ConfigError
from tandem.models.files import end_token_ids
from tandem.preflight import checks
from tandem.preflight.inputs import Inputs
from tandem.preflight.planned_cluster import check_cluster
from tandem.preflight.problems import Problems
from tandem.preflight.schedules import check_schedules, notes_on_schedules, with_run_settings
from tandem.preflight.vocabulary import warn_of_end_token
from tandem.settings.cluster import ClusterSettings
from tandem.settings.lanes import lane_setting

_log = logging.getLogger(__name__)


def plan_cluster(
    cluster: ClusterSettings, inputs: Inputs, problems: Problems, *, dry_run: bool
) -> tuple[ClusterSettings, dict[str, Any]]:
    """Returns the cluster as the run starts it, once its servers have checked themselves.

    Also returns the sections of the settings with the servers' defaults.
    """
    settings, purpose = inputs.settings, inputs.purpose
    uses = uses_of(settings, purpose)
    with problems.collect():
        cluster = with_run_settings(cluster, settings, purpose)
    plan = planned(cluster, uses)
    if trains(purpose):
        problems.errors.extend(check_schedules(plan, settings, purpose))
        notes_on_schedules(plan, settings, purpose)
    for role in ("rollout", "trainer", "critic"):
        if getattr(settings.servers, role) is not None:
            _log.info(f"servers.{role} is not used: the run starts the servers of `cluster`")
    # A server without work in this run is not a mistake: only a dry run notes it.
    if dry_run and cluster.critic is not None and not uses.critic:
        _log.info(
            "this run needs no critic (objective.advantage_estimator: gae does), so "
            "cluster.critic is not used"
        )
    if dry_run and cluster.rollout and not uses.rollout:
        _log.info(
            "this run draws no responses (evaluations and sft.responses: senior do), so "
            "cluster.rollout is not used"
        )
    if dry_run and cluster.trainer is not None and not uses.trainer:
        _log.info("this run trains only the critic, so cluster.trainer is not used")
    learner = learner_of(purpose)
    for role in ["rollout", learner] if uses.rollout else [learner]:
        if getattr(plan, role) in (None, []):
            problems.errors.append(ConfigError(f"cluster.{role}: a run needs a {role} server"))
    objective = settings.policy_objective() if purpose == "train" else None
    checked = check_cluster(plan, objective, inputs.codec, problems, uses_junior=uses.junior)
    plan = checked.cluster
    with problems.collect():
        _warn_of_end_tokens(plan, inputs, problems)
    if checked.servers is not None:
        checks.check_servers(settings, purpose, checked.servers, inputs.data_sets, problems)
    with problems.collect():
        checks.check_importance_weights(settings, checked.objective)
    in_force = {"cluster": plan.model_dump(mode="json", exclude_none=True)}
    in_force |= checks.in_force(settings, purpose, checked.servers, checked.objective)
    return plan, in_force


def _warn_of_end_tokens(plan: ClusterSettings, inputs: Inputs, problems: Problems) -> None:
    """Warns of an end token of the tokenizer that ends no response of the cluster's models."""
    models = [((plan.trainer or {}).get("model"), None)]
    models += [
        (lane_setting(one, "senior", "model"), lane_setting(one, "junior", "model"))
        for one in plan.rollout
    ]
    for senior, junior in dict.fromkeys(models):
        if senior and (Path(senior) / "config.json").exists():
            ending = end_token_ids(Path(senior))
            # A server ends a response at the tokens of both.
            ending |= end_token_ids(Path(junior)) if junior else set()
            warn_of_end_token(inputs, ending, str(senior), problems)
