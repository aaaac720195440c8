"""Clients that call a rollout server at random, and check what it answers."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import harness
import http2
from google.protobuf import text_format
from google.protobuf.message import Message
from grpc import StatusCode
from harness import TANDEM
from soak_configurations import MAX_MODEL_LEN
from steadiness import DisturbanceError
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import CancelledError, DeadlineError, RpcError, from_status
from tandem.rpc import requests
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt
from weight_sets import WeightSet

# Ids of the tiny models that no boundary set, stop or padding takes.
FIRST_ID, LAST_ID = 2, 280
# A prompt of this length leaves room for a response in every lane.
LONGEST_PROMPT = 150
LONGEST_RESPONSE = 90
# Prompts begin with one of these many stems.
STEMS = 5
# The loopback address of connections that are closed in the middle of a call.
LEAVING_ADDRESS = "127.0.2.1"
GENERATE = "/tandem.rollout.v1.RolloutService/Generate"


@dataclass(frozen=True)
class Scored:
    """A sequence, and what Score answered for it under the weights `digest`."""

    token_ids: Sequence[int]
    first: int
    temperature: float
    digest: str
    scores: rollout_pb2.SequenceScores


@dataclass
class Workload:
    """State that the clients of one server share.

    Attributes:
        seed: text that all random choices follow from.
        sets: the weights that an update may bring.
        done: number of successes of every action, by its name, and of other events.
        kept_part: part of the prompts and scores that are kept.
        patience: seconds for which a slow reader stops, about.
        kept: responses to replay, with their prompts.
        scored: replies of Score to compare.
    """

    seed: str
    address: str
    sets: Sequence[WeightSet]
    num_token_ids: int
    max_queue: int
    kept_part: float
    patience: float
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    kept: list[tuple[Prompt, trajectory_pb2.Trajectory]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    # A receiver takes one update at a time.
    updates: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        random = Random(self.seed)
        self.stems = [
            [random.randrange(FIRST_ID, LAST_ID) for _ in range(LONGEST_PROMPT)]
            for _ in range(STEMS)
        ]

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter of `done`."""
        with self.lock:
            self.done[name] += number

    def update(self, client: RolloutClient, weights: WeightSet) -> None:
        """Brings the server to new weights, of the next version."""
        with self.updates:
            self.version += 1
            weights.install(client.channel, self.version, self.num_token_ids)

    def take(self, prompt: Prompt, trajectory: trajectory_pb2.Trajectory) -> None:
        """Counts a response, checks its form, and keeps it if its prompt is one to replay."""
        length = len(trajectory.response_token_ids)
        tensors = [trajectory.author_logprobs]
        for name in ("other_logprobs", "log_keep_mass"):
            if trajectory.HasField(name):
                tensors.append(getattr(trajectory, name))
        wrong = (
            list(trajectory.prompt_token_ids) != list(prompt.token_ids)
            or trajectory.seed != prompt.seed
            or not 1 <= length <= prompt.sampling["max_tokens"]
            or len(trajectory.authorship_mask) != length
            or sum(run.count for run in trajectory.senior_versions) != length
            or any(list(tensor.shape) != [length] for tensor in tensors)
        )
        if wrong:
            raise DisturbanceError(f"not a response to {prompt}: {shown(trajectory)}")
        with self.lock:
            self.done["responses"] += 1
            self.done["tokens"] += length
            if Random(f"{self.seed}/{prompt.seed}").random() < self.kept_part:
                self.kept.append((prompt, trajectory))


def shown(message: Message) -> str:
    """Returns a message in one line."""
    return text_format.MessageToString(message, as_one_line=True)


class Reading:
    """The events of one stream so far.

    Attributes:
        events: number of events.

    Args:
        prompts: the prompts of the stream.
        cancelled: ids of prompts that may fail as cancelled.
        refused: codes of the prompts that must be refused, by id.
    """

    def __init__(
        self,
        workload: Workload,
        prompts: Iterable[Prompt],
        cancelled: Collection[str] = (),
        refused: dict[str, StatusCode] | None = None,
    ) -> None:
        self._workload = workload
        self._prompts = {prompt.request_id: prompt for prompt in prompts}
        self._cancelled = cancelled
        self._refused = dict(refused or {})
        self._ended: set[str] = set()
        self.events = 0
        self._streamed: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._finished: dict[str, dict[int, trajectory_pb2.Trajectory]] = {
            name: {} for name in self._prompts
        }

    def take(self, event: rollout_pb2.GenerateResponse) -> None:
        """Takes the next event; raises DisturbanceError for one that must not come."""
        self.events += 1
        kind = event.WhichOneof("event")
        if kind != "heartbeat" and getattr(event, kind).request_id in self._ended:
            raise DisturbanceError(f"an event of a cancelled prompt: {shown(event)}")
        if kind == "tokens":
            self._take_tokens(event.tokens)
        elif kind == "finished":
            self._take_finished(event.finished)
        elif kind == "failed":
            self._take_failed(event.failed)

    @property
    def done(self) -> bool:
        """Whether every prompt has ended."""
        return all(
            name in self._ended or len(samples) == self._prompts[name].num_samples
            for name, samples in self._finished.items()
        )

    def end(self) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the responses by prompt; raises DisturbanceError if one is missing."""
        if self._refused:
            raise DisturbanceError(f"not refused: {self._refused}")
        if not self.done:
            raise DisturbanceError(f"the stream ended before all of {list(self._prompts.values())}")
        return [[s[i] for i in sorted(s)] for s in self._finished.values()]

    def _take_tokens(self, event: rollout_pb2.TokensEvent) -> None:
        known = self._streamed.setdefault((event.request_id, event.sample_index), [])
        wrong = event.offset != len(known) or len(event.token_ids) != len(event.authorship_mask)
        if wrong or not self._prompts[event.request_id].stream_tokens:
            raise DisturbanceError(f"after {len(known)} tokens came {shown(event)}")
        known.extend(zip(event.token_ids, event.authorship_mask, strict=True))

    def _take_finished(self, event: rollout_pb2.FinishedEvent) -> None:
        prompt, trajectory = self._prompts[event.request_id], event.trajectory
        samples = self._finished[event.request_id]
        if trajectory.sample_index in samples or trajectory.sample_index >= prompt.num_samples:
            raise DisturbanceError(f"sample {trajectory.sample_index} of {prompt}")
        if prompt.stream_tokens:
            streamed = self._streamed.get((event.request_id, trajectory.sample_index), [])
            if streamed != list(
                zip(harness.tokens(trajectory), harness.mask(trajectory), strict=True)
            ):
                raise DisturbanceError(f"{streamed} was streamed, finished was {shown(trajectory)}")
        samples[trajectory.sample_index] = trajectory
        self._workload.take(prompt, trajectory)

    def _take_failed(self, event: rollout_pb2.FailedEvent) -> None:
        name = event.request_id
        error = from_status(event.status, method="Generate", request_id=name)
        if name in self._refused:
            expected = self._refused.pop(name)
            self._workload.count("prompts refused")
        elif name in self._cancelled:
            expected = StatusCode.CANCELLED
            self._ended.add(name)
            self._workload.count("prompts cancelled")
        else:
            expected = None
        if error.code != expected:
            raise DisturbanceError(f"{name} failed: {error}")


class SoakClient:
    """A client with a channel of its own; `actions` holds what it may do, with weights."""

    def __init__(self, workload: Workload, number: int, stack: contextlib.ExitStack) -> None:
        self._workload = workload
        self._number = number
        self._random = Random()
        self._rollout = stack.enter_context(RolloutClient(workload.address, timeout_seconds=300))
        self.actions: dict[Callable[[], None], float] = {
            self.generate: 12,
            self.stream: 12,
            self.converse: 8,
            self.cancel_some: 8,
            self.leave_a_stream: 6,
            self.break_the_connection: 4,
            self.run_out_of_time: 4,
            self.read_slowly: 3,
            self.be_refused: 4,
            self.score: 8,
            self.score_much: 1,
            self.update_weights: 4,
            self.give_up_an_update: 2,
            self.pause: 2,
            self.update_in_a_pause: 1,
            self.look_around: 2,
        }

    def run(self, until: float, failed: threading.Event) -> None:
        """Acts until a moment of time.monotonic(), or until a client failed; this one sets it."""
        actions, weights = zip(*self.actions.items(), strict=True)
        turn = 0
        while time.monotonic() < until and not failed.is_set():
            # An action's choices do not depend on the answers that earlier ones got.
            self._random = Random(f"{self._workload.seed}/{self._number}/{turn}")
            [action] = self._random.choices(actions, weights)
            name = action.__name__.replace("_", " ")
            try:
                action()
            except BaseException as error:
                failed.set()
                raise DisturbanceError(
                    f"client {self._number}, action {turn} ({name}): {error}"
                ) from error
            self._workload.count(name)
            turn += 1

    def generate(self) -> None:
        """Gets all responses to some prompts at once."""
        prompts = self._prompts(5)
        for prompt, group in zip(prompts, self._rollout.generate(prompts), strict=True):
            for trajectory in group:
                self._workload.take(prompt, trajectory)

    def stream(self) -> None:
        """Reads all events of some prompts."""
        self._read(self._prompts(5))

    def converse(self) -> None:
        """Holds a conversation of up to four turns, each prompt with all turns before it."""
        prompt = self._prompt(0)
        for turn in range(1 + self._random.randrange(4)):
            question = self._ids(1 + self._random.randrange(10))
            [samples] = self._read([prompt])
            ids = [*prompt.token_ids, *samples[0].response_token_ids, *question]
            if len(ids) > LONGEST_PROMPT:
                return
            prompt = replace(prompt, token_ids=ids, request_id=f"turn-{turn}")

    def cancel_some(self) -> None:
        """Cancels a part of the prompts after some events, and reads the rest."""
        prompts = self._prompts(8)
        cancelled = {p.request_id for p in prompts if self._random.random() < 0.5}
        after = self._random.choice((0, 0, 1, 5, 20))
        reading = Reading(self._workload, prompts, cancelled)
        with self._rollout.open_stream() as stream:
            stream.submit(prompts)
            events = iter(stream)
            while reading.events < after and not reading.done:
                reading.take(next(events))
            stream.cancel(cancelled)
            stream.half_close()
            for event in events:
                reading.take(event)
        reading.end()

    def leave_a_stream(self) -> None:
        """Cancels a call after some events."""
        prompts = self._prompts(8)
        events = self._rollout.stream(requests.submit(prompts))
        for _ in range(self._random.choice((0, 1, 5, 30))):
            next(events, None)
        events.close()

    def break_the_connection(self) -> None:
        """Closes a connection in the middle of a call."""
        connection = http2.Connection(self._workload.address, LEAVING_ADDRESS)
        stream = connection.open(GENERATE)
        for request in requests.submit(self._prompts(8)):
            data = request.SerializeToString()
            connection.send(stream, b"\0" + len(data).to_bytes(4) + data)
        time.sleep(self._random.random() / 10)
        connection.close()

    def run_out_of_time(self) -> None:
        """Generates with a deadline of at most 80 ms."""
        with contextlib.suppress(DeadlineError, CancelledError):
            self._rollout.generate(
                self._prompts(8), timeout_seconds=0.001 + self._random.random() / 12
            )

    def read_slowly(self) -> None:
        """Stops reading for a while after some events, while the server writes on."""
        prompts = [replace(p, stream_tokens=True, num_samples=8) for p in self._prompts(8)]
        self._read(prompts, stop_after=self._random.randrange(20))

    def be_refused(self) -> None:
        """Sends prompts that must be refused beside one that must not, and a wrong Score."""
        good, *rest = (self._prompt(index) for index in range(7))
        changes: list[tuple[StatusCode, dict[str, Any]]] = [
            (StatusCode.INVALID_ARGUMENT, {"token_ids": [5, self._workload.num_token_ids]}),
            (StatusCode.INVALID_ARGUMENT, {"tandem": {"boundary_token_ids": [10**6]}}),
            (StatusCode.OUT_OF_RANGE, {"token_ids": self._ids(MAX_MODEL_LEN)}),
            (StatusCode.OUT_OF_RANGE, {"num_samples": self._workload.max_queue + 1}),
            (StatusCode.INVALID_ARGUMENT, {"token_ids": []}),
            (StatusCode.INVALID_ARGUMENT, {"sampling": {"max_tokens": 3, "temperature": -1.0}}),
        ]
        bad = [replace(p, **change) for p, (_, change) in zip(rest, changes, strict=True)]
        refused = {p.request_id: code for p, (code, _) in zip(bad, changes, strict=True)}
        # The second use of an id is refused, and the first goes on.
        refused[good.request_id] = StatusCode.ALREADY_EXISTS
        reading = Reading(self._workload, [good], refused=refused)
        for event in self._rollout.stream(requests.submit([good, *bad, good])):
            reading.take(event)
        reading.end()
        try:
            self._rollout.score([([7], 1)])
        except RpcError as error:
            if error.field == "sequences[0].token_ids":
                return
            raise
        raise DisturbanceError("a Score of one token was answered")

    def score(self) -> None:
        """Scores some sequences under both models."""
        self._score(1 + self._random.randrange(4))

    def score_much(self) -> None:
        """Scores as many sequences as take several slices."""
        self._score(40)

    def update_weights(self) -> None:
        """Brings new weights, or the same ones again."""
        self._workload.update(self._rollout, self._random.choice(self._workload.sets))

    def give_up_an_update(self) -> None:
        """Uploads a half of new weights, and aborts the update or leaves it to the next one."""
        workload = self._workload
        weights, abort = self._random.choice(workload.sets), self._random.random() < 0.5
        with workload.updates:
            workload.version += 1
            weights.upload_half(
                self._rollout.channel, workload.version, workload.num_token_ids, abort=abort
            )

    def pause(self) -> None:
        """Stops generation for a moment."""
        self._paused(lambda: time.sleep(self._random.random() / 20))

    def update_in_a_pause(self) -> None:
        """Brings new weights while generation is stopped."""
        self._paused(self.update_weights)

    def look_around(self) -> None:
        """Asks for the server's information and health."""
        self._rollout.info()
        if self._rollout.health() != "SERVING":
            raise DisturbanceError("the server is not healthy")

    def _read(
        self, prompts: Sequence[Prompt], stop_after: int | None = None
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the responses by prompt; stops for a while after the event `stop_after`."""
        reading = Reading(self._workload, prompts)
        for event in self._rollout.stream(requests.submit(prompts)):
            if reading.events == stop_after:
                time.sleep(self._workload.patience * (0.5 + self._random.random()))
            reading.take(event)
        return reading.end()

    def _score(self, count: int) -> None:
        sequences = []
        for _ in range(count):
            ids = self._ids(2 + self._random.randrange(LONGEST_PROMPT))
            sequences.append((ids, 1 + self._random.randrange(len(ids) - 1)))
        temperature = self._random.choice((0.7, 1.0, 1.3))
        kept = self._random.random() < self._workload.kept_part
        reply = self._rollout.score(sequences, junior=True, temperature=temperature)
        if kept:
            with self._workload.lock:
                self._workload.scored += [
                    Scored(ids, first, temperature, reply.weights.digest, scores)
                    for (ids, first), scores in zip(sequences, reply.sequences, strict=True)
                ]

    def _paused(self, action: Callable[[], None]) -> None:
        try:
            self._rollout.pause()
            action()
        finally:
            self._rollout.resume()

    def _prompts(self, most: int) -> list[Prompt]:
        return [self._prompt(index) for index in range(1 + self._random.randrange(most))]

    def _prompt(self, index: int) -> Prompt:
        random = self._random
        sampling = {
            "max_tokens": 1 + random.randrange(LONGEST_RESPONSE),
            "temperature": random.choice((0.0, 0.7, 1.0, 1.3)),
            "top_k": random.choice((0, 0, 20)),
            "top_p": random.choice((1.0, 1.0, 0.9)),
            "min_p": random.choice((0.0, 0.0, 0.02)),
            "ignore_eos": random.random() < 0.5,
            "stop_token_ids": random.choice(([], [], [40, 41, 42])),
        }
        tandem: dict[str, Any] = {"enabled": False}
        if random.random() < 0.85:
            tandem = dict(random.choice(list(TANDEM.values())))
            if "prob_senior" in tandem:
                tandem["prob_senior"] = random.choice((0.0, 0.3, 0.5, 0.8, 1.0))
            # The tiny models seldom write the ids of the default sets.
            if random.random() < 0.5:
                tandem["boundary_token_ids"] = list(range(FIRST_ID, 90))
        # Drafts of the junior for the senior alone would change the limit of the length.
        drafters = ("ngram", "junior") if tandem.get("enabled", True) else ("ngram",)
        speculative = {
            "method": random.choice(("none", *drafters)),
            "num_speculative_tokens": 1 + random.randrange(15),
            "prompt_lookup_min": random.choice((1, 2)),
        }
        return Prompt(
            self._ids(1 + random.randrange(LONGEST_PROMPT)),
            seed=random.getrandbits(64),
            num_samples=random.choice((1, 1, 2, 4)),
            sampling=sampling,
            tandem=tandem,
            return_other_logprobs=random.random() < 0.5,
            stream_tokens=random.random() < 0.5,
            request_id=f"prompt-{index}",
            speculative=speculative,
        )

    def _ids(self, count: int) -> list[int]:
        """Ids that begin as those of many other prompts do."""
        stem = self._random.choice(self._workload.stems)
        shared = min(count, self._random.randrange(len(stem)))
        own = [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(count - shared)]
        return stem[:shared] + own
