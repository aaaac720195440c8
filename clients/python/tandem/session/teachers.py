"""The teachers of a run's distillation: whose rows they teach, and what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tandem.data.dataset import Example
from tandem.pool.rollout_pool import RolloutPool, response_to_score, text_to_score
from tandem.pool.scoring import Scored
from tandem.preflight.teachers import require_room, teacher_of
from tandem.rpc.requests import PolicySample, ScoredTokens, SupervisedSample, TeacherTokens
from tandem.session.frozen_server import FrozenServer

Sample = TypeVar("Sample", PolicySample, SupervisedSample)


class Teachers:
    """The teachers of a run.

    Attributes:
        servers: the teachers that are rollout servers of their own, by name.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        column: str | None,
        top_k: int,
        temperature: float,
        servers: Mapping[str, FrozenServer],
        rollouts: RolloutPool,
    ) -> None:
        """`sources` are the settings `teachers`; the others those of the objective's distillation.

        `rollouts` are the run's own rollout servers, whose junior may be a teacher.
        """
        self._sources = sources
        self._column = column
        self._top_k = top_k
        self._temperature = temperature
        self.servers = servers
        self._rollouts = rollouts

    def added_to(
        self,
        samples: Sequence[Sample],
        examples: Sequence[Example],
    ) -> list[Sample]:
        """Returns the samples, each of the row `examples` has for it, with what a teacher says.

        Raises what FrozenServer.score() raises, and ConfigError for a response that is too long.
        """
        names = list(self._sources)
        chosen = [teacher_of(one, names, self._column) for one in examples]
        said: list[TeacherTokens | None] = [None] * len(samples)
        for name in names:
            places = [place for place, teacher in enumerate(chosen) if teacher == name]
            if self._sources[name] == "trainer":
                tokens = [TeacherTokens(name)] * len(places)
            else:
                tokens = self._asked(name, [samples[place] for place in places])
            for place, one in zip(places, tokens, strict=True):
                said[place] = one
        return [
            dataclasses.replace(sample, teacher=one)
            for sample, one in zip(samples, said, strict=True)
        ]

    def _asked(
        self, name: str, samples: Sequence[PolicySample | SupervisedSample]
    ) -> list[TeacherTokens]:
        """Asks a teacher for its likeliest tokens at each place of the responses."""
        if not samples:
            return []
        sequences = [_to_score(sample) for sample in samples]
        for one in sequences:
            require_room(len(one.token_ids) - one.first_scored_token, self._top_k, "a response")
        temperature = self._temperature or _temperature(samples)
        if self._sources[name] == "junior":
            scored = self._rollouts.score(
                sequences,
                junior=True,
                temperature=temperature,
                num_top_logprobs=self._top_k,
            )
            return [_tokens(name, one, junior=True) for one in scored]
        scored = self.servers[name].score(sequences, temperature, self._top_k)
        return [_tokens(name, one, junior=False) for one in scored]


def _tokens(name: str, scored: Scored, *, junior: bool) -> TeacherTokens:
    top = scored.junior_top if junior else scored.senior_top
    return TeacherTokens(name, *top)


def _to_score(sample: PolicySample | SupervisedSample) -> ScoredTokens:
    if isinstance(sample, PolicySample):
        return response_to_score(sample.trajectory)
    return text_to_score(sample)


def _temperature(samples: Sequence[PolicySample | SupervisedSample]) -> float:
    """Returns the temperature of a step's log-probabilities: 1 for greedy and given responses."""
    [temperature] = {
        one.trajectory.sampling.temperature if isinstance(one, PolicySample) else 1.0
        for one in samples
    }
    return temperature or 1.0
