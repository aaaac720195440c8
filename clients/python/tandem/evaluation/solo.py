"""Solo: the accuracy of the senior alone."""

from __future__ import annotations

from tandem.evaluation.answers import Answers, Evaluation, grade
from tandem.session.session import Session


def solo(session: Session, answers: Answers) -> Evaluation:
    """Measures accuracy and pass@k of the senior's solo answers."""
    return Evaluation("solo", answers, grade(session, answers))
