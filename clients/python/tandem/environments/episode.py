"""One episode: the turns of the models, what the environment said between them, and its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash

from tandem._proto.types.v1 import trajectory_pb2
from tandem.data.dataset import Example
from tandem.environments.contract import EnvironmentClass
from tandem.environments.live import Content, Said
from tandem.environments.template import Turns
from tandem.environments.tool_calls import BadCall, Found, ToolCall
from tandem.models.tokenizer import TextCodec
from tandem.rewards.judges.cases import Failure, FailureKind, Outcome
from tandem.rpc.images import VisionInput, images_of
from tandem.rpc.joining import join
from tandem.rpc.requests import Prompt, ResponseSoFar
from tandem.run_directory.episodes import EpisodeKey
from tandem.settings.environment import EnvironmentSettings


class StopReason(StrEnum):
    """Why an episode ended: the model called no tool (finished), or the bound or failure named."""

    FINISHED = "finished"
    TURNS = "turns"
    TOKENS = "tokens"
    TOOL_CALLS = "tool_calls"
    CONTEXT = "context"
    TIME = "time"
    PARSE_ERROR = "parse_error"
    ENVIRONMENT = "environment"


# The name under which a call that cannot be read is answered.
_NO_TOOL = ToolCall("error")


@dataclass(frozen=True)
class Rules:
    """The rules that all episodes of a run share.

    Attributes:
        parse: finds the calls in the text of a turn.
        template_kwargs: variables of the chat template, the tools among them.
        longest: most tokens of a prompt with its response.
    """

    settings: EnvironmentSettings
    environment: EnvironmentClass
    codec: TextCodec
    turns: Turns
    parse: Callable[[str], list[Found]]
    template_kwargs: Mapping[str, Any]
    longest: int

    def prompt(
        self, example: Example, said: Content | None
    ) -> tuple[Sequence[int], Sequence[VisionInput]]:
        """Returns the ids of a prompt with what reset() said behind its last message, its images.

        Raises ConfigError for images that the model does not take.
        """
        if said is None:
            return example.token_ids, example.vision_inputs
        *before, last = example.messages
        messages = [*before, {**last, "content": _joined(last["content"], said)}]
        ids = self.codec.chat(messages, self.template_kwargs)
        inputs = [*example.vision_inputs, *self._pixels([said])]
        return self._expanded(ids, inputs), inputs

    def between(
        self, answers: Sequence[tuple[ToolCall, Content]], start: int
    ) -> tuple[list[int], list[VisionInput]]:
        """Returns the ids and the images of answers, the first of which is token `start`.

        Raises ConfigError as prompt() does.
        """
        if self.environment.text_argument is None:
            ids = self.turns.between(answers)
        else:
            # The user says what the environment does: the models call no tools.
            ids = self.turns.after([{"role": "user", "content": said} for _, said in answers])
        inputs = self._pixels([said for _, said in answers])
        ids = self._expanded(ids, inputs)
        return ids, self.codec.images.placed(ids, inputs, start) if inputs else []

    def _pixels(self, contents: Sequence[Content]) -> list[VisionInput]:
        images = images_of([{"content": one} for one in contents])
        return self.codec.images.images(images, most_tokens=self.longest) if images else []

    def _expanded(self, ids: list[int], inputs: Sequence[VisionInput]) -> list[int]:
        """Returns ids with a token for each row of an image; a text that names one is refused."""
        return self.codec.images.expand(ids, inputs) if self.codec.takes_images else ids


def _joined(content: Content, said: Content) -> Content:
    """Returns the content of a message with what reset() said behind it."""
    if isinstance(content, str) and isinstance(said, str):
        return content + said
    return [*_parts(content), *_parts(said)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@dataclass(frozen=True)
class Takeover:
    """The place in an episode at which another model takes over.

    Attributes:
        after: number of tokens of the models before it.
        tandem: fields of TandemConfig, by which the successor writes.
    """

    after: int
    tandem: Mapping[str, Any]


@dataclass
class Episode:
    """An episode that is drawn.

    Attributes:
        key: the index of its prompt in the step, and its sample.
        request: the request of a first turn, without the text of reset().
        seed: of the environment; the same for all samples of a prompt.
        takeover: where another model takes over from the one that `request` names, within a turn
            or between two; None if none does.
        trajectory: the turns so far as one response; None before the first has come.
        reward: what get_reward() gave, or why the environment failed; None without either.
        stop: why it ended; None until it has.
        images: those of the prompt and of the environment's turns so far, with their pixels.
    """

    key: EpisodeKey
    example: Example
    request: Prompt
    seed: int
    rules: Rules
    takeover: Takeover | None = None
    trajectory: trajectory_pb2.Trajectory | None = None
    reward: Outcome | None = None
    stop: StopReason | None = None
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    parse_errors: int = 0
    seconds: float = 0.0
    images: Sequence[VisionInput] = ()
    _token_ids: Sequence[int] = ()
    _said: list[int] = field(default_factory=list)
    _pending: list[Found] = field(default_factory=list)
    _answers: list[tuple[ToolCall, Content]] = field(default_factory=list)
    # Why the turn that is drawn may have no more tokens; None for a takeover.
    _length_reason: StopReason | None = StopReason.TOKENS
    # Tokens of the models, in all turns and in the present one, which a takeover may interrupt.
    _written: int = 0
    _written_in_turn: int = 0
    _interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether its environment failed."""
        return self.failure_kind is not None

    @property
    def failure_kind(self) -> FailureKind | None:
        """The kind of its environment's failure; None without one."""
        return self.reward.kind if isinstance(self.reward, Failure) else None

    def begun_again(self) -> Episode:
        """Returns the episode as it was before its first call."""
        return Episode(self.key, self.example, self.request, self.seed, self.rules, self.takeover)

    def digest(self) -> str:
        """Returns a digest of the tokens so far, by which a record of the episode is known."""
        written = self.trajectory.response_token_ids if self.trajectory is not None else ()
        ids = np.array([*(self._token_ids or self.example.token_ids), *written], "<i4")
        return xxhash.xxh3_64_hexdigest(ids.tobytes())

    def begin(self, said: Said) -> None:
        """Takes what reset() gave."""
        if self._take(said):
            return
        self._token_ids, self.images = self.rules.prompt(self.example, said.content)
        if len(self._token_ids) >= self.rules.longest:
            text = f"the prompt with what reset() said has {len(self._token_ids):,} tokens"
            self.fail(Failure(f"{text}, but the servers' max_model_len is {self.rules.longest:,}"))

    def next_turn(self) -> Prompt | None:
        """Returns the request for the next turn; None if there is no room, which ends the episode.

        The environment's last words are then not part of the response.
        """
        one, settings = self.trajectory, self.rules.settings
        so_far = ResponseSoFar() if one is None else ResponseSoFar.after(one, self._said)
        before = len(so_far.token_ids)
        rooms: dict[StopReason | None, int] = {
            StopReason.TOKENS: self.request.sampling["max_tokens"] - self._written_in_turn,
            StopReason.CONTEXT: self.rules.longest - len(self._token_ids) - before,
        }
        if settings.max_episode_tokens is not None:
            left = settings.max_episode_tokens - before
            rooms[StopReason.TOKENS] = min(rooms[StopReason.TOKENS], left)
        request = self.request
        if self.takeover is not None and self._written >= self.takeover.after:
            request = dataclasses.replace(request, tandem=self.takeover.tandem)
        elif self.takeover is not None:
            # The last one, so that an episode that ends here is not taken over.
            rooms[None] = self.takeover.after - self._written
        self._length_reason = min(rooms, key=lambda reason: rooms[reason])
        room = rooms[self._length_reason]
        if room < 1:
            self.stop = self._length_reason
            return None
        sampling = dict(self.request.sampling)
        stops = {*sampling.get("stop_token_ids", ()), self.rules.turns.end_id}
        return dataclasses.replace(
            request,
            token_ids=self._token_ids,
            num_samples=1,
            first_sample_index=self.key[1],
            sampling=sampling | {"max_tokens": room, "stop_token_ids": sorted(stops)},
            response=so_far,
            vision_inputs=self.images,
        )

    def wrote(self, turn: trajectory_pb2.Trajectory) -> None:
        """Takes a turn of the models, or its part up to a takeover; finds the calls in it."""
        self.trajectory = self._joined(turn)
        self._said = []
        self._written += len(turn.response_token_ids)
        self._written_in_turn += len(turn.response_token_ids)
        at_length = turn.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        self._interrupted = at_length and self._length_reason is None
        if self._interrupted:
            return
        self.turns += 1
        if at_length:
            self.stop = self._length_reason
            return
        ids = list(self.trajectory.response_token_ids[-self._written_in_turn :])
        if ids[-1] == self.rules.turns.end_id:
            ids.pop()
        self._pending = self.rules.parse("".join(self.rules.codec.token_texts(ids)))
        self._answers = []
        bad = any(isinstance(one, BadCall) for one in self._pending)
        self.parse_errors += bad
        if not self._pending:
            self.stop = StopReason.FINISHED
        elif self.parse_errors >= self.rules.settings.max_parse_errors and bad:
            self.stop = StopReason.PARSE_ERROR

    def next_call(self) -> ToolCall | None:
        """Returns the next call to make; None once the environment has said all of this turn.

        Also None where a takeover has interrupted the turn. Calls that cannot be made are answered
        here.
        """
        if self._interrupted:
            return None
        while self._pending and self.stop is None:
            one = self._pending.pop(0)
            if isinstance(one, BadCall):
                self._answers.append((_NO_TOOL, f"Error: {one.why}"))
                continue
            most = self.rules.settings.max_tool_calls
            if most is not None and self.tool_calls >= most:
                self.stop = StopReason.TOOL_CALLS
                return None
            self.tool_calls += 1
            if one.name in self.rules.environment.tools:
                return one
            names = ", ".join(self.rules.environment.tools)
            self.tool_errors += 1
            self._answers.append((one, f"Error: unknown tool {one.name!r}; the tools are {names}"))
        if self.stop is None:
            self._end_turn()
        return None

    def answered(self, call: ToolCall, said: Said) -> None:
        """Takes what a tool gave."""
        if self._take(said):
            return
        self.tool_errors += said.tool_failed
        self._answers.append((call, said.content or ""))
        if said.done:
            self.stop = StopReason.ENVIRONMENT

    def judged(self, said: Said) -> None:
        """Takes what get_reward() gave."""
        if not self._take(said):
            self.reward = said.reward

    def fail(self, failure: Failure) -> None:
        """Ends the episode because its environment failed: it has no reward then."""
        self.reward = failure
        if self.stop is None:
            self.stop = StopReason.TIME if failure.timed_out else StopReason.ENVIRONMENT

    def _joined(self, turn: trajectory_pb2.Trajectory) -> trajectory_pb2.Trajectory:
        """Returns the turns so far with the next one."""
        before = self.trajectory
        if before is None:
            return turn
        if self.takeover is None:
            return join(before, self._said, turn)
        # The whole has the fields of the model that wrote last.
        same = trajectory_pb2.Trajectory()
        same.CopyFrom(before)
        same.tandem.CopyFrom(turn.tandem)
        same.junior_version = turn.junior_version
        whole = join(same, self._said, turn)
        whole.junior_version = turn.junior_version or before.junior_version
        return whole

    def _take(self, said: Said) -> bool:
        """Counts a call; returns whether the environment failed in it."""
        self.seconds += said.seconds
        if said.failure:
            what, _, trace = said.failure.partition("\n")
            self.fail(Failure(what, trace, kind=said.failure_kind))
            return True
        limit = self.rules.settings.episode_timeout_seconds
        if limit is not None and self.seconds > limit and self.stop is None:
            self.stop = StopReason.TIME
        return False

    def _end_turn(self) -> None:
        """Writes what the environment said, unless no further turn may follow."""
        self._written_in_turn = 0
        if self.turns >= self.rules.settings.max_turns:
            self.stop = StopReason.TURNS
            return
        assert self.trajectory is not None
        written = self.trajectory.response_token_ids
        end = self.rules.turns.missing_end(written[-1])
        start = len(self._token_ids) + len(written) + len(end)
        said, images = self.rules.between(self._answers, start)
        self._said = end + said
        self.images = [*self.images, *images]
