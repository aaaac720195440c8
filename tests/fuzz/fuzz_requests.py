"""Sends damaged requests to the three real servers and checks that they disturb nothing else.

    fuzz_requests.py [--mutations N] [--seed S] [--first I]

Mutation I of seed S is always the same. An error must have a code of REFUSALS and a reason that
docs/reference/errors.md lists, and name the field if it is INVALID_ARGUMENT; a call with an
unreadable message must not be answered with OK. In between, the servers must be idle, their memory
flat, and the replies to fixed requests the same bits. `make mutate` runs this.
"""

from __future__ import annotations

import argparse
import collections
import copy
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import harness
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from mutator import damage, mutate
from steadiness import (
    DisturbanceError,
    Servers,
    memory,
    require_alive,
    require_flat,
    require_idle,
    serving,
)
from tandem.errors import RpcError, from_rpc, from_status
from tandem.rpc.transport import CHANNEL_OPTIONS
from valid_calls import ValidCall, make_models, valid_calls

# Codes with which a server may refuse a request.
REFUSALS = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.ALREADY_EXISTS,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.OUT_OF_RANGE,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.DATA_LOSS,
        StatusCode.UNIMPLEMENTED,
    }
)
# Further codes of a publication whose receiver does not answer.
UNREACHABLE = frozenset({StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED})
REASONS = frozenset(
    re.findall(
        r"^\| `([A-Z_]+)` \|", (harness.REPOSITORY / "docs/reference/errors.md").read_text(), re.M
    )
)
# Deadline of a call: a damaged request costs little.
CALL_SECONDS = 60.0
# Deadline of a damaged publication, whose targets may not exist.
PUBLISH_SECONDS = 0.5
# Mutations between two checks of the servers.
CHECK_EVERY = 250
# Different complaints after which the fuzzer stops.
MAX_COMPLAINTS = 20


@dataclass(frozen=True)
class Case:
    """One call as it is sent.

    Attributes:
        messages: the serialized messages.
        path: the method as gRPC names it, or one that no server has.
        hangs: whether the client never half-closes the stream; the deadline ends the call.
        cancel_after: seconds after which the client cancels the call; None: never.
        changes: what was changed in the valid call.
    """

    call: ValidCall
    messages: list[bytes]
    path: str
    hangs: bool = False
    cancel_after: float | None = None
    changes: list[str] = field(default_factory=list)

    @property
    def timeout(self) -> float:
        """Deadline of the call in seconds."""
        if self.hangs:
            return 0.2
        damaged_publication = self.changes and self.call.method.name == "PublishWeights"
        return PUBLISH_SECONDS if damaged_publication else CALL_SECONDS

    @property
    def readable(self) -> bool:
        """Whether every message can be parsed as the contract defines it."""
        kind = GetMessageClass(self.call.method.input_type)
        try:
            for message in self.messages:
                kind.FromString(message)
        except DecodeError:
            return False
        return True

    def __str__(self) -> str:
        """Names the call and its changes."""
        return f"{self.call.name}: {'; '.join(self.changes) or 'as it is'}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: responses, and the error that ended it, if any."""

    responses: list[Any]
    error: RpcError | None = None


def make_case(corpus: Sequence[ValidCall], seed: int, index: int) -> Case:
    """Mutation number `index` of a seed."""
    random = Random(f"{seed}/{index}")
    [call] = random.choices(corpus, [call.weight for call in corpus])
    messages = [copy.deepcopy(message) for message in call.messages]
    changes: list[str] = []
    # Most often one change makes a call invalid; some mistakes need several to show.
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        if call.method.client_streaming and random.random() < 0.15:
            changes.append(_change_stream(messages, random))
        elif messages:
            number = random.randrange(len(messages))
            if messages[number].DESCRIPTOR.fields:
                changes.append(f"message {number}: {mutate(messages[number], random)}")
    data = [message.SerializeToString() for message in messages]
    if data and random.random() < 0.1:
        number = random.randrange(len(data))
        data[number], how = damage(data[number], random)
        changes.append(f"message {number}: {how}")
    path, hangs, cancel_after = call.path, False, None
    if random.random() < 0.01:
        path += str(random.random())
        changes.append(f"sent to {path}")
    ending = random.random()
    if call.endless or ending < 0.06:
        cancel_after = random.choice([0.0, 0.001, 0.005, 0.02])
        changes.append(f"cancelled after {cancel_after} s")
    elif ending < 0.065 and call.method.client_streaming:
        hangs = True
        changes.append("never half-closed")
    return Case(call, data, path, hangs, cancel_after, changes)


def _change_stream(messages: list[Message], random: Random) -> str:
    how = random.choice(["one less", "one twice", "shuffled", "cut", "empty", "all twice"])
    index = random.randrange(len(messages)) if messages else 0
    if how == "one less":
        del messages[index : index + 1]
    elif how == "one twice":
        messages[index:index] = [copy.deepcopy(message) for message in messages[index : index + 1]]
    elif how == "shuffled":
        random.shuffle(messages)
    elif how == "cut":
        del messages[index:]
    elif how == "empty":
        messages.clear()
    else:
        messages.extend([copy.deepcopy(message) for message in messages])
    return f"stream: {how}"


class Caller:
    """Makes calls with messages that the Python client would never send."""

    def __init__(self, servers: Servers) -> None:
        # The servers, not the channels, are to refuse messages that are too long.
        options = [option for option in CHANNEL_OPTIONS if "max_send" not in option[0]]
        self._channels = {
            server.role: grpc.insecure_channel(server.address, options) for server in servers
        }

    def send_valid(self, call: ValidCall) -> Outcome:
        """Sends the call as it is, after the calls of its prelude, whose outcomes are ignored."""
        for needed in call.prelude:
            self.send_valid(needed)
        messages = [message.SerializeToString() for message in call.messages]
        return self.send(Case(call, messages, call.path))

    def send(self, case: Case) -> Outcome:
        """Sends one call, and waits until it has ended."""
        method = case.call.method
        # There is no request serializer: the messages are bytes already.
        open_method = getattr(
            self._channels[case.call.role],
            f"{'stream' if method.client_streaming else 'unary'}_"
            f"{'stream' if method.server_streaming else 'unary'}",
        )(
            case.path,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        ended = threading.Event()
        request: Any = _sent(case, ended) if method.client_streaming else case.messages[0]
        start = open_method if method.server_streaming else open_method.future
        running = start(request, timeout=case.timeout)
        try:
            if case.cancel_after is not None:
                time.sleep(case.cancel_after)
                running.cancel()
            return Outcome(list(running) if method.server_streaming else [running.result()])
        except grpc.FutureCancelledError:
            return Outcome([], _cancelled())
        except grpc.RpcError as error:
            return Outcome(
                [], from_rpc(error, request_id="", method=method.name, address=case.call.role)
            )
        finally:
            ended.set()


def _sent(case: Case, ended: threading.Event) -> Iterator[bytes]:
    yield from case.messages
    if case.hangs:
        ended.wait(CALL_SECONDS)


def _cancelled() -> RpcError:
    return RpcError("cancelled by the client", code=StatusCode.CANCELLED)


def complaint(case: Case, outcome: Outcome) -> str | None:
    """Returns what is wrong with the outcome of a call; None if nothing is."""
    error = outcome.error
    if error is None:
        return _complaint_about_success(case, outcome.responses)
    if error.code in _expected(case):
        return None
    return _complaint_about_error(error, REFUSALS, needs_field=case.readable)


def _expected(case: Case) -> set[StatusCode]:
    """Codes that follow from how the call was made, whatever its messages say."""
    codes = set()
    if case.path != case.call.path:
        codes.add(StatusCode.UNIMPLEMENTED)
    if case.cancel_after is not None:
        codes.add(StatusCode.CANCELLED)
    if case.hangs or case.call.method.name == "PublishWeights":
        codes.add(StatusCode.DEADLINE_EXCEEDED)
    return codes


def _complaint_about_success(case: Case, responses: Sequence[Any]) -> str | None:
    if case.path != case.call.path:
        return "a method that does not exist was answered with OK"
    if not case.readable:
        return "a message that cannot be read was answered with OK"
    name = case.call.method.name
    if name in ("ComputeLogProbs", "ComputeValues") and len(responses) != len(case.messages):
        return f"{len(case.messages)} requests were answered with {len(responses)} responses"
    # It is not the trainer's fault if a receiver does not answer.
    allowed = REFUSALS | (UNREACHABLE if name == "PublishWeights" else set())
    wrong = (_complaint_about_error(failure, allowed) for failure in _failures(responses))
    return next(filter(None, wrong), None)


def _complaint_about_error(
    error: RpcError, allowed: frozenset[StatusCode], needs_field: bool = True
) -> str | None:
    said = f"{error.code.name}: {error.message!r}"
    if error.code not in allowed:
        return said
    if not error.message:
        return f"{error.code.name} without a message"
    if error.code == StatusCode.INVALID_ARGUMENT and needs_field and not error.field:
        return f"{said} names no field"
    if error.reason is not None and error.reason not in REASONS:
        return f"{said} has the undocumented reason {error.reason}"
    return None


class Fuzzer:
    """Sends mutations, and checks the servers between them.

    Attributes:
        complaints: what was wrong with outcomes, each with the command that repeats it.
        answers: number of calls by method and code.
    """

    def __init__(self, servers: Servers, seed: int, say: Callable[[str], None] = print) -> None:
        self.complaints: list[str] = []
        self.answers: collections.Counter[tuple[str, str]] = collections.Counter()
        self._servers = servers
        self._seed = seed
        self._say = say
        self._corpus = valid_calls(servers)
        self._caller = Caller(servers)
        self._reference = servers.reference()
        self._warm: dict[str, int] | None = None
        self._known: set[tuple[str, str]] = set()

    def refused_calls(self) -> list[str]:
        """Sends every valid call as it is; returns those not answered with OK, and why."""
        refused = []
        for call in self._corpus:
            if call.endless:
                continue
            outcome = self._caller.send_valid(call)
            failures = [outcome.error] if outcome.error else [*_failures(outcome.responses)]
            refused += [f"{call.name}: {failure}" for failure in failures]
            self._servers.restore()
            self._servers.clean()
        return refused

    def run(self, first: int, count: int) -> None:
        """Sends mutations; raises DisturbanceError when the servers are not what they were."""
        end = first + count
        for start in range(first, end, CHECK_EVERY):
            stop = min(start + CHECK_EVERY, end)
            for index in range(start, stop):
                self._try(index)
            try:
                self._look(done=stop - first, count=count)
            except (DisturbanceError, RpcError) as error:
                raise DisturbanceError(f"{error}\n  {self._command(start, stop)}") from None
            if stop == end or (stop - first) % 5000 == 0:
                self._say(f"{stop - first} of {count} mutations, {len(self.complaints)} complaints")

    def _try(self, index: int) -> None:
        case = make_case(self._corpus, self._seed, index)
        for needed in case.call.prelude:
            self._caller.send_valid(needed)
        outcome = self._caller.send(case)
        code = outcome.error.code.name if outcome.error else "OK"
        self.answers[case.call.method.name, code] += 1
        try:
            require_alive(self._servers)
            if given_up := case.hangs or case.cancel_after is not None:
                require_idle(self._servers)
            if case.call.changes_state and (given_up or outcome.error is None):
                self._servers.restore()
        except (DisturbanceError, RpcError, grpc.RpcError) as error:
            raise DisturbanceError(
                f"{case}\n  {error}\n  {self._command(index, index + 1)}"
            ) from None
        if wrong := complaint(case, outcome):
            self._complain(index, case, wrong)

    def _complain(self, index: int, case: Case, wrong: str) -> None:
        # Numbers and quoted texts differ between mutations that show the same mistake.
        kind = (case.call.method.name, re.sub(r"\d+|'.*'", "", wrong)[:80])
        if kind in self._known:
            return
        self._known.add(kind)
        self.complaints.append(f"{case}\n  {wrong}\n  {self._command(index, index + 1)}")
        self._say(self.complaints[-1])
        if len(self.complaints) == MAX_COMPLAINTS:
            raise DisturbanceError(f"{MAX_COMPLAINTS} different complaints are enough")

    def _look(self, done: int, count: int) -> None:
        servers = self._servers
        require_alive(servers)
        require_idle(servers)
        servers.restore()
        servers.require_same(self._reference)
        servers.clean()
        if self._warm is not None:
            require_flat(self._warm, memory(servers))
        elif done >= max(2 * CHECK_EVERY, count / 10):
            self._warm = memory(servers)

    def _command(self, start: int, stop: int) -> str:
        return f"make mutate SEED={self._seed} FIRST={start} MUTATIONS={stop - start}"

    def summary(self) -> str:
        """Returns the answers by method, and the memory of the servers."""
        lines = []
        for method in sorted({method for method, _ in self.answers}):
            codes = [(n, code) for (name, code), n in self.answers.items() if name == method]
            counted = ", ".join(f"{n} {code}" for n, code in sorted(codes, reverse=True))
            lines.append(f"{method}: {counted}")
        now = memory(self._servers)
        for name, warm in (self._warm or now).items():
            lines.append(f"{name}: {warm / 2**20:.0f} MiB warm, {now[name] / 2**20:.0f} MiB now")
        return "\n".join(lines)


def _failures(responses: Iterable[Any]) -> Iterator[RpcError]:
    """Returns the errors of single prompts or receivers, except of cancelled prompts."""
    for response in responses:
        statuses: list[Any] = []
        if response.DESCRIPTOR.name == "GenerateResponse" and response.HasField("failed"):
            statuses = [response.failed.status]
        elif response.DESCRIPTOR.name == "PublishWeightsResponse":
            statuses = [result.status for result in response.results]
        for status in statuses:
            if status.code not in (StatusCode.OK.value[0], StatusCode.CANCELLED.value[0]):
                yield from_status(status)


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models = make_models(Path(directory) / "models")
        with serving(Path(directory), models) as servers:
            fuzzer = Fuzzer(servers, options.seed)
            started = time.monotonic()
            try:
                fuzzer.run(options.first, options.mutations)
            except DisturbanceError as error:
                print(error)
                return 1
            finally:
                print(f"{fuzzer.summary()}\n{time.monotonic() - started:.0f} s")
    return 1 if fuzzer.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
