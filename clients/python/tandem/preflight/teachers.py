"""The checks of the settings of distillation, and of the rows that name their teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.data.dataset import Dataset, Example, RowProblems
from tandem.errors import ConfigError
from tandem.preflight.checks import require_own_server
from tandem.preflight.problems import Problems
from tandem.rpc.transport import MAX_SEND_BYTES
from tandem.settings.run import Purpose, RunSettings

# Bytes of a token's id and its log-probability, and of the rest of a sample beside them.
_TOKEN_BYTES = 8
_REST_BYTES = 1 << 19


def check_distillation(
    settings: RunSettings,
    purpose: Purpose,
    rollouts: Sequence[str],
    data: Mapping[str, Dataset],
    problems: Problems,
) -> None:
    """Collects mistakes in the settings of distillation and its teachers.

    `rollouts` are the addresses of the run's own rollout servers, if they run already.
    """
    teachers, column = settings.teachers, settings.teacher_column
    distillation = settings.distillation()
    with problems.collect():
        _check_teachers(settings, rollouts)
    if not settings.distils or not teachers:
        return
    if distillation["top_k"] and purpose == "train":
        with problems.collect():
            require_room(settings.sampling.max_tokens, distillation["top_k"], "sampling.max_tokens")
    if column is None or "data" not in data:
        return
    rows = RowProblems()
    for example in data["data"].examples:
        try:
            teacher_of(example, list(teachers), column)
        except ConfigError as error:
            rows.add(error, example.place)
    with problems.collect():
        rows.raise_any()


def _check_teachers(settings: RunSettings, rollouts: Sequence[str]) -> None:
    """Raises ConfigError for teachers that do not fit the objective, each other, or the servers."""
    teachers, distils = settings.teachers, settings.distils
    top_k = (settings.objective.given().get("distillation") or {}).get("top_k")
    by_trainer = "trainer" in teachers.values()
    if teachers and not distils:
        raise ConfigError(
            "teachers: only apply to distillation, but objective.distillation.coefficient is not "
            "set or 0"
        )
    if settings.sft.cross_entropy_coefficient != 1 and not distils:
        raise ConfigError("sft.cross_entropy_coefficient: only applies beside distillation")
    if distils and not teachers:
        raise ConfigError(
            "objective.distillation: needs a teacher, but `teachers` names none",
            hint="teachers: {NAME: HOST:PORT}, junior or trainer",
        )
    if by_trainer and set(teachers.values()) != {"trainer"}:
        raise ConfigError(
            "teachers: the trainer's teacher_model compares the whole vocabulary, others their "
            "likeliest tokens (objective.distillation.top_k): a run has one kind"
        )
    if by_trainer and top_k:
        raise ConfigError(
            "objective.distillation.top_k: must be 0 with the teacher `trainer`, which compares "
            "the whole vocabulary"
        )
    if teachers and not by_trainer and top_k == 0:
        raise ConfigError(
            "objective.distillation.top_k: 0 compares the whole vocabulary, which only the teacher "
            "`trainer` does"
        )
    if len(teachers) > 1 and settings.teacher_column is None:
        raise ConfigError("teacher_column: several teachers need the column that names a row's")
    if settings.teacher_column is not None and len(teachers) < 2:
        raise ConfigError("teacher_column: only applies to several teachers")
    for name, address in teachers.items():
        require_own_server(
            f"teachers.{name}",
            address,
            rollouts,
            "a teacher is a rollout server of its own, `junior` or `trainer`",
        )
    trainer = (settings.cluster.trainer or {}) if settings.cluster is not None else None
    if by_trainer and trainer is not None and not trainer.get("teacher_model"):
        raise ConfigError("cluster.trainer.teacher_model: the teacher `trainer` needs it")


def teacher_of(example: Example, names: Sequence[str], column: str | None) -> str:
    """Returns the name of the teacher of a row.

    Raises ConfigError, which names the row, for one that names no teacher.
    """
    if column is None:
        return names[0]
    name = example.row.get(column)
    if not isinstance(name, str) or name not in names:
        raise ConfigError(
            f"teacher_column: {example.place}: {column} is {name!r}, but the teachers are "
            f"{', '.join(names)}"
        )
    return name


def require_room(length: int, top_k: int, whose: str) -> None:
    """Raises ConfigError if no message holds `top_k` tokens at each of `length` places."""
    room = (MAX_SEND_BYTES - _REST_BYTES) // _TOKEN_BYTES
    if length * top_k > room:
        raise ConfigError(
            f"objective.distillation.top_k: {top_k} tokens at each place of {whose} of {length:,} "
            f"tokens do not fit into a message, which holds {room:,}"
        )
