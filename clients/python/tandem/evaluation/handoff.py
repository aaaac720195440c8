"""Handoff: the accuracy of senior and junior when they take turns."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from tandem._proto.types.v1 import server_pb2
from tandem.evaluation.answers import Evaluation, draw, grade
from tandem.preflight.checks import handoff_boundary_ids
from tandem.session.session import Session
from tandem.utils.authors import ENVIRONMENT, JUNIOR, senior_fraction

_log = logging.getLogger(__name__)


# Turns of an answer that count; tokens after them are cut off.
MAX_ROUNDS = 150


def handoff(session: Session, weights: server_pb2.WeightsVersion) -> Evaluation:
    """Draws answers in turns and measures accuracy, pass@k and authorship.

    The senior begins; both share `max_tokens`. A turn ends with a token whose own text ends with
    `eval.handoff_boundary`, whatever boundary the servers are configured with. In an episode the
    senior begins behind everything that the environment says, and no answer is cut; or, with
    `eval.handoff_turns`, senior and junior write its turns in alternation.

    Raises:
        ConfigError: no token's text ends with the boundary.
    """
    settings = session.settings
    tandem: dict[str, Any] = {"enabled": True, "selection_strategy": "turn"}
    if not settings.eval.handoff_turns:
        ids = handoff_boundary_ids(settings, session.codec)
        tandem |= {"selection_strategy": "sentence", "boundary_token_ids": ids}
    drawn = draw(session, tandem, weights)
    answers = drawn.answers
    # Text that an environment has heard cannot be cut off.
    most = MAX_ROUNDS if session.environment is None else None
    masks = [[first_rounds(one.authorship_mask, most) for one in group] for group in answers]
    flat = list(itertools.chain(*masks))
    if not settings.eval.handoff_turns and not any(JUNIOR in mask for mask in flat):
        # Tokenizers that split a blank line into two tokens have hardly a token that ends a turn.
        _log.info(
            "handoff: no answer has a token that ends a turn (eval.handoff_boundary: "
            f"{settings.eval.handoff_boundary!r}): the senior wrote every answer in full"
        )
    whole = [len(one.authorship_mask) for group in answers for one in group]
    return Evaluation(
        "handoff",
        answers,
        grade(session, drawn, [[len(mask) for mask in group] for group in masks]),
        {
            **drawn.numbers,
            "rounds/mean": sum(map(rounds, flat)) / len(flat),
            "rounds/cut": sum(len(mask) < n for mask, n in zip(flat, whole, strict=True)),
            "tandem/senior_token_fraction": senior_fraction(flat),
        },
    )


def rounds(mask: bytes) -> int:
    """Returns the number of turns of an answer: the author changes after each.

    What an environment says is nobody's turn, and ends one.
    """
    return sum(author != ENVIRONMENT for author, _ in itertools.groupby(mask))


def first_rounds(mask: bytes, most: int | None) -> bytes:
    """Returns the authorship mask up to the end of turn number `most`, which is at least 1.

    None stands for all turns.
    """
    if most is None:
        return mask
    ends = (t for t in range(1, len(mask)) if mask[t] != mask[t - 1])
    return mask[: next(itertools.islice(ends, most - 1, None), len(mask))]
