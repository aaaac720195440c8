"""Legibility: how well the junior predicts what the senior writes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem._proto.types.v1 import server_pb2
from tandem.evaluation.answers import Drawn, Evaluation
from tandem.pool.rollout_pool import response_to_score
from tandem.rpc.wire import from_tensor
from tandem.session.session import Session
from tandem.utils.authors import SENIOR
from tandem.utils.stats import clustered_mean


def legibility(session: Session, drawn: Drawn, weights: server_pb2.WeightsVersion) -> Evaluation:
    """Measures the cross-entropy of the senior's solo answers, in nats per token at temperature 1.

    It is measured under the junior and under the senior, whose `weights` wrote the answers, with
    the difference of the two. Each is a mean over all response tokens of the senior,
    end-of-sequence tokens too; the environment's tokens of an episode do not count.
    """
    answers = drawn.answers
    flat = [one for group in answers for one in group]
    # Log-probabilities of answers drawn at temperature 1, or greedily, are those at temperature 1.
    recorded = flat[0].sampling.temperature in (0.0, 1.0)
    scores = session.score([response_to_score(one) for one in flat], weights, senior=not recorded)
    own = [
        from_tensor(one.author_logprobs) if scored.senior is None else scored.senior
        for one, scored in zip(flat, scores, strict=True)
    ]
    # The places of the senior's tokens.
    places = [np.frombuffer(one.authorship_mask, np.uint8) == SENIOR for one in flat]
    ends = list(itertools.accumulate(map(len, answers)))
    junior = _nats([scored.junior for scored in scores], places, ends)
    senior = _nats(own, places, ends)
    gap = [a - b for a, b in zip(junior, senior, strict=True)]
    return Evaluation(
        "legibility",
        answers,
        numbers={
            **drawn.numbers,
            "tokens/response": sum(map(len, junior)),
            **_mean("junior", junior),
            **_mean("senior", senior),
            **_mean("gap", gap),
        },
        junior_logprobs=[
            [one.junior for one in scores[begin:end]]
            for begin, end in itertools.pairwise([0, *ends])
        ],
    )


def _nats(
    logprobs: Sequence[np.ndarray], places: Sequence[np.ndarray], ends: Sequence[int]
) -> list[np.ndarray]:
    """Returns for every prompt the nats of its answers' tokens, float64: one cluster each.

    `places` has which tokens of an answer count, `ends` the number of answers up to each prompt's
    last one. A prompt without answers has no cluster.
    """
    chosen = [values[there] for values, there in zip(logprobs, places, strict=True)]
    return [
        -np.concatenate(chosen[begin:end], dtype=np.float64)
        for begin, end in itertools.pairwise([0, *ends])
        if begin < end
    ]


def _mean(name: str, clusters: Sequence[np.ndarray]) -> dict[str, Any]:
    mean, half_width = clustered_mean([cluster.tolist() for cluster in clusters])
    key = f"{name}/nats_per_token"
    low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
    return {key: mean, f"{key}_low": low, f"{key}_high": high}
