"""Sends the calls of a recording again, and compares the answers.

A recording is replayed event by event, in the order of the file: a call starts, a message is sent,
an answer is awaited and compared. Calls that did not overlap do not overlap again, and a message
that was sent after an answer is sent after that answer again.
"""

from __future__ import annotations

import logging
import posixpath
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from tandem._proto.rollout.v1.rollout_pb2 import GenerateResponse
from tandem.errors import (
    STATUS_DETAILS_KEY,
    ConfigError,
    ProblemsError,
    RpcError,
    TandemError,
    from_status,
)
from tandem.recording.files import Entry, RecordedCall, Status, read_recording
from tandem.recording.matching_events import GenerateEvents
from tandem.recording.message_difference import Difference, first_difference

# Importing them makes the contract's services and messages known to the descriptor pool.
from tandem.rpc import calls as _calls  # noqa: F401
from tandem.rpc.channel import open_channel
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.rpc.retry import may_pass
from tandem.rpc.transport import CHANNEL_OPTIONS
from tandem.utils.words import counted

_log = logging.getLogger(__name__)


_M = TypeVar("_M", bound=Message)

# The fields of requests that name a place, by method: another server, which is then called with its
# caller's own credentials, or files that are read or written.
PLACES = {
    "PublishWeights": ("targets", "sends weights to", "HOST:PORT"),
    "SaveCheckpoint": ("directory", "writes files at", "DIRECTORY"),
    "ExportModel": ("path", "writes files at", "DIRECTORY"),
    "LoadCheckpoint": ("path", "reads files at", "DIRECTORY"),
}
# Largest message that --print shows in full: as JSON it takes many times its size.
_MAX_SHOWN_BYTES = 4 << 20

# How often a sender that waits looks whether its call has ended.
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Mapped:
    """Texts to replace, old by new, in requests, in targets and in what is compared.

    A text is replaced where it stands alone, not inside a longer name, number or address.
    """

    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, pairs: list[str]) -> Mapped:
        """Reads OLD=NEW. Raises ConfigError for other texts."""
        texts = {}
        for pair in pairs:
            old, separator, new = pair.partition("=")
            if not (old and separator and new):
                raise ConfigError(f"--map {pair}: must be OLD=NEW")
            texts[old] = new
        return cls(texts)

    def text(self, text: str) -> str:
        """Returns `text` with every old text replaced, the longest first."""
        if not self.texts:
            return text
        old = "|".join(re.escape(one) for one in sorted(self.texts, key=len, reverse=True))
        return re.sub(rf"(?<![\w.])(?:{old})(?![\w.])", lambda found: self.texts[found[0]], text)

    def message(self, message: Message) -> bool:
        """Replaces in every string of a message; returns whether anything changed."""
        changed = False
        for one, value in message.ListFields():
            if one.message_type is not None and one.message_type.GetOptions().map_entry:
                continue
            if one.message_type is not None:
                inner = value if one.is_repeated else [value]
                for each in inner:
                    changed = self.message(each) or changed
            elif one.type == FieldDescriptor.TYPE_STRING:
                new = [self.text(each) for each in value] if one.is_repeated else self.text(value)
                if new != value:
                    changed = True
                    if one.is_repeated:
                        value[:] = new
                    else:
                        setattr(message, one.name, new)
        return changed


@dataclass(frozen=True)
class Choice:
    """The calls of a recording that are replayed or printed.

    Attributes:
        methods: names of methods, with or without their service; all if empty.
        number: number of the only call; None: all.
    """

    methods: frozenset[str] = frozenset()
    number: int | None = None

    def __contains__(self, call: RecordedCall) -> bool:
        if self.number is not None and call.number != self.number:
            return False
        return not self.methods or bool(self.methods & {call.name, call.method.strip("/")})


@dataclass
class Contents:
    """Facts about the chosen calls of a recording, from a first reading.

    Attributes:
        calls: their number.
        services: names of the services that were called at each target.
        passing: numbers of calls that failed in a way that may pass, such as UNAVAILABLE.
        places: the first call by (method, place) of the places that requests name.
        unended: calls whose end is not in the recording.
    """

    calls: int = 0
    services: dict[str, set[str]] = field(default_factory=dict)
    passing: set[int] = field(default_factory=set)
    places: dict[tuple[str, str], RecordedCall] = field(default_factory=dict)
    unended: dict[int, RecordedCall] = field(default_factory=dict)


def contents(path: Path, choice: Choice) -> Contents:
    """Reads the recording once. Raises ConfigError if it is none, or has no chosen call."""
    found = Contents()
    for entry in chosen(path, choice):
        call = entry.call
        if entry.kind == "start":
            found.calls += 1
            service = call.method.rpartition("/")[0].strip("/").rpartition(".")[2]
            found.services.setdefault(call.target, set()).add(service)
            found.unended[call.number] = call
        elif entry.kind == "request" and call.name in PLACES:
            request = decoded(call, entry)
            for place in () if request is None else _places(request, call.name):
                found.places.setdefault((call.name, place), call)
        elif entry.status is not None:
            del found.unended[call.number]
            failure = _failure(entry.status, call)
            if may_pass(failure) and failure.code != grpc.StatusCode.CANCELLED:
                found.passing.add(call.number)
    if not found.calls:
        raise ConfigError(f"{path}: has no such call")
    return found


def _places(request: Message, method: str) -> list[str]:
    """Returns the places that a request names; "" stands for none."""
    value = getattr(request, PLACES[method][0])
    return [value] * bool(value) if isinstance(value, str) else list(value)


def chosen(path: Path, choice: Choice, *, warns: bool = True) -> Iterator[Entry]:
    """Yields the entries of the chosen calls; `warns` as for read_recording()."""
    return (entry for entry in read_recording(path, warns=warns) if entry.call in choice)


def decoded(call: RecordedCall, entry: Entry) -> Message | None:
    """Returns the message of an entry; None if its method is not of the contract.

    Raises ConfigError for bytes that are not that message.
    """
    kind = _message_types(call.method).get(entry.kind)
    return None if kind is None else _parsed(kind, entry.message, call)


def _parsed(kind: type[_M], data: bytes, call: RecordedCall) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ConfigError(f"{call}: a message is not a {kind.DESCRIPTOR.full_name}") from None


def _message_types(path: str) -> dict[str, type[Message]]:
    """Returns the classes of a method's "request" and "response"; none for an unknown method."""
    service, _, name = path.strip("/").partition("/")
    try:
        method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    except KeyError:
        return {}
    return {
        "request": message_factory.GetMessageClass(method.input_type),
        "response": message_factory.GetMessageClass(method.output_type),
    }


def as_json(entry: Entry) -> dict[str, Any]:
    """Returns an entry as a JSON object, for people and other programs."""
    call = entry.call
    record: dict[str, Any] = {"call": call.number, "method": call.method, "kind": entry.kind}
    if entry.kind == "start":
        metadata = {key: value for key, value in call.metadata if isinstance(value, str)}
        record |= {
            "time": call.time,
            "target": call.target,
            "timeout": call.timeout,
            "metadata": metadata,
        }
    elif entry.status is not None:
        failure = _failure(entry.status, call)
        record |= {"code": entry.status.code.name, "message": failure.message}
        record |= {"field": failure.field, "reason": failure.reason}
    elif entry.kind != "half_close":
        is_short = len(entry.message) <= _MAX_SHOWN_BYTES
        message = decoded(call, entry) if is_short else None
        if message is None:
            record["bytes"] = len(entry.message)
        else:
            record["message"] = _dict_of(message, call)
    return record


def _dict_of(message: Message, call: RecordedCall) -> dict[str, Any]:
    try:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)
    # Bytes that parse as the message may still be none that anybody sent.
    except (json_format.Error, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{call}: a message cannot be shown: {error}") from None


@dataclass(frozen=True)
class Outcome:
    """The result of a replay.

    Attributes:
        calls: calls that were replayed.
        answers: answers, messages and statuses, that were compared.
        call: the call of the difference.
        place: "response 1", for example, or "status".
        difference: the first difference, None if all answers are the same.
    """

    calls: int
    answers: int
    call: RecordedCall | None = None
    place: str = ""
    difference: Difference | None = None


class _DiffersError(Exception):
    def __init__(self, call: RecordedCall, place: str, difference: Difference) -> None:
        super().__init__()
        self.call, self.place, self.difference = call, place, difference


class Replay:
    """Replays the chosen calls of a recording, once.

    Attributes:
        mapped: texts to replace. Every target must be among them, so that no server is called by
            mistake; so must the addresses and paths in requests.
        compare: whether answers must be the recorded ones.
        timeout_seconds: longest wait for one answer.
        credentials: those of the calls; a field that is not set is the environment's.
    """

    def __init__(
        self,
        path: Path,
        choice: Choice,
        mapped: Mapped,
        *,
        compare: bool = True,
        timeout_seconds: float = 600.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._path = path
        self._credentials = credentials.or_else(Credentials.from_environment())
        self._choice = choice
        self._mapped = mapped
        self._compare = compare
        self._timeout_seconds = timeout_seconds
        self._contents = contents(path, choice)
        self._require_mapped()
        self._channels: dict[str, Any] = {}
        self._live: dict[int, _LiveCall] = {}
        self._calls = self._answers = 0

    def run(self) -> Outcome:
        """Replays until the first difference.

        Raises:
            UnavailableError: a server cannot be reached.
            TandemError: an answer did not come in time.
        """
        if passing := len(self._contents.passing):
            _log.info(
                "not sent, because the server was down or full at the time: "
                f"{counted(passing, 'call')}"
            )
        for call in self._contents.unended.values():
            _log.info(f"{call} is unfinished in the recording; it is cancelled at the end")
        try:
            for entry in chosen(self._path, self._choice, warns=False):
                if entry.call.number not in self._contents.passing:
                    self._do(entry)
        except _DiffersError as found:
            return Outcome(self._calls, self._answers, found.call, found.place, found.difference)
        finally:
            self._close()
        return Outcome(self._calls, self._answers)

    def _require_mapped(self) -> None:
        """Raises ConfigError, or ProblemsError, which name every --map that is missing."""
        texts, found = self._mapped.texts, self._contents
        missing = {
            target: ", ".join(sorted(services))
            for target, services in found.services.items()
            if target not in texts
        }
        problems = []
        if missing:
            names = ", ".join(f"{target} ({services})" for target, services in missing.items())
            problems.append(
                ConfigError(
                    f"{self._path}: calls {names}: no --map names the server that answers them now",
                    hint=" ".join(f"--map {target}=HOST:PORT" for target in missing),
                )
            )
        for (method, place), call in found.places.items():
            _, does, new = PLACES[method]
            is_address = method == "PublishWeights"
            if place in texts if is_address else self._maps_path(place):
                continue
            problems.append(
                ConfigError(
                    f"{call} {does} {place}: no --map names the place to use now",
                    hint=f"--map {place}={new}",
                )
            )
        if problems:
            raise problems[0] if len(problems) == 1 else ProblemsError(problems)

    def _maps_path(self, path: str) -> bool:
        """Returns whether a text is replaced at the beginning of a path; also by itself."""
        place = posixpath.normpath(path)
        for old in self._mapped.texts:
            if place == old or place.startswith(f"{old}/"):
                return Mapped({old: "\0"}).text(path).startswith("\0")
        return False

    def _do(self, entry: Entry) -> None:
        call = entry.call
        if entry.kind == "start":
            self._calls += 1
            target = self._mapped.text(call.target)
            if target not in self._channels:
                self._channels[target] = open_channel(target, self._credentials, CHANNEL_OPTIONS)
            self._live[call.number] = _LiveCall(self._channels[target], call, self._timeout_seconds)
            return
        live = self._live[call.number]
        if entry.kind == "request":
            live.send(self._request(entry))
        elif entry.kind == "half_close":
            live.send(None)
        elif entry.kind == "response":
            self._expect_response(live, entry)
        else:
            assert entry.status is not None
            del self._live[call.number]
            self._expect_end(live, entry.status)

    def _request(self, entry: Entry) -> bytes:
        """Returns the recorded bytes, or those of the request with its texts replaced."""
        request = decoded(entry.call, entry)
        if request is None or not self._mapped.message(request):
            return entry.message
        return request.SerializeToString()

    def _expect_response(self, live: _LiveCall, entry: Entry) -> None:
        call = live.call
        recorded = decoded(call, entry)
        if _is_heartbeat(recorded):
            return
        live.expected += 1
        place = f"response {live.expected}"
        if recorded is not None:
            self._mapped.message(recorded)
        answer = self._answer(live, recorded)
        if answer is None:
            status = live.status()
            _require_reached(status, call)
            self._differs(call, place, Difference("", "a message", _words(status)))
            return
        self._answers += 1
        difference = None
        if isinstance(answer, Message):
            assert recorded is not None
            difference = first_difference(recorded, answer)
        elif answer != entry.message:
            texts = (f"{len(bytes_)} bytes" for bytes_ in (entry.message, answer))
            difference = Difference("", *texts)
        if difference is not None:
            self._differs(call, place, difference)

    def _answer(self, live: _LiveCall, recorded: Message | None) -> Message | bytes | None:
        """Returns what the server says where `recorded` was said; None at the end."""
        if isinstance(recorded, GenerateResponse):
            return self._events(live).matching(recorded)
        data = self._next(live)
        if data is None or recorded is None:
            return data
        return _parsed(type(recorded), data, live.call)

    def _events(self, live: _LiveCall) -> GenerateEvents:
        def receive() -> GenerateResponse | None:
            data = self._next(live)
            return None if data is None else _parsed(GenerateResponse, data, live.call)

        if live.events is None:
            live.events = GenerateEvents(receive)
        return live.events

    def _expect_end(self, live: _LiveCall, recorded: Status) -> None:
        call = live.call
        if recorded.code == grpc.StatusCode.CANCELLED:
            # The client gave it up; what the server would have said next was not recorded.
            live.cancel()
            return
        if recorded.code == grpc.StatusCode.DEADLINE_EXCEEDED:
            _log.info(f"{call} passed its deadline; how it ends is not compared")
            while self._next(live) is not None:
                pass
            return
        events = live.events
        if self._next(live) is not None if events is None else events.has_more():
            further = Difference("", "the end of the call", "a further message")
            self._differs(call, f"response {live.expected + 1}", further)
            live.cancel()
            return
        status = live.status()
        if status.code != recorded.code:
            _require_reached(status, call)
        self._answers += 1
        one, other = _failure(recorded), _failure(status)
        pairs = (
            ("code", recorded.code.name, status.code.name),
            ("message", self._mapped.text(one.message), other.message),
            ("field", one.field, other.field),
            ("reason", one.reason, other.reason),
        )
        for name, old, new in pairs:
            if old != new:
                self._differs(call, "status", Difference(name, repr(old), repr(new)))
                return

    def _next(self, live: _LiveCall) -> bytes | None:
        """Returns the next response that is no heartbeat, None at the end."""
        kind = _message_types(live.call.method).get("response")
        while True:
            data = live.receive()
            if data is None or kind is None or not _is_heartbeat(_parsed(kind, data, live.call)):
                return data

    def _differs(self, call: RecordedCall, place: str, difference: Difference) -> None:
        if self._compare:
            raise _DiffersError(call, place, difference)

    def _close(self) -> None:
        for live in self._live.values():
            live.cancel()
        for channel in self._channels.values():
            channel.close()


class _LiveCall:
    """A call of the replay. On the wire every kind of method is a stream in both directions."""

    def __init__(self, channel: Any, call: RecordedCall, timeout_seconds: float) -> None:
        self.call = call
        self.expected = 0  # responses of the recording so far, without heartbeats
        self.events: GenerateEvents | None = None
        self._timeout_seconds = timeout_seconds
        # One message, so that a large request is not in memory as a whole.
        self._requests: queue.Queue[bytes | None] = queue.Queue(1)
        # Read ahead of the recording's place: a server whose answers nobody reads takes no message.
        self._responses: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._rpc = channel.stream_stream(call.method)(
            iter(self._requests.get, None), timeout=call.timeout, metadata=call.metadata
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: bytes | None) -> None:
        """Sends a message, None for the half-close; nothing if the call has ended."""
        end = time.monotonic() + self._timeout_seconds
        while self._rpc.is_active():
            with suppress(queue.Full):
                self._requests.put(message, timeout=_LOOK_SECONDS)
                return
            if time.monotonic() > end:
                raise self._too_late()

    def receive(self) -> bytes | None:
        """Returns the next response, None at the end and after it."""
        try:
            message = self._responses.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise self._too_late() from None
        if message is None:
            self._responses.put(None)
        return message

    def status(self) -> Status:
        """Returns the status, which is known after the last response."""
        trailing = tuple(self._rpc.trailing_metadata() or ())
        return Status(self._rpc.code(), self._rpc.details() or "", trailing)

    def cancel(self) -> None:
        """Cancels the call unless it ended."""
        self._rpc.cancel()

    def _read(self) -> None:
        with suppress(grpc.RpcError):
            for message in self._rpc:
                self._responses.put(message)
        self._responses.put(None)
        # Ends gRPC's thread that waits for requests.
        with suppress(queue.Full):
            self._requests.put_nowait(None)

    def _too_late(self) -> TandemError:
        return TandemError(
            f"{self.call}: the server did not continue within {self._timeout_seconds:g} s",
            hint="a larger --timeout waits longer",
        )


def _is_heartbeat(message: Message | None) -> bool:
    """Returns whether it is sent only because time passed."""
    if message is None or message.DESCRIPTOR.full_name != "tandem.rollout.v1.GenerateResponse":
        return False
    return message.HasField("heartbeat")


def _require_reached(status: Status, call: RecordedCall) -> None:
    if status.code == grpc.StatusCode.UNAVAILABLE:
        failure = _failure(status, call)
        failure.hint = "--map names another server"
        raise failure


def _failure(status: Status, call: RecordedCall | None = None) -> RpcError:
    """Returns a status with what its details say; also of a success."""
    details = dict(status.trailing_metadata).get(STATUS_DETAILS_KEY)
    code = status.code.value[0]
    whole = status_pb2.Status(code=code, message=status.details)
    try:
        if isinstance(details, bytes):
            whole = status_pb2.Status.FromString(details)
        return from_status(whole, method=call and str(call))
    except (DecodeError, KeyError, ValueError):
        raise ConfigError(f"{call or 'a call'}: the details of its status are damaged") from None


def _words(status: Status) -> str:
    return f"{status.code.name}: {status.details}" if status.details else status.code.name
