"""The choices of a response: texts that grow token by token, and their log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import RpcError
from tandem.models.tokenizer import TextCodec
from tandem.rpc import requests
from tandem.rpc.aio import AsyncRolloutClient
from tandem.rpc.generate_events import PromptFailed, TokensCame, read_event
from tandem.rpc.images import BLOB_MISSING, VisionInput
from tandem.rpc.requests import Prompt, ScoredTokens
from tandem.rpc.retry import Retries, RetryPolicy
from tandem.rpc.wire import from_tensor, short_floats

# Attempts at a call that finds its images gone.
_ATTEMPTS = 8
# Seconds in which a server may end a call whose choices are done.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class TokenScore:
    """Log-probabilities at one position, in nats, under the senior at temperature 1.

    Attributes:
        own: that of the token.
        top: ids of the likeliest tokens, and theirs, the likeliest first; None unless asked for.
    """

    own: float
    top: Sequence[tuple[int, float]] | None


@dataclass
class Choice:
    """One response to one prompt.

    Attributes:
        index: number of the choice in the response.
        prompt: ids of the prompt.
        codec: the tokenizer.
        stops: texts that end the response; they are not part of it.
        images: those of the prompt.
        ids: ids of the response so far, with the one that ended it.
        text: the response so far, without special tokens.
        finish_reason: "stop", "length" or "tool_calls"; "" while the response grows.
        tool_calls: calls of tools, as OpenAI's API shows them; the text does not contain them.
        whole: whether the choice ends only with its trajectory, not with a stop text.
        trajectory: what the rollout server returned; None until it has.
    """

    index: int
    prompt: Sequence[int]
    codec: TextCodec
    stops: Sequence[str] = ()
    images: Sequence[VisionInput] = ()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False
    trajectory: trajectory_pb2.Trajectory | None = None

    def __post_init__(self) -> None:
        self._growing = self.codec.growing(special=False)
        # Place in the text at which each token begins.
        self._starts: list[int] = []
        self._told = 0
        # Where a stop text ended the text; None if none has.
        self._cut: int | None = None

    def add(self, ids: Sequence[int]) -> None:
        """Takes the next tokens, up to the one that completes a stop text."""
        for token in ids:
            if self.finish_reason:
                return
            self.ids.append(token)
            self._starts.append(len(self.text))
            self._extend(self._growing.add(token))

    def finish(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Takes the end of the response."""
        self.trajectory = trajectory
        self.add(trajectory.response_token_ids[len(self.ids) :])
        if not self.finish_reason:
            self._extend(self._growing.rest())
        if not self.finish_reason:
            stopped = trajectory.finish_reason == trajectory_pb2.FINISH_REASON_STOP
            self.finish_reason = "stop" if stopped else "length"

    def new_text(self) -> str:
        """Returns the text since the last call, without an end that may begin a stop text."""
        end = len(self.text)
        if not self.finish_reason:
            end -= max((_overlap(self.text, stop) for stop in self.stops), default=0)
        new = self.text[self._told : end]
        self._told = max(self._told, end)
        return new

    def shown(self) -> tuple[list[int], list[int]]:
        """Returns the ids that are part of the text, and where each begins in it."""
        count = len(self.ids)
        while self._cut is not None and count and self._starts[count - 1] >= self._cut:
            count -= 1
        return self.ids[:count], self._starts[:count]

    def _extend(self, piece: str) -> None:
        longest = max(map(len, self.stops), default=0)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [place for stop in self.stops if (place := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"
            self._cut = len(self.text)


def _overlap(text: str, stop: str) -> int:
    """Returns the number of characters of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


async def generate(
    client: AsyncRolloutClient,
    prompts: Sequence[Prompt],
    choices: Sequence[Choice],
    retry: RetryPolicy,
) -> AsyncIterator[Choice]:
    """Lets the rollout server answer; yields a choice whenever it has grown, until all are done.

    A prompt is cancelled when its choice ends at a stop text. The call is cancelled if the
    iteration ends before the choices. A call that fails before the first token is made again while
    `retry` allows it, unless the server has no room: the HTTP client tries again then.
    """
    images = [image for prompt in prompts for image in prompt.vision_inputs]
    retries, attempts = Retries(retry), 0
    while True:
        try:
            await client.upload_images(images)
            async with aclosing(_generate(client, prompts, choices)) as growing:
                async for choice in growing:
                    yield choice
            return
        except RpcError as error:
            attempts += 1
            if any(choice.ids for choice in choices):
                raise
            if attempts < _ATTEMPTS and error.reason == BLOB_MISSING:
                continue
            wait = None
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                wait = retries.wait_after(error)
            if wait is None:
                raise
        await asyncio.sleep(wait)


async def _generate(
    client: AsyncRolloutClient, prompts: Sequence[Prompt], choices: Sequence[Choice]
) -> AsyncIterator[Choice]:
    """Makes one attempt of generate()."""
    by_id = {prompt.request_id: choice for prompt, choice in zip(prompts, choices, strict=True)}
    growing = set(by_id)
    cancelled: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()
    failure: RpcError | None = None

    # Outside of the stream, which would swallow the error of a field that does not fit.
    batch = requests.submit(prompts)

    async def messages() -> AsyncIterator[rollout_pb2.GenerateRequest]:
        for message in batch:
            yield message
        while (names := await cancelled.get()) is not None:
            cancel = rollout_pb2.CancelPrompts(request_ids=names)
            yield rollout_pb2.GenerateRequest(cancel=cancel)

    events = client.stream(messages())
    try:
        async for event in events:
            told = read_event(event)
            # A prompt that was cancelled may still send events.
            if told is None or told.request_id not in growing:
                continue
            choice = by_id[told.request_id]
            if isinstance(told, PromptFailed):
                failure = told.error
                cancelled.put_nowait([name for name in growing if name != told.request_id])
                growing.clear()
                break
            if isinstance(told, TokensCame):
                choice.add(told.token_ids)
                if choice.finish_reason and choice.whole:
                    continue
            else:
                choice.finish(told.trajectory)
            if choice.finish_reason:
                growing.remove(told.request_id)
                if isinstance(told, TokensCame):
                    cancelled.put_nowait([told.request_id])
            yield choice
            if not growing:
                break
        if not growing:
            # The server ends the call, as it has nothing left to do: no reset counts against us.
            cancelled.put_nowait(None)
            await _read_to_end(events)
    finally:
        # Ends messages(), which nobody else would.
        cancelled.put_nowait(None)
        await events.aclose()
    if failure is not None:
        raise failure
    if growing:
        raise RpcError(
            f"{client.address} ended the stream with {len(growing)} choices unfinished",
            code=grpc.StatusCode.INTERNAL,
            method="Generate",
        )


async def _read_to_end(events: AsyncIterator[rollout_pb2.GenerateResponse]) -> None:
    """Lets a call end by itself, for a while; what it still says is of no interest."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            async for _ in events:
                pass
    except (TimeoutError, RpcError):
        pass


async def score(
    client: AsyncRolloutClient, sequences: Mapping[int, ScoredTokens], num_top: int
) -> dict[int, list[TokenScore]]:
    """Returns the scores of tokens, by the keys of `sequences`."""
    asked = {
        key: one for key, one in sequences.items() if one.first_scored_token < len(one.token_ids)
    }
    scores: dict[int, list[TokenScore]] = {key: [] for key in sequences}
    if not asked:
        return scores
    reply = await client.score(asked.values(), temperature=1.0, num_top_logprobs=num_top)
    for key, one in zip(asked, reply.sequences, strict=True):
        own = short_floats(from_tensor(one.senior_logprobs))
        top: list[list[tuple[int, float]] | None] = [None] * len(own)
        if num_top:
            ids = from_tensor(one.senior_top_token_ids).tolist()
            logprobs = [short_floats(row) for row in from_tensor(one.senior_top_logprobs)]
            top = [list(zip(*place, strict=True)) for place in zip(ids, logprobs, strict=True)]
        scores[key] = [TokenScore(*place) for place in zip(own, top, strict=True)]
    return scores
