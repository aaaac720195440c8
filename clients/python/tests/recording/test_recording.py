"""Recordings of calls to fake servers, and their replay."""

import asyncio
import base64
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import zlib
from contextlib import contextmanager
from itertools import pairwise

import fakes
import grpc
import pytest
from commands import tandem
from google.rpc import status_pb2

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem._proto.weights.v1 import weights_pb2
from tandem.errors import ConfigError, DeadlineError, FailedPreconditionError
from tandem.recording import files as recording
from tandem.recording.files import Recorder, read_recording
from tandem.recording.message_difference import first_difference
from tandem.recording.proxy import RecordingProxy
from tandem.recording.replay import PLACES, Mapped, decoded
from tandem.rpc import transport
from tandem.rpc.aio import AsyncRolloutClient, AsyncTrainerClient
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt, SupervisedSample, submit
from tandem.rpc.transport import RECORD_VARIABLE
from tandem.rpc.wire import to_tensor

PROMPT = Prompt([1, 2], seed=7, num_samples=2, sampling={"max_tokens": 5}, request_id="a")
SAMPLES = [SupervisedSample([5, 6], [7, 8]), SupervisedSample([5], [9])]
REFUSED = fakes.error_status(9, "not now", field="a.b", reason="NO_JUNIOR")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A new recording, into which the clients of this process record."""
    path = tmp_path / "calls.rec"
    recording.create(path)
    monkeypatch.setenv(RECORD_VARIABLE, str(path))
    return path


def entries(path):
    """All entries of a complete recording."""
    return list(read_recording(path))


def kinds(path):
    """(method, kind) of every entry."""
    return [(entry.call.name, entry.kind) for entry in entries(path)]


def one_of_each(address, world):
    """A call of each kind of method, and one that fails."""
    with RolloutClient(address) as rollout, TrainerClient(address) as trainer:
        rollout.info()
        rollout.generate([PROMPT])
        trainer.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert len(list(trainer.watch_steps())) == 1
        world.failures.append(REFUSED)
        with pytest.raises(FailedPreconditionError):
            rollout.score([([1, 2], 1)])


async def one_of_each_async(address, world):
    """The same calls as one_of_each() by the asyncio clients."""
    async with AsyncRolloutClient(address) as rollout, AsyncTrainerClient(address) as trainer:
        await rollout.info()
        await rollout.generate([PROMPT])
        await trainer.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert len([one async for one in trainer.watch_steps()]) == 1
        world.failures.append(REFUSED)
        with pytest.raises(FailedPreconditionError):
            await rollout.score([([1, 2], 1)])


@contextmanager
def proxied(target, path):
    """Serves a recording proxy; yields its address."""
    with RecordingProxy(target, 0, Recorder(path)) as proxy:
        yield f"127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("how", ["synchronous", "asyncio", "proxy"])
def test_every_kind_of_call_is_recorded_with_its_messages_and_status(
    how, world, address, file, monkeypatch
):
    world.watched = [trainer_pb2.StepReport(step=3)]
    if how == "synchronous":
        one_of_each(address, world)
    elif how == "asyncio":
        asyncio.run(one_of_each_async(address, world))
    else:
        monkeypatch.delenv(RECORD_VARIABLE)
        with proxied(address, file) as port:
            one_of_each(port, world)
    found = entries(file)
    calls = list({entry.call.number: entry.call for entry in found}.values())
    names = ["GetServerInfo", "Generate", "TrainStep", "WatchSteps", "Score"]
    assert [call.name for call in calls] == names
    counts = [[1, 1], [1, 2], [3, 1], [1, 1], [1, 0]]
    for call, (requests, responses) in zip(calls, counts, strict=True):
        own = [entry for entry in found if entry.call is call]
        assert (own[0].kind, own[-1].kind) == ("start", "end")
        assert [entry.kind for entry in own].count("request") == requests
        assert [entry.kind for entry in own].count("response") == responses
        # A server may answer a single request before the proxy sees that no other follows.
        if how != "proxy" or call.name in ("Generate", "TrainStep"):
            assert [entry.kind for entry in own].count("half_close") == 1
        assert call.target == address
        # On the wire a deadline is rounded up.
        assert 0 < call.timeout < 3700
        assert dict(call.metadata)["x-request-id"]
    trajectories = [
        rollout_pb2.GenerateResponse.FromString(entry.message).finished.trajectory
        for entry in found
        if (entry.call.name, entry.kind) == ("Generate", "response")
    ]
    assert [one.sample_index for one in trajectories] == [1, 0]
    assert trajectories[1] == fakes.sample(PROMPT.message(), 0, 0)
    status = found[-1].status
    assert (status.code, status.details) == (grpc.StatusCode.FAILED_PRECONDITION, "not now")
    details = dict(status.trailing_metadata)["grpc-status-details-bin"]
    assert status_pb2.Status.FromString(details) == REFUSED


def test_nothing_is_recorded_without_the_variable_nor_of_health_checks(address, file, monkeypatch):
    with RolloutClient(address) as rollout:
        assert rollout.health() == "SERVING"
    monkeypatch.delenv(RECORD_VARIABLE)
    with RolloutClient(address) as rollout:
        rollout.info()
    assert entries(file) == []


async def leave_a_stream(address):
    """Reads the first event of a call and leaves the call."""
    async with AsyncRolloutClient(address) as rollout:
        stream = rollout.stream(submit([PROMPT]))
        await anext(stream)
        await stream.aclose()


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
def test_a_stream_that_the_client_leaves_is_recorded_as_cancelled(how, world, address, file):
    if how == "asyncio":
        asyncio.run(leave_a_stream(address))
    else:
        with RolloutClient(address) as rollout, rollout.open_stream() as stream:
            stream.submit([PROMPT])
            next(iter(stream))
    assert kinds(file)[-1] == ("Generate", "end")
    assert entries(file)[-1].status.code == grpc.StatusCode.CANCELLED
    tandem("replay", file, "--map", f"{address}={address}")
    assert world.batches == [["a"], ["a"]]


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
def test_a_client_records_the_messages_that_a_proxy_sees(how, world, address, file, tmp_path):
    """Byte for byte, but for the order of a map's entries; also fields unknown to the client."""
    world.watched = [trainer_pb2.StepReport.FromString(b"\x08\x03\xfa\x7f\x04more")]
    seen = tmp_path / "seen.rec"
    recording.create(seen)
    with proxied(address, seen) as port:
        if how == "asyncio":
            asyncio.run(one_of_each_async(port, world))
        else:
            one_of_each(port, world)

    def messages(path):
        return [
            (one.call.name, one.kind, decoded(one.call, one).SerializeToString(deterministic=True))
            for one in entries(path)
            if one.message
        ]

    assert messages(file) == messages(seen)
    assert any(b"more" in message for *_, message in messages(file))


def test_secrets_of_metadata_are_not_recorded(file):
    metadata = [("authorization", "Bearer hush"), ("X-Api-Key", "quiet"), ("x-request-id", "r")]
    Recorder(file).start("host:1", "/a.B/C", None, metadata)
    [start] = entries(file)
    assert start.call.metadata == (("x-request-id", "r"),)
    assert b"hush" not in file.read_bytes()


def test_a_recording_that_a_crash_cut_loses_its_last_entry_alone(address, file, notes):
    with RolloutClient(address) as rollout:
        rollout.info()
    whole = entries(file)
    data = file.read_bytes()
    # The places after the complete entries.
    ends = [len(data)]
    file.write_bytes(b"")
    starts = [data.index(f'{{"kind":"{entry.kind}"'.encode()) for entry in whole]
    for begin, end in pairwise([*starts, *ends]):
        for size in {begin + 1, (begin + end) // 2, end - 1}:
            file.write_bytes(data[:size])
            notes.clear()
            kept = list(read_recording(file))
            assert kept == whole[: starts.index(begin)]
            [warning] = notes
            assert (
                warning
                == f"warning: {file}: byte {begin}: the last entry is incomplete and was left out"
            )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a recording"),
        (lambda data: b"{}\n" + data, "not a recording"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "version 2 of the format"),
        (lambda data: data.replace(b'"kind":"request"', b'"kind":"other"'), "not an entry"),
        (lambda data: data.replace(b'{"kind":"half', b'["kind":"half'), "not JSON"),
        (lambda data: data.replace(b'"bytes":', b'"bytes":-'), "not an entry"),
        (lambda data: data.replace(b"\nx\x01", b"\nx\x02"), "the message is damaged"),
        (lambda data: data + b" " * (1 << 20), "not an entry"),
    ],
)
def test_a_damaged_recording_is_refused_with_its_place(address, file, damage, message):
    with RolloutClient(address) as rollout:
        rollout.info()
    file.write_bytes(damage(file.read_bytes()))
    said = tandem("replay", file, "--print", check=2).stderr
    assert f"tandem: {file}: " in said
    assert message in said


def test_a_message_that_would_fill_the_memory_is_refused(file):
    assert recording.MAX_MESSAGE_BYTES == transport.MAX_RECEIVE_BYTES
    call = Recorder(file).start("host:1", "/a.B/C", None, ())
    bomb = zlib.compress(bytes(recording.MAX_MESSAGE_BYTES + 1))
    head = {"kind": "request", "call": f"{os.getpid()}-1", "bytes": len(bomb)}
    with file.open("ab") as raw:
        raw.write(json.dumps(head).encode() + b"\n" + bomb + b"\n")
    call.half_close()
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        entries(file)


def test_processes_record_into_one_file(file):
    script = """
import sys
from pathlib import Path
from tandem.recording.files import Recorder
recorder = Recorder(Path(sys.argv[1]))
for _ in range(300):
    call = recorder.start("host:1", "/a.B/C", None, ())
    call.request(bytes(range(256)) * 40)
    call.cancel()
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, file]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = entries(file)
    assert len(found) == 2 * 300 * 3
    assert {entry.message for entry in found if entry.kind == "request"} == {bytes(range(256)) * 40}


def test_record_runs_a_command_and_leaves_its_exit_code(address, tmp_path):
    file = tmp_path / "calls.rec"
    script = "import sys; from tandem.rpc.client import RolloutClient as R; R(sys.argv[1]).info()"
    command = [sys.executable, "-m", "tandem", "record", "--out", str(file)]
    run = [*command, sys.executable, "-c", f"{script}; sys.exit(7)", address]
    assert subprocess.run(run, timeout=60).returncode == 7
    assert kinds(file)[0] == ("GetServerInfo", "start")
    again = subprocess.run(run, timeout=60, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr == f"tandem: {file}: already exists\n"


def test_record_refuses_what_it_cannot_run(tmp_path):
    file = tmp_path / "calls.rec"
    both = ["record", "--out", file, "--target", "127.0.0.1:1", "ls"]
    for wrong in (both, ["record", "--out", file]):
        assert "either a command or --target" in tandem(*wrong, check=2).stderr
    said = tandem("record", "--out", file, "no-such-command", check=2).stderr
    assert said == "tandem: no-such-command: No such file or directory\n"
    assert not file.exists()
    said = tandem("record", "--out", tmp_path / "no" / "file", "ls", check=2).stderr
    assert said == f"tandem: {tmp_path}/no/file: No such file or directory\n"


def test_record_forwards_a_port_until_ctrl_c(address, tmp_path):
    file = tmp_path / "calls.rec"
    command = [sys.executable, "-m", "tandem", "record", "--out", str(file), "--json"]
    with subprocess.Popen(
        [*command, "--target", address], stdout=subprocess.PIPE, text=True
    ) as process:
        port = json.loads(process.stdout.readline())["address"]
        with RolloutClient(port) as rollout:
            assert rollout.info() == RolloutClient(address).info()
        busy = [*command, "--target", address, "--port", port.rpartition(":")[2]]
        busy[busy.index(str(file))] = str(tmp_path / "other.rec")
        said = subprocess.run(busy, timeout=60, capture_output=True, text=True)
        assert (said.returncode, "the port is not free" in said.stderr) == (2, True)
        assert not (tmp_path / "other.rec").exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert kinds(file)[-1] == ("GetServerInfo", "end")


def test_open_streams_hold_up_no_other_call_of_a_proxy_nor_of_a_client(world, file, monkeypatch):
    """As many streams are open as a connection carries."""
    monkeypatch.delenv(RECORD_VARIABLE)
    with (
        fakes.serve(world, max_calls=3) as address,
        proxied(address, file) as port,
        RolloutClient(port) as proxied_client,
        RolloutClient(address) as client,
    ):
        for one in (proxied_client, client):
            streams = [one.open_stream() for _ in range(3)]
            fakes.wait_until(lambda: world.open_streams == 3)
            assert one.score([([1, 2], 1)], senior=True).sequences
            assert one.health() == "SERVING"
            for stream in streams:
                stream.close()
            fakes.wait_until(lambda: world.open_streams == 0)


def test_the_proxy_passes_metadata_deadlines_cancellations_and_unknown_methods(
    world, address, file, monkeypatch
):
    monkeypatch.delenv(RECORD_VARIABLE)
    seen = []

    def on_open(context):
        seen.append((dict(context.invocation_metadata()), context.time_remaining()))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(30)

    world.on_open = on_open
    with proxied(address, file) as port:
        with RolloutClient(port) as rollout, pytest.raises(DeadlineError):
            rollout.generate([PROMPT], timeout_seconds=0.5)
        fakes.wait_until(lambda: world.open_streams == 0)
        metadata, remaining = seen.pop()
        assert metadata["x-request-id"]
        assert 0 < remaining <= 0.5
        with RolloutClient(port) as rollout:
            events = rollout.stream(iter([]))
            fakes.wait_until(lambda: world.open_streams == 1)
            events.close()
            fakes.wait_until(lambda: world.open_streams == 0)
        with grpc.insecure_channel(port) as channel:
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary("/no.Such/Method")(b"")
            assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with RolloutClient(port) as rollout:
            assert rollout.health() == "SERVING"
    ends = [entry.status.code.name for entry in entries(file) if entry.kind == "end"]
    assert ends == ["DEADLINE_EXCEEDED", "CANCELLED", "UNIMPLEMENTED"]


def replayed(file, address, *arguments, check=0):
    """The output of `tandem replay --json` for servers at the same address."""
    options = ["--map", f"{address}={address}", "--json", *arguments]
    return json.loads(tandem("replay", file, *options, check=check).stdout)


def test_a_replay_of_equal_answers_ends_with_0(world, address, file):
    world.watched = [trainer_pb2.StepReport(step=3)]
    one_of_each(address, world)
    world.version = 0
    world.steps.clear()
    world.calls.clear()
    world.failures = []
    world.enter = refusing_scores(world)
    # Five calls; 1 + 2 + 1 + 1 messages and five statuses.
    assert replayed(file, address) == {"calls": 5, "answers": 10, "difference": None}
    shown = tandem("replay", file, "--map", f"{address}={address}", "--only", "Score").stdout
    assert shown == "1 call replayed; 1 answer compared, all as recorded\n"


def refusing_scores(world):
    """An enter() of the world with which Score, and it alone, fails as in one_of_each()."""
    enter = fakes.FakeWorld.enter

    def wrapped(method, context):
        if method == "Score":
            world.failures.append(REFUSED)
        enter(world, method, context)

    return wrapped


def test_a_replay_names_the_first_difference(world, address, file):
    one_of_each_without_watch(address)
    world.version = 0
    world.steps.clear()
    world.metrics_of = lambda header: {"loss/total": 0.5}
    found = replayed(file, address, check=1)
    recorded = sum(sum(sample.response_token_ids) for sample in SAMPLES) / 1000
    assert found["difference"] == {
        "call": 3,
        "method": "/tandem.trainer.v1.TrainerService/TrainStep",
        "place": "response 1",
        "path": 'report.metrics["loss/total"]',
        "recorded": repr(recorded),
        "replayed": "0.5",
    }
    shown = tandem("replay", file, "--map", f"{address}={address}", "--call", 3, check=1).stdout
    # The fake has done the step: the answer says so before it differs in its metrics.
    assert shown.splitlines()[0].startswith("call 3 (TrainStep at ")
    assert replayed(file, address, "--no-compare")["difference"] is None


def one_of_each_without_watch(address):
    """Three calls that succeed."""
    with RolloutClient(address) as rollout, TrainerClient(address) as trainer:
        rollout.info()
        rollout.generate([PROMPT])
        trainer.train_step(SAMPLES, run_id="r", step=1, expected_version=0)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_replay_finds_missing_and_further_messages(world, address, file, more):
    world.watched = [trainer_pb2.StepReport(step=step) for step in range(2)]
    with TrainerClient(address) as trainer:
        list(trainer.watch_steps())
    world.watched = [trainer_pb2.StepReport(step=step) for step in range(2 + more)]
    difference = replayed(file, address, check=1)["difference"]
    assert difference["place"] == ("response 3" if more == 1 else "response 2")
    words = ("the end of the call", "a further message") if more == 1 else ("a message", "OK")
    assert (difference["recorded"], difference["replayed"]) == words
    assert replayed(file, address, "--no-compare")["difference"] is None


def test_a_replay_compares_statuses_with_their_details(world, address, file):
    for status, path in (
        (fakes.error_status(5, "not now", field="a.b", reason="NO_JUNIOR"), "code"),
        (fakes.error_status(9, "not", field="a.b", reason="NO_JUNIOR"), "message"),
        (fakes.error_status(9, "not now", field="a.c", reason="NO_JUNIOR"), "field"),
        (fakes.error_status(9, "not now", field="a.b", reason="OTHER"), "reason"),
    ):
        file.unlink()
        recording.create(file)
        # The clients of this process record into the file that was there first.
        recorded = Recorder(file).start(address, "/tandem.rollout.v1.RolloutService/Score", 60, ())
        recorded.request(rollout_pb2.ScoreRequest().SerializeToString())
        recorded.half_close()
        details = [("grpc-status-details-bin", REFUSED.SerializeToString())]
        recorded.end(grpc.StatusCode.FAILED_PRECONDITION, "not now", details)
        world.failures = [REFUSED]
        assert replayed(file, address)["answers"] == 1
        world.failures = [status]
        assert replayed(file, address, check=1)["difference"]["path"] == path


def test_a_replay_keeps_the_order_of_messages_and_the_overlap_of_calls(world, address, file):
    # Each stream waits until the other one has its batch too: in turns they would never end.
    together = threading.Barrier(2)
    world.on_batch = lambda: together.wait(30)
    second = Prompt([3], seed=8, sampling={"max_tokens": 5}, request_id="b")

    def run():
        with RolloutClient(address) as rollout, rollout.open_stream() as stream:
            events = iter(stream)
            stream.submit([PROMPT])
            next(events), next(events)
            stream.submit([second])
            next(events)
            stream.half_close()
            assert list(events) == []

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before, world.batches = sorted(world.batches), []
    # Two calls, three messages and a status each.
    assert replayed(file, address) == {"calls": 2, "answers": 8, "difference": None}
    assert sorted(world.batches) == before == [["a"], ["a"], ["b"], ["b"]]


def test_a_replay_compares_streamed_tokens_and_not_their_events(world, address, file, monkeypatch):
    with RolloutClient(address) as rollout:
        list(rollout.stream(submit([dataclasses.replace(PROMPT, stream_tokens=True)])))
    whole = fakes.token_events

    def with_all_tokens(prompt, index):
        """One event, as if all drafts were accepted."""
        first, *others = whole(prompt, index)
        for event in others:
            first.tokens.token_ids.extend(event.tokens.token_ids)
            first.tokens.authorship_mask += event.tokens.authorship_mask
        yield first

    monkeypatch.setattr(fakes, "token_events", with_all_tokens)
    # Two samples of five tokens, three events each, two ends, and the status.
    assert replayed(file, address) == {"calls": 1, "answers": 9, "difference": None}

    def with_another(prompt, index):
        for event in whole(prompt, index):
            event.tokens.token_ids[-1] += event.tokens.offset == 4
            yield event

    monkeypatch.setattr(fakes, "token_events", with_another)
    assert replayed(file, address, check=1)["difference"]["path"] == "tokens.token_ids[0]"


def test_heartbeats_are_neither_expected_nor_counted(world, address, file):
    beat = rollout_pb2.GenerateResponse()
    beat.heartbeat.unfinished_sequences = 1
    end = rollout_pb2.GenerateResponse(failed=rollout_pb2.FailedEvent(request_id="a"))
    recorded = Recorder(file).start(address, "/tandem.rollout.v1.RolloutService/Generate", 60, ())
    prompt = rollout_pb2.Prompt(request_id="a")
    prompt.sampling.top_k = -1
    submit = rollout_pb2.SubmitPrompts(prompts=[prompt])
    recorded.request(rollout_pb2.GenerateRequest(submit=submit).SerializeToString())
    recorded.half_close()
    end.failed.status.CopyFrom(
        fakes.error_status(3, "must not be negative", field="sampling.top_k")
    )
    for message in (beat, end, beat):
        recorded.response(message.SerializeToString())
    recorded.end(grpc.StatusCode.OK)
    assert replayed(file, address)["answers"] == 2


def test_attempts_that_failed_on_the_way_are_not_sent_again(world, address, file):
    world.failures = [
        fakes.error_status(14, "away"),
        fakes.error_status(8, "full", retry_seconds=0.01),
    ]
    with RolloutClient(address) as rollout:
        rollout.info()
    world.calls.clear()
    printed = tandem("replay", file, "--map", f"{address}={address}")
    assert len(world.calls) == 1
    assert "not sent, because the server was down or full at the time: 2 calls" in printed.stdout


def test_a_call_without_an_end_is_replayed_as_far_as_it_goes(world, address, file):
    with RolloutClient(address) as rollout:
        rollout.generate([PROMPT])
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b'{"kind":"end"')])
    printed = tandem("replay", file, "--map", f"{address}={address}").stdout
    assert f"call 1 (Generate at {address}) is unfinished in the recording" in printed
    assert "2 answers compared" in printed


def test_a_replay_calls_no_server_and_writes_nowhere_unless_told(world, address, file, tmp_path):
    with TrainerClient(address) as trainer:
        trainer.save_checkpoint(str(tmp_path / "run"), "step_1")
        trainer.publish_weights([address])
    said = tandem("replay", file, check=2).stderr
    assert f"calls {address} (TrainerService): no --map names the server" in said
    assert f"hint: --map {address}=HOST:PORT" in said
    assert f"call 1 (SaveCheckpoint at {address}) writes files at {tmp_path / 'run'}" in said
    said = tandem("replay", file, "--map", f"{address}={address}", check=2).stderr
    assert f"call 1 (SaveCheckpoint at {address}) writes files at {tmp_path / 'run'}" in said
    for other in (f"{tmp_path.name}/run=x", f"{tmp_path}/ru=x", f"{tmp_path}/run/=x"):
        wrong = ["--map", f"{address}={address}", "--map", other]
        assert "writes files at" in tandem("replay", file, *wrong, check=2).stderr
    assert list(world.saved) == [f"{tmp_path / 'run'}/step_1"]
    moved = f"{tmp_path / 'run'}={tmp_path / 'again'}"
    replayed(file, address, "--map", moved)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(world.saved) == [f"{tmp_path / 'run'}/step_1", f"{tmp_path / 'again'}/step_1"]
    assert world.targets == [address]
    tandem("replay", file, "--only", "PublishWeights", "--map", f"{address}={address}")


def test_every_address_and_path_of_a_request_needs_a_map(world, address, file, tmp_path):
    other = "127.0.0.1:1"
    with TrainerClient(address) as trainer:
        trainer.save_checkpoint(str(tmp_path / "run"), "step_1")
        trainer.load_checkpoint(str(tmp_path / "run" / "step_1"))
        trainer.load_base_model()
        trainer.publish_weights([address, other])
    loads, publications = len(world.loads), len(world.publications)
    maps = ["--map", f"{address}={address}"]
    said = tandem("replay", file, *maps, check=2).stderr
    assert f"call 1 (SaveCheckpoint at {address}) writes files at {tmp_path}/run: no --map" in said
    assert f"call 2 (LoadCheckpoint at {address}) reads files at {tmp_path}/run/step_1:" in said
    assert f"call 4 (PublishWeights at {address}) sends weights to {other}: no --map" in said
    assert f"--map {other}=HOST:PORT" in said
    assert "call 3" not in said
    # No part of an address stands for it.
    maps += ["--map", f"{tmp_path}={tmp_path}", "--map", "127.0.0.1=127.0.0.2"]
    said = tandem("replay", file, *maps, check=2).stderr
    assert f"sends weights to {other}" in said
    # Calls that are not replayed need none.
    tandem("replay", file, *maps[:2], "--call", 3)
    assert len(world.loads) == loads + 1
    assert len(world.publications) == publications
    tandem("replay", file, *maps[:4], "--map", f"{other}={other}")


def test_every_text_of_a_request_is_a_place_or_none():
    plain = {
        "run_id", "group_id", "request_id", "request_ids", "update_id", "name", "digest",
        "sent_digest", "config", "adapter", "machine", "gpu",
        "junior_version", "stop",
    }  # fmt: skip
    places = {(method, name) for method, (name, _, _) in PLACES.items()}
    found = set()

    def walk(method, message, seen):
        for field in message.fields:
            if field.message_type is not None and field.message_type not in seen:
                walk(method, field.message_type, [*seen, field.message_type])
            elif field.type == field.TYPE_STRING and (method, field.name) in places:
                found.add((method, field.name))
            elif field.type == field.TYPE_STRING:
                assert field.name in plain, f"{method}: {field.full_name} is a place or plain"

    for module in (rollout_pb2, trainer_pb2, critic_pb2, weights_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                walk(method.name, method.input_type, [])
    assert found == places


def replaced(values, *path, by):
    """A copy of a JSON value in which another one stands at a path."""
    if not path:
        return by
    copy = values.copy()
    copy[path[0]] = replaced(values[path[0]], *path[1:], by=by)
    return copy


def write_entries(file, *changed):
    """Writes a recording of entries, each a JSON object or bytes."""
    head = json.dumps({"format": recording.FORMAT, "version": recording.VERSION}).encode()
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in changed]
    file.write_bytes(b"".join(line + b"\n" for line in [head, *lines]))


START = {
    "kind": "start", "call": "1-1", "time": 1.0, "target": "a:1", "timeout": None,
    "method": "/tandem.trainer.v1.TrainerService/TrainStep", "metadata": [["k", "v"]],
}  # fmt: skip
END = {"kind": "end", "call": "1-1", "code": "OK", "details": "", "trailing_metadata": []}


def test_no_value_of_an_entry_breaks_the_reader(file, subtests):
    for bad in [
        None,
        1,
        -1.5,
        10**400,
        "x",
        [],
        [[]],
        [[1, 2]],
        [["a-bin", "é"]],
        {},
        {"a": []},
        True,
    ]:
        for entry in [START, END]:
            with subtests.test(entry=entry, bad=bad):
                for key in entry:
                    changed = [
                        replaced(one, key, by=bad) if one is entry else one for one in (START, END)
                    ]
                    write_entries(file, *changed)
                    try:
                        printed = tandem("replay", file, "--print")
                    except AssertionError:
                        said = tandem("replay", file, "--print", check=2).stderr
                        assert said.startswith(f"tandem: {file}: ") or said.startswith(
                            "tandem: call "
                        )
                    else:
                        assert all(map(json.loads, printed.stdout.splitlines()))


def test_bytes_that_are_no_status_and_no_message_are_named(file):
    details = base64.b64encode(b"\xff\xff").decode()
    end = replaced(END, "trailing_metadata", by=[["grpc-status-details-bin", details]])
    write_entries(file, START, end)
    said = tandem("replay", file, "--print", check=2).stderr
    assert "call 1 (TrainStep at a:1): the details of its status are damaged" in said
    data = zlib.compress(b"\x0a\xff")
    request = json.dumps({"kind": "request", "call": "1-1", "bytes": len(data)}).encode()
    write_entries(file, START, request + b"\n" + data)
    said = tandem("replay", file, "--print", check=2).stderr
    assert "call 1 (TrainStep at a:1): a message is not a tandem.trainer.v1.TrainStepReq" in said


def test_print_does_not_unfold_messages_that_would_fill_the_memory(file):
    # 32 million empty samples in 64 kB of the file: gigabytes as messages.
    method = "/tandem.rollout.v1.RolloutService/Score"
    data = zlib.compress(b"\x0a\x00" * (recording.MAX_MESSAGE_BYTES // 2))
    request = json.dumps({"kind": "request", "call": "1-1", "bytes": len(data)}).encode()
    write_entries(file, replaced(START, "method", by=method), request + b"\n" + data, END)
    _, shown, _ = tandem("replay", file, "--print").stdout.splitlines()
    assert json.loads(shown)["bytes"] == recording.MAX_MESSAGE_BYTES
    assert "message" not in json.loads(shown)


def test_calls_without_an_end_do_not_fill_the_memory(file, monkeypatch):
    monkeypatch.setattr(recording, "_MAX_OPEN_BYTES", 10_000)
    write_entries(file, *(replaced(START, "call", by=f"1-{i}") for i in range(20)))
    assert len(tandem("replay", file, "--print").stdout.splitlines()) == 20
    write_entries(file, *(replaced(START, "call", by=f"1-{i}") for i in range(100)))
    said = tandem("replay", file, "--print", check=2).stderr
    assert "too many calls in the recording are unfinished" in said
    ended = [one for i in range(100) for one in (START, END)]
    write_entries(file, *ended)
    assert len(tandem("replay", file, "--print").stdout.splitlines()) == 200


def test_a_replay_says_which_server_is_away_and_which_is_silent(world, address, file):
    with RolloutClient(address) as rollout:
        rollout.generate([PROMPT])
    away = tandem("replay", file, "--map", f"{address}=127.0.0.1:1", check=3).stderr
    assert "[UNAVAILABLE" in away
    assert "hint: --map names another server" in away
    world.on_batch = lambda: threading.Event().wait(2)
    silent = ["--map", f"{address}={address}", "--timeout", "0.2"]
    said = tandem("replay", file, *silent, check=1).stderr
    assert "the server did not continue within 0.2 s" in said
    said = tandem("replay", file, "--call", 9, check=2).stderr
    assert said == f"tandem: {file}: has no such call\n"


def test_print_shows_a_recording_as_json_lines(world, address, file):
    world.watched = [trainer_pb2.StepReport(step=3)]
    one_of_each(address, world)
    lines = [json.loads(line) for line in tandem("replay", file, "--print").stdout.splitlines()]
    assert len(lines) == len(entries(file))
    assert lines[0]["target"] == address
    assert lines[-1] == {
        "call": 5, "method": "/tandem.rollout.v1.RolloutService/Score", "kind": "end",
        "code": "FAILED_PRECONDITION", "message": "not now", "field": "a.b",
        "reason": "NO_JUNIOR",
    }  # fmt: skip
    [score] = [line for line in lines if line["call"] == 5 and line["kind"] == "request"]
    assert score["message"]["sequences"] == [{"token_ids": [1, 2], "first_scored_token": 1}]


def test_a_text_is_mapped_where_it_stands_alone(subtests):
    for text, mapped in [
        ("host:77", "new:1"),
        ("connect to host:77: refused", "connect to new:1: refused"),
        ("host:770", "host:770"),
        ("my.host:77", "my.host:77"),
        ("/runs/a/checkpoints", "/tmp/b/checkpoints"),
        ("/runs/ab", "/runs/ab"),
    ]:
        with subtests.test(text=text, mapped=mapped):
            assert Mapped.parse(["host:77=new:1", "/runs/a=/tmp/b"]).text(text) == mapped


def test_a_wrong_map_is_refused():
    for wrong in ("a", "a=", "=b"):
        with pytest.raises(ConfigError, match="must be OLD=NEW"):
            Mapped.parse([wrong])


def report(**values):
    """A reply to a train step."""
    return trainer_pb2.TrainStepResponse(report=trainer_pb2.StepReport(**values))


def failure(field):
    """A FailedEvent whose status names a field."""
    status = fakes.error_status(3, "bad", field=field)
    return rollout_pb2.GenerateResponse(failed=rollout_pb2.FailedEvent(status=status))


def scores(*values):
    """A reply to a Score of one sequence."""
    reply = rollout_pb2.ScoreResponse()
    reply.sequences.add().senior_logprobs.CopyFrom(to_tensor(values))
    return reply


def test_a_difference_is_named_by_its_path_and_both_values(subtests):
    for one, other, difference in [
        (report(step=1), report(step=2), ("report.step", "1", "2")),
        (report(metrics={"a": 1.0}), report(), ('report.metrics["a"]', "1.0", "absent")),
        (
            report(metrics={"a": 0.0}),
            report(metrics={"a": -0.0}),
            ('report.metrics["a"]', "0.0", "-0.0"),
        ),
        (scores(1, 2, 3), scores(1, 2.5, 3), ("sequences[0].senior_logprobs[1]", "2.0", "2.5")),
        (
            scores(1),
            scores(1, 2),
            ("sequences[0].senior_logprobs.shape[0]", "1", "2"),
        ),
        (
            trainer_pb2.PublishWeightsRequest(targets=["a"]),
            trainer_pb2.PublishWeightsRequest(targets=["a", "b"]),
            ("targets", "1 elements", "2 elements"),
        ),
        (scores(1), rollout_pb2.ScoreResponse(), ("sequences", "1 elements", "0 elements")),
        (
            trainer_pb2.TrainStepResponse(),
            report(skipped=True),
            ("report", "absent", "{skipped: true}"),
        ),
        (
            failure("a"),
            failure("b"),
            ("failed.status.details[0].field_violations[0].field", "'a'", "'b'"),
        ),
    ]:
        with subtests.test(one=one, other=other, difference=difference):
            found = first_difference(one, other)
            assert (found.path, found.recorded, found.replayed) == difference
            assert first_difference(one, one) is None


def test_equal_bits_are_equal_and_fields_of_the_machine_are_not_compared():
    nan = float("nan")
    assert first_difference(report(metrics={"a": nan}), report(metrics={"a": nan})) is None
    assert first_difference(scores(nan), scores(nan)) is None
    model = {"path": "/models/a"}
    infos = [
        rollout_pb2.GetServerInfoResponse(
            server=server_pb2.ServerInfo(
                uptime_seconds=seconds, model=model | {"path": str(seconds)}
            )
        )
        for seconds in (1, 2)
    ]
    assert first_difference(*infos) is None


def test_numbers_of_drafts_are_not_compared_and_their_response_is():
    one, other = (
        rollout_pb2.FinishedEvent(
            trajectory={"seed": 1, "accepted_draft_mask": bytes([1] * count)},
            draft_tokens=count,
            accepted_draft_tokens=count,
        )
        for count in (4, 5)
    )
    assert first_difference(one, other) is None
    other.trajectory.seed = 2
    assert first_difference(one, other).path == "trajectory.seed"
