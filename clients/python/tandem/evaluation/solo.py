"""The accuracy of each model when it writes by itself, and of both as a run lets them write."""

from __future__ import annotations

import itertools

from tandem.evaluation.answers import Drawn, Evaluation, grade
from tandem.session.session import Session
from tandem.settings.run import EvalMode
from tandem.utils.authors import senior_fraction


def solo(session: Session, mode: EvalMode, drawn: Drawn) -> Evaluation:
    """Measures accuracy and pass@k of one model's solo answers."""
    return Evaluation(mode, drawn.answers, grade(session, drawn), dict(drawn.numbers))


def tandem(session: Session, drawn: Drawn) -> Evaluation:
    """Measures accuracy, pass@k and authorship of answers that both models wrote."""
    masks = [one.authorship_mask for one in itertools.chain(*drawn.answers)]
    numbers = {**drawn.numbers, "tandem/senior_token_fraction": senior_fraction(masks)}
    return Evaluation("tandem", drawn.answers, grade(session, drawn), numbers)
