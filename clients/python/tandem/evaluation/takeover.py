"""Takeover: one of the models begins an answer, and the other one writes the rest."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.environments.episode import Takeover
from tandem.evaluation.answers import Answers, Drawn, Evaluation, draw, grade, prompts_of
from tandem.rpc.requests import JUNIOR_ALONE, SENIOR_ALONE
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import from_tensor, to_tensor
from tandem.session.session import Session
from tandem.settings.run import TakeoverSettings
from tandem.utils.authors import JUNIOR, SENIOR, senior_fraction, written

# The share of an answer after which the other model takes over, unless the settings say more.
_AFTER_SHARE = 0.5


def takeover(
    session: Session, begun: Answers, successor: str, weights: server_pb2.WeightsVersion
) -> Evaluation:
    """Lets the `successor`, "senior" or "junior", finish what the other one has `begun`.

    It goes on after the first tokens of each answer, as many as `eval.takeover` says, and has the
    tokens that `max_tokens` leaves. An answer that has ended by then stays as it is.

    An environment cannot be set back to that place, so episodes are drawn anew from the beginning,
    with the same seeds.
    """
    drawn = _episodes if session.environment is not None else _single_responses
    answers = drawn(session, begun, successor, weights)
    masks = [one.authorship_mask for one in itertools.chain(*answers.answers)]
    author = JUNIOR if successor == "junior" else SENIOR
    return Evaluation(
        f"{successor}_takeover",
        answers.answers,
        grade(session, answers),
        {
            **answers.numbers,
            "taken_over": sum(author in mask for mask in masks),
            "tandem/senior_token_fraction": senior_fraction(masks),
        },
    )


def _episodes(
    session: Session, begun: Answers, successor: str, weights: server_pb2.WeightsVersion
) -> Drawn:
    """Draws episodes in which the successor takes over."""
    first, second = SENIOR_ALONE, JUNIOR_ALONE
    if successor == "senior":
        first, second = second, first
    # An episode that could not begin has no answer.
    takeovers = {
        (number, one.sample_index): Takeover(
            kept_tokens(session.settings.eval.takeover, one), second
        )
        for number, group in enumerate(begun)
        for one in group
    }
    return draw(session, first, weights, takeovers)


def _single_responses(
    session: Session, begun: Answers, successor: str, weights: server_pb2.WeightsVersion
) -> Drawn:
    """Draws the rest of responses."""
    settings = session.settings
    rules = JUNIOR_ALONE if successor == "junior" else SENIOR_ALONE
    asked = prompts_of(session, rules)
    prompts, places = [], []
    for (number, prompt), group in zip(enumerate(asked), begun, strict=True):
        limit = prompt.sampling["max_tokens"]
        for index, one in enumerate(group):
            kept = kept_tokens(settings.eval.takeover, one)
            if kept == len(one.response_token_ids):
                continue
            prompts.append(
                dataclasses.replace(
                    prompt,
                    token_ids=[*one.prompt_token_ids, *one.response_token_ids[:kept]],
                    seed=prompt_seed(settings.seed, index, number, "takeover"),
                    num_samples=1,
                    sampling={**prompt.sampling, "max_tokens": limit - kept},
                )
            )
            places.append((number, index, kept))
    answers = [list(group) for group in begun]
    finished = session.generate(prompts, weights) if prompts else []
    for (number, index, kept), [rest] in zip(places, finished, strict=True):
        answers[number][index] = joined(begun[number][index], kept, rest)
    return Drawn(answers)


def kept_tokens(settings: TakeoverSettings, answer: trajectory_pb2.Trajectory) -> int:
    """Returns the number of the models' tokens of an answer that its successor finds."""
    length = written(answer.authorship_mask)
    if settings.after_tokens is not None:
        return min(settings.after_tokens, length)
    return math.ceil((settings.after_share or _AFTER_SHARE) * length)


def joined(
    begun: trajectory_pb2.Trajectory, kept: int, rest: trajectory_pb2.Trajectory
) -> trajectory_pb2.Trajectory:
    """Returns the first tokens of an answer and what was written after them as one answer."""
    whole = trajectory_pb2.Trajectory()
    whole.CopyFrom(rest)
    whole.prompt_token_ids[:] = begun.prompt_token_ids
    whole.response_token_ids[:] = [*begun.response_token_ids[:kept], *rest.response_token_ids]
    whole.authorship_mask = begun.authorship_mask[:kept] + rest.authorship_mask
    for name in ("author_logprobs", "log_keep_mass"):
        if begun.HasField(name) and rest.HasField(name):
            parts = [from_tensor(getattr(begun, name))[:kept], from_tensor(getattr(rest, name))]
            getattr(whole, name).CopyFrom(to_tensor(np.concatenate(parts)))
        else:
            whole.ClearField(name)
    for name in ("other_logprobs", "routed_experts"):
        whole.ClearField(name)
    whole.accepted_draft_mask = b""
    # All tokens are of the same weights: generate() sees to it.
    del whole.senior_versions[1:]
    whole.senior_versions[0].count = len(whole.response_token_ids)
    whole.junior_version = rest.junior_version or begun.junior_version
    return whole
