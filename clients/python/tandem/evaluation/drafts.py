"""Drafts: how many of them are accepted, and how fast the senior writes with them and without."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem import tracing
from tandem._proto.rollout.v1 import rollout_pb2
from tandem.evaluation.answers import held_out
from tandem.rpc.client import RolloutClient
from tandem.rpc.generate_events import SampleFinished, read_event
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.session.session import Session
from tandem.utils.stats import mean_half_width

Clock = Callable[[], float]


@dataclass
class Answered:
    """The responses of one way to answer, and what they cost.

    Attributes:
        seconds: time of the calls.
        responses: the token ids of each response.
        drafts: drafts that passes verified.
        accepted: drafts that were accepted.
    """

    seconds: float = 0.0
    responses: list[list[int]] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0

    def ask(self, client: RolloutClient, prompts: Sequence[Prompt], clock: Clock) -> None:
        """Adds the responses to prompts that the server answers together."""
        begun = clock()
        groups = client.generate(prompts, on_event=self._count)
        self.seconds += clock() - begun
        self.responses += [list(group[0].response_token_ids) for group in groups]

    def _count(self, message: rollout_pb2.GenerateResponse) -> None:
        event = read_event(message)
        if isinstance(event, SampleFinished):
            self.drafts += event.draft_tokens
            self.accepted += event.accepted_draft_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(map(len, self.responses))

    @property
    def tokens_per_second(self) -> float:
        """Speed of the server."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Round:
    """All prompts, answered with drafts and without."""

    drafted: Answered = field(default_factory=Answered)
    plain: Answered = field(default_factory=Answered)

    @property
    def speed_up(self) -> float:
        """The speed with drafts divided by the speed without."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


@dataclass(frozen=True)
class DraftMeasurement:
    """The same prompts, answered again and again at one temperature: at least one round."""

    temperature: float
    rounds: Sequence[Round]

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of a result of `tandem speculator eval --json`.

        Speeds are of all rounds, counts of the first one.
        """
        drafted, plain = self.rounds[0].drafted, self.rounds[0].plain
        speed = _speed([one.drafted for one in self.rounds])
        speed_without = _speed([one.plain for one in self.rounds])
        half = mean_half_width([math.log(one.speed_up) for one in self.rounds])
        speed_up = speed / speed_without
        # Every pass writes one token, and those of its drafts that are accepted.
        passes = drafted.tokens - drafted.accepted
        pairs = zip(drafted.responses, plain.responses, strict=True)
        return {
            "temperature": self.temperature,
            "prompts": len(drafted.responses),
            "response_tokens": drafted.tokens,
            "repeats": len(self.rounds),
            "tokens_per_second": speed,
            "tokens_per_second_without": speed_without,
            "speed_up": speed_up,
            "speed_up_low": None if half is None else speed_up * math.exp(-half),
            "speed_up_high": None if half is None else speed_up * math.exp(half),
            "draft_tokens": drafted.drafts,
            "accepted_draft_tokens": drafted.accepted,
            "acceptance_rate": drafted.accepted / drafted.drafts if drafted.drafts else None,
            "mean_accepted_length": drafted.accepted / passes if passes else None,
            "free_fraction": drafted.accepted / drafted.tokens,
            "responses_that_differ": sum(one != other for one, other in pairs),
        }


@tracing.spanned("measure drafts")
def measure_drafts(
    session: Session, concurrency: int = 1, repeats: int = 1, *, clock: Clock = time.monotonic
) -> list[DraftMeasurement]:
    """Measures the drafts of `eval.speculative`, else of `speculative`, on the held-out prompts.

    The senior answers alone, one response to each prompt, at temperature 0 and at
    `sampling.temperature`; `concurrency` prompts are sent at a time, and all of them `repeats`
    times. The first rollout server answers; it gets the trainer's weights first if it is behind.

    Raises FailedPreconditionError as Session.bring_up() does.
    """
    client = session.rollouts.clients[0]
    session.bring_up(session.weights(), client)
    temperatures = dict.fromkeys((0.0, session.settings.sampling.temperature))
    found = []
    for one in temperatures:
        with session.progress.phase(f"measure drafts at temperature {one:g}"):
            found.append(_measure(session, client, one, concurrency, repeats, clock))
    return found


def _measure(
    session: Session,
    client: RolloutClient,
    temperature: float,
    concurrency: int,
    repeats: int,
    clock: Clock,
) -> DraftMeasurement:
    prompts = _prompts(session, temperature)
    rounds = [Round() for _ in range(repeats)]
    drafts = session.settings.eval_speculative.fields()
    drafts_first = False
    session.progress.expect(len(prompts) * repeats)
    for one in rounds:
        for first in range(0, len(prompts), concurrency):
            batch = prompts[first : first + concurrency]
            # Both ways find the prompts in the server's cache.
            client.generate([_short(prompt) for prompt in batch])
            ways: list[tuple[Answered, Mapping[str, Any]]] = [
                (one.plain, {}),
                (one.drafted, drafts),
            ]
            # Each way comes first every other time.
            for answered, speculative in reversed(ways) if drafts_first else ways:
                asked = [dataclasses.replace(p, speculative=speculative) for p in batch]
                answered.ask(client, asked, clock)
            drafts_first = not drafts_first
            session.progress.advance(len(batch))
    return DraftMeasurement(temperature, rounds)


def _speed(answered: Sequence[Answered]) -> float:
    """Returns the tokens a second of several rounds."""
    return sum(one.tokens for one in answered) / sum(one.seconds for one in answered)


def _prompts(session: Session, temperature: float) -> list[Prompt]:
    settings = session.settings
    sampling = session.sampling | {"temperature": temperature}
    if settings.eval.max_tokens is not None:
        sampling["max_tokens"] = settings.eval.max_tokens
    return [
        Prompt(
            token_ids=example.token_ids,
            seed=prompt_seed(settings.seed, 0, index, "eval"),
            sampling=sampling,
            tandem={"enabled": False},
            vision_inputs=example.vision_inputs,
        )
        for index, example in enumerate(held_out(session))
    ]


def _short(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, sampling={**prompt.sampling, "max_tokens": 1})
