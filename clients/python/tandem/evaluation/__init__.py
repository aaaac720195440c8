"""Evaluations: the senior alone, senior and junior in turns, and the senior read by the junior."""

from __future__ import annotations

from collections.abc import Sequence

from tandem import tracing
from tandem.evaluation.answers import Evaluation, draw
from tandem.evaluation.handoff import handoff
from tandem.evaluation.legibility import legibility
from tandem.evaluation.solo import solo
from tandem.preflight.checks import check_junior
from tandem.session.session import Session
from tandem.settings.run import EvalMode

__all__ = ["Evaluation", "evaluate"]


@tracing.spanned("evaluate")
def evaluate(
    session: Session, modes: Sequence[EvalMode] | None = None
) -> dict[EvalMode, Evaluation]:
    """Evaluates the modes, by default `eval.modes`, in that order, on the held-out prompts.

    The held-out prompts are those of `eval.data`, without it all data. The trainer's weights
    answer: rollout servers that are behind get them first. The senior's solo answers are drawn once
    for all modes.

    Raises:
        ConfigError: a mode needs a junior and a rollout server has none, or no token ends a turn.
    """
    modes = list(modes or session.settings.eval.modes)
    for replica in session.rollouts.replicas:
        whose = f"the rollout server at {replica.client.address}"
        check_junior(modes, replica.has_junior, whose)
    weights = session.weights()
    with session.progress.phase("evaluate, senior alone"):
        alone = [] if modes == ["handoff"] else draw(session, {"enabled": False}, weights)
    results: dict[EvalMode, Evaluation] = {}
    for mode in modes:
        with session.progress.phase(f"evaluate {mode}"):
            if mode == "solo":
                results[mode] = solo(session, alone)
            elif mode == "handoff":
                results[mode] = handoff(session, weights)
            else:
                results[mode] = legibility(session, alone, weights)
    return results
