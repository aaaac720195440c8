"""One client cannot take a server's memory, nor keep another one waiting."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import harness
import http2
import pytest
from tandem._proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem.cluster.local import Server
from tandem.rpc.client import RolloutClient

SERVICE = "/tandem.rollout.v1.RolloutService/"
MIB = 1 << 20
# Bounds of docs/reference/limits.md: bytes of incomplete messages, bytes of unanswered requests.
UNFINISHED_BYTES = 256 * MIB
REQUEST_BYTES = 256 * MIB
# Memory of calls, connections and the allocator, beyond the bounded bytes.
SLACK_BYTES = 128 * MIB

_ATTACKERS = itertools.count(1)


@pytest.fixture(scope="module")
def server(models: harness.Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A rollout server that all attacks of this file meet, one after the other."""
    with harness.cluster(tmp_path_factory.mktemp("bounds"), models) as running:
        yield running.rollouts[0]


@pytest.fixture
def attacker() -> str:
    """A loopback address that no other test attacks from: what one has done counts against it."""
    return f"127.0.1.{next(_ATTACKERS)}"


def resident_bytes(server: Server) -> int:
    """Resident memory of a server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@contextmanager
def growth_below(server: Server, bound: int) -> Iterator[None]:
    """Fails when memory grows by `bound` bytes, or a call of another client takes ten seconds."""
    base = resident_bytes(server)
    peak = base
    over = threading.Event()
    errors: list[grpc.RpcError] = []

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, resident_bytes(server))

    def call() -> None:
        with grpc.insecure_channel(server.address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            while not over.wait(0.05):
                try:
                    stub.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=10)
                except grpc.RpcError as error:
                    errors.append(error)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(watch), pool.submit(call)]
        try:
            yield
        finally:
            over.set()
        for future in running:
            future.result()
    assert not errors, errors[0]
    assert peak - base < bound, f"{(peak - base) / MIB:.0f} MiB"


def test_a_client_that_resets_many_streams_loses_its_connection(server: Server, attacker: str):
    def reset(_: int) -> str:
        connection = http2.Connection(server.address, attacker)
        while connection.open_and_reset(SERVICE + "Generate", 100):
            pass
        connection.wait_closed()
        return connection.goaway

    with growth_below(server, SLACK_BYTES), ThreadPoolExecutor(8) as pool:
        reasons = list(pool.map(reset, range(40)))
    assert any("too many calls were reset" in reason for reason in reasons), reasons


def test_a_compressed_message_is_refused_and_not_inflated(server: Server):
    with growth_below(server, SLACK_BYTES), grpc.insecure_channel(server.address) as channel:
        score = channel.unary_unary(SERVICE + "Score")
        with pytest.raises(grpc.RpcError) as error:
            score(bytes(64 * MIB), compression=grpc.Compression.Gzip, timeout=60)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "path", [SERVICE + "Score", SERVICE + "Generate", "/grpc.health.v1.Health/Check"]
)
def test_messages_that_never_end_are_bounded_over_all_connections(
    server: Server, attacker: str, path: str
):
    hold_unfinished_messages(server, attacker, path)


def hold_unfinished_messages(server: Server, attacker: str, path: str) -> None:
    """Opens 100 messages of almost 4 MiB on four connections and never ends them."""

    def hold(_: int) -> http2.Connection:
        connection = http2.Connection(server.address, attacker)
        for _ in range(25):
            stream = connection.open(path)
            if not connection.send(stream, http2.message(4 * MIB, 4 * MIB - 100)):
                break
        return connection

    with growth_below(server, UNFINISHED_BYTES + SLACK_BYTES), ThreadPoolExecutor(4) as pool:
        connections = list(pool.map(hold, range(4)))
    reasons = [connection.goaway for connection in connections]
    assert any("incomplete messages take more than" in reason for reason in reasons), reasons
    for connection in connections:
        connection.close()


def test_a_stream_that_ends_inside_a_message_closes_its_connection(server: Server, attacker: str):
    connection = http2.Connection(server.address, attacker)
    stream = connection.open(SERVICE + "Generate")
    connection.send(stream, http2.message(100, 50), end=True)
    connection.wait_closed()
    assert "ends inside a message" in connection.goaway


def test_requests_that_are_larger_in_memory_than_on_the_wire_are_bounded(server: Server):
    request = b"\x0a\x00" * (2 * MIB - 100)  # empty sequences, each a hundred bytes in memory

    def call(_: int) -> set[grpc.StatusCode]:
        with grpc.insecure_channel(
            server.address, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            score = channel.unary_unary(SERVICE + "Score")
            calls = [score.future(request, timeout=60) for _ in range(10)]
            return {call.exception().code() for call in calls}

    with (
        growth_below(server, REQUEST_BYTES + UNFINISHED_BYTES + SLACK_BYTES),
        ThreadPoolExecutor(8) as pool,
    ):
        codes = set().union(*pool.map(call, range(8)))
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_open_streams_of_reflection_hold_no_more_than_their_bound(server: Server):
    parts = b"\x7a\x00" * (2 * MIB - 100)  # unknown fields, each forty bytes in memory

    def hold(_: int) -> grpc.StatusCode:
        with grpc.insecure_channel(
            server.address, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            released = threading.Event()
            answers = call(itertools.chain([parts], iter(released.wait, None)), timeout=60)
            try:
                next(answers)
            except grpc.RpcError as error:
                return error.code()
            finally:
                released.set()
                answers.cancel()
        return grpc.StatusCode.OK

    with growth_below(server, UNFINISHED_BYTES + SLACK_BYTES), ThreadPoolExecutor(16) as pool:
        codes = set(pool.map(hold, range(16)))
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_a_client_that_takes_all_connections_shuts_out_no_other_address(
    server: Server, attacker: str
):
    with growth_below(server, SLACK_BYTES):
        hoard = []
        for _ in range(200):
            connection = http2.Connection(server.address, attacker)
            connection.open(SERVICE + "Generate")
            hoard.append(connection)
        # A client of another address connects while all connections are taken.
        with grpc.insecure_channel(
            server.address, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            stub.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=10)
    for connection in hoard:
        connection.close()


def test_streams_without_a_message_give_their_places_to_others(server: Server, attacker: str):
    connections = [http2.Connection(server.address, attacker) for _ in range(3)]
    for connection in connections:
        for _ in range(100):
            connection.open(SERVICE + "Generate")
    with RolloutClient(server.address) as client:
        assert client.generate(harness.prompts(1, {}))
    for connection in connections:
        connection.close()


def flood(server: Server, attacker: str, frames: bytes, first: bytes = b"") -> set[str]:
    """Sends frames for three seconds on four connections, each replaced when the server closes it.

    `first` begins every connection. Gives the reasons for which the server closed connections.
    """
    end = time.monotonic() + 3
    reasons = set()

    def send(_: int) -> None:
        while time.monotonic() < end:
            connection = http2.Connection(server.address, attacker)
            connection.send_frames(first)
            while time.monotonic() < end:
                if not connection.send_frames(frames):
                    connection.wait_closed()
                    break
            connection.close()
            reasons.add(connection.goaway)

    with growth_below(server, SLACK_BYTES), ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    return reasons


def closed_because(reasons: set[str], reason: str) -> bool:
    """Whether the server closed a connection for this reason."""
    return any(reason in one for one in reasons)


def test_a_client_that_floods_with_pings_loses_its_connection(server: Server, attacker: str):
    reasons = flood(server, attacker, http2.frame(http2.PING, 0, 0, bytes(8)) * 1000)
    assert closed_because(reasons, "PING and SETTINGS frames"), reasons


def test_a_client_whose_headers_never_end_loses_its_connection(server: Server, attacker: str):
    block = (b"\0\x01a\x7f\x10" + b"x" * 143) * 100
    headers = http2.frame(http2.HEADERS, 0, 1, http2.request(SERVICE + "Score"))
    reasons = flood(server, attacker, http2.frame(http2.CONTINUATION, 0, 1, block), headers)
    assert closed_because(reasons, "the headers of stream 1"), reasons


def test_a_client_with_too_many_calls_at_a_time_loses_its_connection(server: Server, attacker: str):
    headers = http2.request("/no/such/method")
    calls = [
        http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, headers)
        for stream in range(1, 801, 2)
    ]
    reasons = flood(server, attacker, b"".join(calls))
    assert closed_because(reasons, "calls at once on one connection"), reasons


def test_a_client_that_abandons_calls_is_refused_for_a_while(server: Server, attacker: str):
    def abandon(_: int) -> None:
        connection = http2.Connection(server.address, attacker)
        connection.open_many(SERVICE + "Generate", 100)
        connection.close()

    with growth_below(server, SLACK_BYTES), ThreadPoolExecutor(8) as pool:
        list(pool.map(abandon, range(200)))
        refused = http2.Connection(server.address, attacker)
        harness.wait_until(lambda: refused.closed)
    assert closed_because({refused.goaway}, "from this address"), refused.goaway


# The soaks watch the memory of abused servers, too.
@pytest.mark.slow
def test_memory_is_given_back_after_an_attack(server: Server, attacker: str):
    base = resident_bytes(server)
    hold_unfinished_messages(server, attacker, SERVICE + "Score")
    harness.wait_until(lambda: resident_bytes(server) <= base + SLACK_BYTES, seconds=60)
