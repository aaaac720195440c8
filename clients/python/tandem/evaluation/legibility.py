"""Legibility: how well the junior predicts what the senior writes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.evaluation.answers import Answers, Evaluation
from tandem.rollout_pool import Scored
from tandem.session import Session
from tandem.stats import clustered_mean
from tandem.types.v1 import server_pb2


def legibility(
    session: Session, answers: Answers, weights: server_pb2.WeightsVersion
) -> Evaluation:
    """Cross-entropy in nats per token of the senior's solo answers, at temperature 1.

    Under the junior, under the senior that wrote them, and the difference: means over all response
    tokens, the one that ended a response too. `weights` wrote the answers.
    """
    scores = iter(
        session.score(
            [
                ([*one.prompt_token_ids, *one.response_token_ids], len(one.prompt_token_ids))
                for group in answers
                for one in group
            ],
            weights,
        )
    )
    # The tokens of a prompt's answers depend on each other.
    prompts = [list(itertools.islice(scores, len(group))) for group in answers]
    junior = [_nats(group, "junior") for group in prompts]
    senior = [_nats(group, "senior") for group in prompts]
    gap = [a - b for a, b in zip(junior, senior, strict=True)]
    return Evaluation(
        "legibility",
        answers,
        numbers={
            "tokens/response": sum(map(len, junior)),
            **_mean("junior", junior),
            **_mean("senior", senior),
            **_mean("gap", gap),
        },
    )


def _nats(scores: Sequence[Scored], model: str) -> np.ndarray:
    """Float64 [tokens of all samples of a prompt]."""
    return -np.concatenate([getattr(one, model) for one in scores], dtype=np.float64)


def _mean(name: str, clusters: Sequence[np.ndarray]) -> dict[str, Any]:
    mean, half_width = clustered_mean([cluster.tolist() for cluster in clusters])
    key = f"{name}/nats_per_token"
    low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
    return {key: mean, f"{key}_low": low, f"{key}_high": high}
