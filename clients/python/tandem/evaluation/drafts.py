"""Drafts: how many of them are accepted, and how fast the senior writes with them and without."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem import tracing
from tandem.client import RolloutClient
from tandem.evaluation.answers import held_out
from tandem.requests import Prompt
from tandem.rollout.v1 import rollout_pb2
from tandem.schedule import prompt_seed
from tandem.session import Session

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

    def _count(self, event: rollout_pb2.GenerateResponse) -> None:
        if event.WhichOneof("event") == "finished":
            self.drafts += event.finished.draft_tokens
            self.accepted += event.finished.accepted_draft_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(map(len, self.responses))

    @property
    def tokens_per_second(self) -> float:
        """Speed of the server."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class DraftMeasurement:
    """The same prompts, answered with drafts and without at one temperature."""

    temperature: float
    drafted: Answered
    plain: Answered

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of a result of `tandem speculator eval --json`."""
        drafted, plain = self.drafted, self.plain
        # Every pass writes one token, and those of its drafts that are accepted.
        passes = drafted.tokens - drafted.accepted
        pairs = zip(drafted.responses, plain.responses, strict=True)
        return {
            "temperature": self.temperature,
            "prompts": len(drafted.responses),
            "response_tokens": drafted.tokens,
            "tokens_per_second": drafted.tokens_per_second,
            "tokens_per_second_without": plain.tokens_per_second,
            "speed_up": drafted.tokens_per_second / plain.tokens_per_second,
            "draft_tokens": drafted.drafts,
            "accepted_draft_tokens": drafted.accepted,
            "acceptance_rate": drafted.accepted / drafted.drafts if drafted.drafts else None,
            "mean_accepted_length": drafted.accepted / passes if passes else None,
            "free_fraction": drafted.accepted / drafted.tokens,
            "responses_that_differ": sum(one != other for one, other in pairs),
        }


@tracing.spanned("measure drafts")
def measure_drafts(
    session: Session, concurrency: int = 1, *, clock: Clock = time.monotonic
) -> list[DraftMeasurement]:
    """Measures the drafts of `eval.speculative`, else of `speculative`, on the held-out prompts.

    The senior answers alone, one response to each prompt, at temperature 0 and at
    `sampling.temperature`; `concurrency` prompts are sent at a time. The first rollout server
    answers; it gets the trainer's weights first if it is behind.

    Raises FailedPreconditionError as Session.bring_up() does.
    """
    client = session.rollouts.clients[0]
    session.bring_up(session.weights(), client)
    temperatures = dict.fromkeys((0.0, session.settings.sampling.temperature))
    return [_measure(session, client, one, concurrency, clock) for one in temperatures]


def _measure(
    session: Session, client: RolloutClient, temperature: float, concurrency: int, clock: Clock
) -> DraftMeasurement:
    prompts = _prompts(session, temperature)
    plain, drafted = Answered(), Answered()
    ways: list[tuple[Answered, Mapping[str, Any]]] = [
        (plain, {}),
        (drafted, session.settings.eval_speculative.fields()),
    ]
    for first in range(0, len(prompts), concurrency):
        batch = prompts[first : first + concurrency]
        # Both ways find the prompts in the server's cache.
        client.generate([_short(prompt) for prompt in batch])
        for answered, speculative in ways:
            asked = [dataclasses.replace(one, speculative=speculative) for one in batch]
            answered.ask(client, asked, clock)
        # Each way comes first every other time.
        ways.reverse()
    return DraftMeasurement(temperature, drafted, plain)


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
