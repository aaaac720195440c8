"""The settings that a run gives the servers of its cluster, and the schedules of their optimizers.

A server's schedule counts optimizer updates, a run counts steps: here is the one place that
translates the two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tandem._proto.config.v1 import optimizer_info_pb2, server_config_pb2
from tandem.cluster.plan import learner_of, trains
from tandem.errors import ConfigError
from tandem.settings.cluster import ClusterSettings
from tandem.settings.lanes import lane_setting
from tandem.settings.run import Purpose, RunSettings

_log = logging.getLogger(__name__)


# Schedules that end, at total_steps.
_ENDING = ("linear", "cosine")

# The optimizers of a cluster: the server's role, and where its section has the optimizer.
_OPTIMIZERS = (
    ("trainer", ("optimizer",)),
    ("trainer", ("speculator", "optimizer")),
    ("critic", ("optimizer",)),
)


def updates_in_run(settings: RunSettings, purpose: Purpose) -> int:
    """Returns the optimizer updates of a whole run, the most that a skipped step leaves."""
    return (settings.steps or 0) * _updates_per_step(settings, purpose)


def with_run_settings(
    cluster: ClusterSettings, settings: RunSettings, purpose: Purpose
) -> ClusterSettings:
    """Returns the cluster with the run's `learning_rate`, `max_model_len` and length of schedules.

    A schedule that ends and names no total_steps ends with the run.

    Raises ConfigError for a setting that the run and a server's section give different values.
    """
    sections: dict[str, Any] = {
        "rollout": [dict(one) for one in cluster.rollout],
        "trainer": None if cluster.trainer is None else dict(cluster.trainer),
        "critic": None if cluster.critic is None else dict(cluster.critic),
    }
    if settings.max_model_len is not None:
        several = len(cluster.rollout) > 1
        named = [
            *(
                (f"rollout.{i}" if several else "rollout", section)
                for i, section in enumerate(sections["rollout"])
            ),
            ("trainer", sections["trainer"]),
            ("critic", sections["critic"]),
        ]
        for field, section in named:
            if section is not None:
                given = lane_setting(section, "senior", "max_model_len")
                lane = "" if given is None or "max_model_len" in section else ".senior"
                _require_same(
                    "max_model_len", settings.max_model_len, given, f"cluster.{field}{lane}"
                )
                if given is None:
                    section["max_model_len"] = settings.max_model_len
    role = learner_of(purpose)
    learner = sections[role]
    if settings.learning_rate is not None and learner is not None:
        optimizer = learner.get("optimizer", {})
        if isinstance(optimizer, dict):
            _require_same(
                "learning_rate",
                settings.learning_rate,
                optimizer.get("learning_rate"),
                f"cluster.{role}.optimizer",
            )
            learner["optimizer"] = optimizer | {"learning_rate": settings.learning_rate}
    updates = updates_in_run(settings, purpose)
    if trains(purpose):
        for role, path in _OPTIMIZERS:
            sections[role] = _with_total_steps(sections[role], path, updates)
    return cluster.model_copy(update=sections)


def check_schedules(
    cluster: ClusterSettings, settings: RunSettings, purpose: Purpose
) -> Iterator[ConfigError]:
    """Yields an error for every schedule of a cluster under which a run trains nothing at its end.

    Such a schedule reaches a learning rate of 0 before the run's last update.
    """
    updates = updates_in_run(settings, purpose)
    for field, optimizer in _optimizers(cluster):
        total = optimizer.get("total_steps")
        ends = optimizer.get("schedule") in _ENDING and _is_count(total)
        if ends and total < updates and not optimizer.get("min_learning_rate"):
            yield ends_early(f"{field}.total_steps", total, updates, settings, purpose)


def check_optimizers(
    optimizers: Mapping[str, optimizer_info_pb2.OptimizerInfo],
    settings: RunSettings,
    purpose: Purpose,
    steps_done: int = 0,
) -> None:
    """Raises ConfigError if a schedule ends, at learning rate 0, before the steps that are left do.

    `optimizers` are those of the servers as they begin, by their names in errors.
    """
    left = max(0, (settings.steps or 0) - steps_done) * _updates_per_step(settings, purpose)
    for name, optimizer in optimizers.items():
        options = optimizer.options
        ends = options.schedule in (
            server_config_pb2.LEARNING_RATE_SCHEDULE_LINEAR,
            server_config_pb2.LEARNING_RATE_SCHEDULE_COSINE,
        )
        if not ends or options.min_learning_rate > 0:
            continue
        if optimizer.updates + left > options.total_steps:
            raise ConfigError(
                f"{name}: total_steps: the schedule ends after {options.total_steps:,} optimizer "
                f"updates, of which {optimizer.updates:,} are done, with learning rate 0; the run "
                f"makes {left:,} more",
                hint="set a longer total_steps, or min_learning_rate, in the server's settings; "
                "in a run with `cluster` total_steps may be left out",
            )


def notes_on_schedules(cluster: ClusterSettings, settings: RunSettings, purpose: Purpose) -> None:
    """Notes the schedules of a cluster that surprise: no peak, or a floor for most of the run."""
    updates = updates_in_run(settings, purpose)
    for field, optimizer in _optimizers(cluster):
        warmup, total = optimizer.get("warmup_steps", 0), optimizer.get("total_steps")
        if _is_count(warmup) and warmup >= updates > 0:
            _log.warning(
                f"{field}.warmup_steps: {warmup:,}, but the run makes {updates:,} "
                "updates: it ends before learning_rate is reached"
            )
        if optimizer.get("schedule") in _ENDING and _is_count(total):
            if total < updates and optimizer.get("min_learning_rate", 0):
                _log.info(
                    f"{field}.total_steps: {total:,}, but the run makes {updates:,} updates: the "
                    f"last {updates - total:,} have min_learning_rate"
                )
            elif total > updates:
                _log.info(
                    f"{field}.total_steps: {total:,}, and the run makes {updates:,} updates: the "
                    "schedule does not reach its end"
                )
        rate = optimizer.get("learning_rate")
        if rate == 0 and field == f"cluster.{learner_of(purpose)}.optimizer":
            _log.warning(f"{field}.learning_rate: 0: the run changes no weights")


def ends_early(
    field: str, total: int, updates: int, settings: RunSettings, purpose: Purpose
) -> ConfigError:
    """Returns the error for a schedule of `total` updates in a run that makes more."""
    per_step = _updates_per_step(settings, purpose)
    return ConfigError(
        f"{field}: the schedule ends after {total:,} optimizer updates, in step "
        f"{math.ceil(total / per_step) if total else 1:,}, with learning rate 0; the run makes "
        f"{updates:,} ({settings.steps:,} steps of {per_step:,})",
        hint="leave total_steps out: the schedule then ends with the run; or set min_learning_rate",
    )


def _updates_per_step(settings: RunSettings, purpose: Purpose) -> int:
    return settings.updates_per_step if purpose == "train" else 1


def _with_total_steps(
    section: dict[str, Any] | None, path: tuple[str, ...], updates: int
) -> dict[str, Any] | None:
    """Returns a server's section whose schedule at `path`, if it ends, has a total_steps."""
    if section is None:
        return None
    name, *rest = path
    inner = section.get(name)
    if not isinstance(inner, dict):
        return section
    if rest:
        return section | {name: _with_total_steps(inner, tuple(rest), updates)}
    if inner.get("schedule") in _ENDING and inner.get("total_steps") is None:
        return section | {name: inner | {"total_steps": updates}}
    return section


def _optimizers(cluster: ClusterSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the optimizers that the sections of a cluster name, with their dotted keys."""
    for role, path in _OPTIMIZERS:
        inner = getattr(cluster, role)
        for name in path:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            yield ".".join(("cluster", role, *path)), inner


def _is_count(value: Any) -> bool:
    """Returns whether a raw value is a number of updates; the server refuses any other."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require_same(key: str, value: float, named: Any, field: str) -> None:
    if named is not None and named != value:
        raise ConfigError(f"{key}: {value:g}, but {field}.{key} is {named}: set one of them")
