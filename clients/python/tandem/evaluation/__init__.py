"""Evaluations: the senior by itself, with its junior, and as its junior reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem import tracing
from tandem._proto.types.v1 import server_pb2
from tandem.evaluation.answers import Drawn, Evaluation, draw
from tandem.evaluation.handoff import handoff
from tandem.evaluation.legibility import legibility
from tandem.evaluation.solo import solo, tandem
from tandem.evaluation.takeover import takeover
from tandem.preflight.checks import check_junior, check_modes
from tandem.rpc.requests import JUNIOR_ALONE, SENIOR_ALONE
from tandem.session.session import Session
from tandem.settings.run import EvalMode

__all__ = ["Evaluation", "evaluate"]


@tracing.spanned("evaluate")
def evaluate(
    session: Session, modes: Sequence[EvalMode] | None = None
) -> dict[EvalMode, Evaluation]:
    """Evaluates the modes, by default `eval.modes`, in that order, on the held-out prompts.

    The held-out prompts are those of `eval.data`, without it all data. The trainer's weights
    answer: rollout servers that are behind get them first. The solo answers of each model are
    drawn once for all modes.

    Raises:
        ConfigError: a mode needs a junior and a rollout server has none, no token ends a turn, or
            a mode does not fit the run.
    """
    modes = list(modes or session.settings.eval.modes)
    check_modes(modes, session.settings, session.purpose)
    for replica in session.rollouts.replicas:
        whose = f"the rollout server at {replica.client.address}"
        check_junior(modes, replica.has_junior, whose)
    weights = session.weights()
    # Answers of one model, which several modes read.
    alone: dict[str, Drawn] = {}
    for author, rules in (("senior", SENIOR_ALONE), ("junior", JUNIOR_ALONE)):
        if any(author in _READS[mode] for mode in modes):
            with session.progress.phase(f"evaluate, {author} alone"):
                alone[author] = draw(session, rules, weights)
    results: dict[EvalMode, Evaluation] = {}
    for mode in modes:
        with session.progress.phase(f"evaluate {mode}"):
            results[mode] = _evaluation(mode, session, alone, weights)
    return results


# The models whose answers a mode reads.
_READS: Mapping[EvalMode, Sequence[str]] = {
    "solo": ["senior"],
    "junior_solo": ["junior"],
    "tandem": [],
    "handoff": [],
    "legibility": ["senior"],
    "junior_takeover": ["senior"],
    "senior_takeover": ["junior"],
}


def _evaluation(
    mode: EvalMode,
    session: Session,
    alone: Mapping[str, Drawn],
    weights: server_pb2.WeightsVersion,
) -> Evaluation:
    if mode in ("solo", "junior_solo"):
        return solo(session, mode, alone[_READS[mode][0]])
    if mode == "tandem":
        return tandem(session, draw(session, session.settings.tandem.given(), weights))
    if mode == "handoff":
        return handoff(session, weights)
    if mode == "legibility":
        return legibility(session, alone["senior"], weights)
    if mode == "junior_takeover":
        return takeover(session, alone["senior"].answers, "junior", weights)
    return takeover(session, alone["junior"].answers, "senior", weights)
