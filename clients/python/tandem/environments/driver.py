"""Draws many episodes at once: no turn waits for the environment of another episode.

One thread keeps the episodes. Environments answer in threads of their own, and the turns that are
ready go to the rollout servers together, in several requests at a time. Nothing depends on who is
ready first: a turn is a function of its tokens, its seed and the weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from tandem import tracing
from tandem._proto.types.v1 import trajectory_pb2
from tandem.environments.calls import Call, Calls, Environment
from tandem.environments.episode import Episode, Rules
from tandem.environments.junior import Answer, AskedJunior
from tandem.environments.live import Said
from tandem.environments.tool_calls import ToolCall
from tandem.errors import ConfigError, EnvironmentFailedError
from tandem.rewards.judges.cases import Failure, FailureKind, failure_of
from tandem.rewards.judges.watch import STOP_SECONDS
from tandem.rewards.judges.workers import settle
from tandem.rpc.requests import Prompt
from tandem.run_directory.episodes import EpisodeRecord, NoRecord
from tandem.utils.interrupt import StopRequested
from tandem.utils.progress import Progress

# Most requests for turns at a time. Turns that are ready while so many run go together in the next.
MOST_REQUESTS = 16
# Seconds between two looks at whether the run was asked to stop.
_LOOK_SECONDS = 0.5


class Generate(Protocol):
    """Draws samples of prompts, and tells each prompt's as soon as they have come."""

    def __call__(
        self,
        prompts: Sequence[Any],
        on_answer: Callable[[int, list[trajectory_pb2.Trajectory]], None],
    ) -> object:
        """Returns when all have come; raises if one cannot be drawn."""
        ...


# A prompt, and what takes the sample that the servers draw for it.
_Asked = tuple[Prompt, Callable[[trajectory_pb2.Trajectory], None]]


@dataclass(eq=False)
class _Running:
    """An episode with its environment.

    Attributes:
        environment: made by its first call; None while the record answers.
        recorded: the lines of the record that are not replayed yet; none for an episode that is
            not recorded.
    """

    episode: Episode
    environment: Environment | None
    recorded: list[dict[str, Any]]


class Driver:
    """Draws episodes; one object for one set of them."""

    def __init__(
        self,
        rules: Rules,
        calls: Calls[Any],
        record: EpisodeRecord | NoRecord,
        generate: Generate,
        *,
        on_end: Callable[[Episode], None],
        stopping: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> None:
        """`on_end` is called with each episode, in the caller's thread and in any order."""
        self._rules = rules
        self._calls = calls
        self._record = record
        self._generate = generate
        self._on_end = on_end
        self._stopping = stopping
        self._progress = progress or Progress()
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[_Running] = deque()
        self._ready: list[_Running] = []
        # Questions to the junior that are not sent yet, and all that have no answer.
        self._questions: list[tuple[Prompt, Answer]] = []
        self._unanswered: set[Answer] = set()
        # Episodes whose environment is made and not closed.
        self._running: set[_Running] = set()
        self._over = False
        self._requests = 0
        self._unfinished = 0
        self._stop_asked_at: float | None = None

    def run(self, episodes: Sequence[Episode]) -> None:
        """Draws the episodes to their ends.

        Raises what generating raises, and StopRequested if the run was asked to stop and an
        environment does not answer.
        """
        self._unfinished = len(episodes)
        self._progress.expect(len(episodes))
        self._waiting.extend(
            _Running(one, None, list(self._record.replay(one.key))) for one in episodes
        )
        most = self._rules.settings.concurrent_episodes or len(episodes)
        for _ in range(min(most, len(episodes))):
            self._begin(self._waiting.popleft())
        try:
            self._go()
        finally:
            # Environments of a run that ends must not wait for the junior.
            self._over = True
            for answer in list(self._unanswered):
                _refuse(answer)
            for one in self._running:
                self._calls.leave(one.environment)

    def _go(self) -> None:
        """Takes what happens, one event after the other, until all episodes have ended."""
        while self._unfinished:
            # All that has happened comes first, so that the turns that are ready go together.
            try:
                event = self._events.get_nowait()
            except Empty:
                self._request_turns()
                # Those that had no room for a turn may have been the last.
                if not self._unfinished:
                    return
                event = self._wait()
            event()

    def _wait(self) -> Callable[[], None]:
        """Returns what happens next."""
        self._record.sync()
        while True:
            try:
                return self._events.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._require_progress()

    def _require_progress(self) -> None:
        """Raises StopRequested where only environments keep a run that was asked to stop."""
        if self._requests or not self._stopping():
            self._stop_asked_at = None
            return
        self._stop_asked_at = self._stop_asked_at or time.monotonic()
        if time.monotonic() - self._stop_asked_at >= STOP_SECONDS:
            raise StopRequested(f"{self._unfinished} episodes wait for their environments")

    # The steps of an episode. Each ends with a call, a request, or the end.

    def _begin(self, one: _Running) -> None:
        environment, episode = self._rules.environment, one.episode
        junior = AskedJunior(episode, self._ask_junior) if environment.takes_junior else None
        arguments = environment.arguments(deepcopy(episode.example.row), episode.seed, junior)
        self._ask(
            one,
            {"call": "reset"},
            lambda live: live.reset(arguments),
            partial(self._begun, one),
        )

    def _begun(self, one: _Running, said: Said) -> None:
        self._guarded(one, lambda: one.episode.begin(said))
        self._go_on(one)

    def _go_on(self, one: _Running) -> None:
        """Lets the models write the next turn, or ends the episode."""
        if one.episode.stop is not None:
            self._judge(one)
            return
        self._ready.append(one)

    def _ask_junior(self, prompt: Prompt) -> Answer:
        """Sends a question of an environment, in whose thread this is called, with the turns."""
        answer: Answer = Future()

        def add() -> None:
            self._questions.append((prompt, answer))

        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._events.put(add)
        if self._over:
            _refuse(answer)
        return answer

    def _request_turns(self) -> None:
        """Asks for the turns that are ready, and the junior, if not too many requests run."""
        if not (self._ready or self._questions) or self._requests >= MOST_REQUESTS:
            return
        ready, self._ready = self._ready, []
        questions, self._questions = self._questions, []
        asked: list[_Asked] = [(prompt, partial(settle, answer)) for prompt, answer in questions]
        for one in ready:
            prompt = one.episode.next_turn()
            if prompt is None:
                self._judge(one)
            else:
                asked.append((prompt, partial(self._told, one)))
        if not asked:
            return
        self._requests += 1
        # The calls of another thread belong to the caller's span, too.
        work = partial(copy_context().run, self._request, asked)
        threading.Thread(target=work, name="episodes", daemon=True).start()

    def _told(self, one: _Running, turn: trajectory_pb2.Trajectory) -> None:
        self._events.put(partial(self._wrote, one, turn))

    def _request(self, asked: Sequence[_Asked]) -> None:
        def take(index: int, samples: list[trajectory_pb2.Trajectory]) -> None:
            [turn] = samples
            asked[index][1](turn)

        try:
            self._generate([prompt for prompt, _ in asked], take)
        except BaseException as error:  # It is raised in the caller's thread.
            self._events.put(partial(_raise, error))
        finally:
            self._events.put(self._request_ended)

    def _request_ended(self) -> None:
        self._requests -= 1

    def _wrote(self, one: _Running, turn: trajectory_pb2.Trajectory) -> None:
        one.episode.wrote(turn)
        self._progress.advance(0, len(turn.response_token_ids))
        self._call_next(one)

    def _call_next(self, one: _Running) -> None:
        found: list[ToolCall | None] = [None]

        def find() -> None:
            found[0] = one.episode.next_call()

        self._guarded(one, find)
        call = found[0]
        if call is None:
            self._go_on(one)
            return
        arguments = dict(self._rules.environment.typed(call))
        self._ask(
            one,
            {"call": call.name, "arguments": arguments},
            lambda live: live.tool(call.name, arguments),
            partial(self._answered, one, call),
        )

    def _answered(self, one: _Running, call: ToolCall, said: Said) -> None:
        one.episode.answered(call, said)
        self._call_next(one)

    def _judge(self, one: _Running) -> None:
        if one.episode.failed or not self._rules.environment.has_reward:
            self._end(one)
            return
        self._ask(
            one,
            {"call": "get_reward"},
            lambda live: live.reward(),
            partial(self._judged, one),
        )

    def _judged(self, one: _Running, said: Said) -> None:
        one.episode.judged(said)
        self._end(one)

    def _end(self, one: _Running) -> None:
        episode = one.episode
        assert episode.stop is not None
        if one.environment is not None:
            self._record.add(episode.key, {"turn": episode.turns, "end": episode.stop.value})
            self._running.discard(one)
            # One that hangs in a call, or ended its process, is not closed.
            if episode.failure_kind in (FailureKind.TIMEOUT, FailureKind.CRASH):
                self._calls.leave(one.environment)
            else:
                self._calls.close_environment(one.environment, episode.example.place)
        self._unfinished -= 1
        self._progress.advance(1)
        self._on_end(episode)
        if self._waiting:
            self._begin(self._waiting.popleft())

    def _guarded(self, one: _Running, work: Callable[[], None]) -> None:
        """Does what may fail because of what an environment said, as text that is no Unicode."""
        try:
            work()
        except ConfigError as error:
            one.episode.fail(failure_of(error))

    # Answers of environments, new ones or those of the record.

    def _ask(
        self,
        one: _Running,
        what: dict[str, Any],
        ask: Callable[[Environment], Said | Failure],
        take: Callable[[Said], None],
    ) -> None:
        episode = one.episode
        line = {"turn": episode.turns, **what, "wrote": episode.digest()}
        if one.recorded:
            known = one.recorded.pop(0)
            if all(known.get(name) == value for name, value in line.items()):
                said = {name: known[name] for name in Said.__annotations__ if name in known}
                self._events.put(partial(take, Said(**said)))
                return
            # The models write otherwise than then, so the record is of another episode.
            self._record.forget(episode.key)
            one.recorded, one.episode = [], episode.begun_again()
            self._begin(one)
            return
        if one.environment is None:
            one.environment = self._calls.environment(self._rules.environment)
            self._running.add(one)

        def tell(said: Said) -> None:
            self._record.add(episode.key, line | said.record())
            take(said)

        prompt, sample = episode.key
        attributes = {
            "tandem.prompt": prompt,
            "tandem.sample": sample,
            "tandem.turn": episode.turns,
            "tandem.call": what["call"],
        }

        def spanned(live: Environment) -> Said | Failure:
            with tracing.span("environment", attributes):
                return ask(live)

        # The calls of another thread belong to the caller's span, too.
        run = partial(copy_context().run, spanned)
        future = self._calls.start(Call(one.environment, run, episode.example.place))
        future.add_done_callback(lambda done: self._events.put(partial(tell, _said(done.result()))))


def _said(outcome: Said | Failure) -> Said:
    return Said.failed(outcome) if isinstance(outcome, Failure) else outcome


def _refuse(answer: Answer) -> None:
    """Fails a question that nobody answers any more."""
    with suppress(InvalidStateError):
        answer.set_exception(EnvironmentFailedError("the run has ended"))


def _raise(error: BaseException) -> None:
    raise error
