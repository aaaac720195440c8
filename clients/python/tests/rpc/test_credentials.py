"""TLS, client certificates and tokens, against gRPC servers of this process."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fakes
import grpc
import pytest
import yaml
from commands import tandem
from credential_files import expired, read, tapped, token, with_ca
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from grpc_status import rpc_status

from tandem import Credentials
from tandem.certs import authority as certs
from tandem.certs.authority import (
    CertificateDirectory,
    Request,
    make_certificates,
    renew_certificates,
)
from tandem.cluster.local import LocalCluster
from tandem.cluster.plan import planned
from tandem.errors import (
    ClosedClientError,
    ConfigError,
    CredentialsError,
    PermissionDeniedError,
    ServerStartError,
    TandemError,
    UnauthenticatedError,
    UnavailableError,
)
from tandem.recording import files as recording
from tandem.recording.files import Recorder
from tandem.recording.proxy import RecordingProxy
from tandem.rpc.aio import AsyncRolloutClient, AsyncTrainerClient
from tandem.rpc.channel import open_channel
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.credentials import NO_CREDENTIALS, is_loopback, watched_tokens
from tandem.rpc.requests import Prompt, SupervisedSample
from tandem.rpc.retry import ONCE
from tandem.rpc.transport import RECORD_VARIABLE, Connection
from tandem.session.opening import check_run
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import RunSettings

PROMPT = Prompt([1, 2], seed=7, num_samples=2, sampling={"max_tokens": 5}, request_id="a")
SAMPLES = [SupervisedSample([5, 6], [7, 8])]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Certificates and tokens that no test changes."""
    return make_certificates(tmp_path_factory.mktemp("shared") / "certs", Request())


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Those of another authority."""
    return make_certificates(tmp_path_factory.mktemp("foreign") / "certs", Request())


@pytest.fixture
def own(tmp_path):
    """Those of one test, which may change them."""
    return make_certificates(tmp_path / "certs", Request())


def server_tls(directory, *, mutual=True, names=("server.key", "server.crt")):
    """TLS of a server, which demands clients' certificates if `mutual`."""
    pair = tuple(read(directory, name) for name in names)
    authorities = read(directory, "ca.crt") if mutual else None
    return grpc.ssl_server_credentials([pair], authorities, mutual)


class Gate(grpc.ServerInterceptor):
    """Refuses calls without one of the tokens, as the servers do, and records what it sees."""

    def __init__(self, *tokens):
        self.tokens = set(tokens)
        self.shown = []

    def intercept_service(self, continuation, details):
        if details.method.startswith("/grpc.health"):
            return continuation(details)
        shown = dict(details.invocation_metadata).get("authorization")
        self.shown.append(shown)
        if shown in {f"Bearer {one}" for one in self.tokens}:
            return continuation(details)
        reason = "TOKEN_UNKNOWN" if shown else "TOKEN_MISSING"
        status = rpc_status.to_status(fakes.error_status(16, "who are you?", reason=reason))

        def refuse(requests, context):
            context.abort_with_status(status)

        return grpc.stream_stream_rpc_method_handler(refuse)


@contextmanager
def secured(directory, world, gate=None, **options):
    gates = [gate] if gate else []
    with fakes.serve(world, credentials=server_tls(directory, **options), interceptors=gates) as at:
        yield at


def all_kinds(address, credentials):
    """A call of each kind of method."""
    options = {"credentials": credentials, "retry": ONCE}
    with RolloutClient(address, **options) as rollout, TrainerClient(address, **options) as trainer:
        rollout.info()
        assert len(rollout.generate([PROMPT])[0]) == 2
        trainer.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert len(list(trainer.watch_steps())) == 1


async def all_kinds_async(address, credentials):
    options = {"credentials": credentials, "retry": ONCE}
    async with (
        AsyncRolloutClient(address, **options) as rollout,
        AsyncTrainerClient(address, **options) as trainer,
    ):
        await rollout.info()
        assert len((await rollout.generate([PROMPT]))[0]) == 2
        await trainer.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert len([one async for one in trainer.watch_steps()]) == 1


def run_all_kinds(address, credentials, how):
    if how == "synchronous":
        all_kinds(address, credentials)
    else:
        asyncio.run(all_kinds_async(address, credentials))


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
@pytest.mark.parametrize("mutual", [False, True])
def test_every_kind_of_call_works_with_tls_and_a_token(shared, world, how, mutual):
    world.watched = [fakes.trainer_pb2.StepReport(step=1)]
    gate = Gate(token(shared))
    credentials = shared.client()
    if not mutual:
        credentials = Credentials(credentials.ca_file, token_file=credentials.token_file)
    with secured(shared, world, gate, mutual=mutual) as address:
        run_all_kinds(address, credentials, how)
    assert gate.shown == [f"Bearer {token(shared)}"] * 4


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
def test_a_token_without_tls_goes_to_this_machine_alone(shared, world, how, monkeypatch):
    world.watched = [fakes.trainer_pb2.StepReport(step=1)]
    credentials = Credentials(token_file=shared.file("user.token"))
    gate = Gate(token(shared, "user"))
    # A proxy is another machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with fakes.serve(world, interceptors=[gate]) as address:
        run_all_kinds(address, credentials, how)
    assert len(gate.shown) == 4
    for elsewhere in ("192.0.2.1:7701", "rollout.example:7701", "dns:///127.0.0.1.example:1"):
        with pytest.raises(CredentialsError, match=r"token_file: .*clear") as refused:
            RolloutClient(elsewhere, credentials=credentials)
        assert token(shared, "user") not in str(refused.value.describe())


def test_loopback_addresses():
    here = ["127.0.0.1:1", "127.8.0.1", "localhost", "localhost:80", "[::1]:7", "::1", "unix:/s"]
    there = ["0.0.0.0:1", "", "[::]:1", "10.0.0.1:1", "localhost.example:1", "127.0.0.1.example:1"]
    there += ["localhost:1,example:1", "dns://1.1.1.1/localhost", "[2001:db8::1]:1", "localhost:x"]
    assert [one for one in here if not is_loopback(one)] == []
    assert [one for one in there if is_loopback(one)] == []


class Refusals:
    """Servers, and clients that they or that refuse them; each has the client's explanation."""

    @staticmethod
    def foreign_server(own, foreign):
        return server_tls(own), with_ca(own, foreign), "no authority in ca_file"

    @staticmethod
    def expired_server(own, foreign):
        names = expired(own, "server")
        return server_tls(own, names=names), own.client(), "server's certificate has expired"

    @staticmethod
    def server_without_tls(own, foreign):
        return None, own.client(), "does not speak TLS"

    @staticmethod
    def client_without_tls(own, foreign):
        return server_tls(own), Credentials(), "may require TLS, but ca_file is not set"

    @staticmethod
    def client_without_tls_with_a_token(own, foreign):
        credentials = Credentials(token_file=own.file("admin.token"))
        return server_tls(own), credentials, "may require TLS, but ca_file is not set"

    @staticmethod
    def client_without_certificate(own, foreign):
        credentials = Credentials(own.file("ca.crt"), token_file=own.file("admin.token"))
        return server_tls(own), credentials, "certificate_file is not set"

    @staticmethod
    def expired_client(own, foreign):
        key, certificate = (own.file(name) for name in expired(own, "client"))
        paths = own.client().record()
        credentials = Credentials(paths["ca_file"], certificate, key, paths["token_file"])
        return (
            server_tls(own),
            credentials,
            "may refuse certificate_file .* from an unknown authority",
        )

    @staticmethod
    def foreign_client(own, foreign):
        credentials = with_ca(foreign, own)
        return (
            server_tls(own),
            credentials,
            "may refuse certificate_file .* from an unknown authority",
        )


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
@pytest.mark.parametrize("case", [name for name in vars(Refusals) if name[0] != "_"])
def test_a_connection_that_tls_refuses(own, foreign, world, case, how, caplog):
    tls, credentials, explanation = getattr(Refusals, case)(own, foreign)
    gate = Gate(token(own))
    with fakes.serve(world, credentials=tls, interceptors=[gate]) as address:
        options = {"credentials": credentials, "retry": ONCE}
        with pytest.raises(UnavailableError) as refused:
            if how == "synchronous":
                with RolloutClient(address, **options) as client:
                    client.info()
            else:
                asyncio.run(info(address, options))
        with Connection(address, credentials=credentials) as connection:
            health = connection.check_health()
    assert health.status == "UNREACHABLE"
    assert health.refused
    for text in (health.reason, refused.value.hint):
        assert re.search(explanation, text), text
    assert gate.shown == []
    everything = f"{refused.value} {refused.value!r} {refused.value.describe()} {caplog.text}"
    assert token(own) not in everything


async def info(address, options):
    async with AsyncRolloutClient(address, **options) as client:
        return await client.info()


def test_a_token_is_never_in_the_clear_on_the_wire(shared, foreign, world):
    secret = token(shared).encode()
    gate = Gate(token(shared))
    with secured(shared, world, gate) as target, tapped(target) as (address, seen):
        with RolloutClient(address, credentials=shared.client(), retry=ONCE) as client:
            client.info()
            client.generate([PROMPT])
        # A server of a foreign authority gets no further than the handshake.
        with pytest.raises(UnavailableError):
            RolloutClient(address, credentials=with_ca(shared, foreign), retry=ONCE).info()
    assert len(seen) > 1000
    assert secret not in seen
    # A machine in the middle that speaks no TLS gets the beginning of a handshake alone.
    with (
        tapped() as (address, seen),
        RolloutClient(
            address, credentials=shared.client(), retry=ONCE, timeout_seconds=1
        ) as client,
        pytest.raises(Exception, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"),
    ):
        client.info()
    assert bytes(seen[:2]) == b"\x16\x03"
    assert secret not in seen


def test_without_tls_the_wire_shows_a_token(shared, world):
    """The tap above would see one."""
    credentials = Credentials(token_file=shared.file("admin.token"))
    with fakes.serve(world) as target, tapped(target) as (address, seen):
        RolloutClient(address, credentials=credentials).info()
    assert b"authorization" in seen


def test_wrong_tokens_are_typed_errors(shared, world):
    gate = Gate("another")
    status = fakes.error_status(7, "the role is reader", reason="INSUFFICIENT_ROLE")
    with secured(shared, world, gate) as address:
        with RolloutClient(address, credentials=shared.client()) as client:
            with pytest.raises(UnauthenticatedError) as unknown:
                client.info()
            assert unknown.value.reason == "TOKEN_UNKNOWN"
            assert unknown.value.hint
            gate.tokens = {token(shared)}
            world.failures.append(status)
            with pytest.raises(PermissionDeniedError) as denied:
                client.info()
            assert not isinstance(denied.value, UnauthenticatedError)
            assert denied.value.reason == "INSUFFICIENT_ROLE"
        credentials = shared.client().record()
        del credentials["token_file"]
        with RolloutClient(address, credentials=Credentials(**credentials)) as client:
            assert client.health() == "SERVING"
            with pytest.raises(UnauthenticatedError) as missing:
                client.info()
            assert missing.value.reason == "TOKEN_MISSING"
            assert "TANDEM_TOKEN_FILE" in missing.value.hint
    for error in (unknown.value, denied.value):
        assert token(shared) not in f"{error} {error!r} {error.describe()} {error.__cause__}"


BAD = {
    "missing": ("ca_file", "absent.crt", "No such file"),
    "directory": ("ca_file", ".", "is not a regular file"),
    "no certificate": ("ca_file", "admin.token", "holds no certificate"),
    "other key": ("private_key_file", "server.key", "certificate_file: .*KEY_VALUES_MISMATCH"),
    "no key": ("private_key_file", None, "certificate_file: .* needs private_key_file"),
    "no client's certificate": ("certificate_file", None, "private_key_file: .* needs cert"),
    "no authority": ("ca_file", None, "certificate_file: .* needs ca_file"),
    "empty tokens": ("token_file", "empty", "token_file: .*empty: holds no token"),
    "odd tokens": ("token_file", "odd", "token_file: .*odd: token 2 has characters"),
    "binary tokens": ("token_file", "binary", "token_file: .*binary: token 1 has characters"),
}


def test_files_that_cannot_be_used_are_named(own, subtests):
    for case in BAD:
        with subtests.test(case=case):
            field, name, message = BAD[case]
            (own.path / "empty").write_text("\n \n")
            (own.path / "odd").write_text("good\nsecret with spaces\n")
            (own.path / "binary").write_bytes(b"secret\xff\xfe")
            paths = own.client().record()
            del paths[field]
            if name is not None:
                paths[field] = own.file(name)
            with pytest.raises(CredentialsError, match=message) as refused:
                RolloutClient("127.0.0.1:1", credentials=Credentials(**paths))
            assert "secret" not in str(refused.value)
            if name is not None:
                assert str(own.path) in str(refused.value)


def test_the_environment_names_the_files(shared, world, monkeypatch):
    for field, path in shared.client("reader").record().items():
        monkeypatch.setenv(f"TANDEM_{field.upper()}", path)
    gate = Gate(token(shared, "reader"), token(shared))
    with secured(shared, world, gate) as address:
        RolloutClient(address).info()
        asyncio.run(info(address, {}))
        tandem("status", "--rollout", address)
        tandem("status", "--rollout", address, "--token-file", shared.file("admin.token"))
    assert set(gate.shown[:2]) == {f"Bearer {token(shared, 'reader')}"}
    assert gate.shown[-1] == f"Bearer {token(shared)}"


def options_of(credentials):
    """The four options of the command line."""
    paths = credentials.record().items()
    return [word for name, path in paths for word in (f"--{name.replace('_', '-')}", path)]


def test_commands_take_credentials_as_options(shared, world, tmp_path):
    fakes.write_tokenizer(tmp_path / "model")
    world.watched = [fakes.trainer_pb2.StepReport(step=1)]
    options = options_of(shared.client())
    gate = Gate(token(shared))
    with secured(shared, world, gate) as address:
        tandem("health", address, *options)
        tandem("status", "--rollout", address, "--trainer", address, *options)
        model = ["--tokenizer", tmp_path / "model"]
        tandem("generate", "w1", "--rollout", address, *model, *options)
        tandem("score", "w1 w2", "--rollout", address, *model, *options)
        tandem("watch", "--trainer", address, "--steps", 1, *options)
        tandem("export", "served", tmp_path / "out", "--address", address, *options)
        tandem("health", address, check=3)
        refused = tandem("generate", "w1", "--rollout", address, *model, *options[:-2], check=1)
    assert "UNAUTHENTICATED" in refused.stderr
    assert set(gate.shown) == {f"Bearer {token(shared)}", None}


def test_a_run_with_credentials_shows_the_token_nowhere(shared, world, run_file, tmp_path):
    settings = yaml.safe_load(run_file.read_text())
    settings["credentials"] = shared.client().record()
    recorded = tmp_path / "run.rec"
    recording.create(recorded)
    file = tmp_path / "secured.yaml"
    gate = Gate(token(shared))
    with secured(shared, world, gate) as address, pytest.MonkeyPatch.context() as patch:
        settings["servers"] = {"rollout": [address], "trainer": address}
        file.write_text(yaml.safe_dump(settings))
        patch.setenv(RECORD_VARIABLE, str(recorded))
        dry = tandem("train", file, "--dry-run")
        trained = tandem("train", file)
    assert recorded.stat().st_size > 1000
    assert gate.shown.count(f"Bearer {token(shared)}") == len(gate.shown) > 10
    printed = dry.stdout + dry.stderr + trained.stdout + trained.stderr
    assert shared.file("admin.token") in dry.stdout
    assert token(shared) not in printed
    files = [recorded, *(one for one in Path(settings["run_dir"]).rglob("*") if one.is_file())]
    assert len(files) > 5
    for one in files:
        assert token(shared).encode() not in one.read_bytes(), one
    entries = recording.read_recording(recorded)
    metadata = {key for entry in entries for key, _ in entry.call.metadata}
    assert "x-request-id" in metadata
    assert "authorization" not in metadata


def test_the_recording_proxy_and_a_replay_use_credentials(shared, world, tmp_path):
    path = tmp_path / "calls.rec"
    recording.create(path)
    gate = Gate(token(shared))
    with secured(shared, world, gate) as target:
        with RecordingProxy(target, 0, Recorder(path), shared.client()) as proxy:
            near = f"127.0.0.1:{proxy.port}"
            RolloutClient(near, credentials=Credentials()).info()
            # A token of the client's own comes before the proxy's.
            own = tmp_path / "own.token"
            own.write_text("its-own\n")
            with pytest.raises(UnauthenticatedError):
                RolloutClient(near, credentials=Credentials(token_file=own)).info()
        assert gate.shown == [f"Bearer {token(shared)}", "Bearer its-own"]
        options = ["--map", f"{target}={target}", "--call", 1]
        tandem("replay", path, *options, *options_of(shared.client()))
        tandem("replay", path, *options, check=3)
    assert token(shared).encode() not in path.read_bytes()
    assert b"its-own" not in path.read_bytes()


class Rotating:
    """A server's certificate that follows the files of a directory."""

    def __init__(self, directory):
        self.directory = directory
        self.loaded = read(directory, "server.crt")

    def credentials(self):
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._changed, True)

    def _changed(self):
        certificate = read(self.directory, "server.crt")
        if certificate == self.loaded:
            return None
        self.loaded = certificate
        return self._configuration()

    def _configuration(self):
        pair = read(self.directory, "server.key"), read(self.directory, "server.crt")
        return grpc.ssl_server_certificate_configuration([pair], read(self.directory, "ca.crt"))


def serial(pem):
    return x509.load_pem_x509_certificate(pem).serial_number


@pytest.mark.parametrize("how", ["synchronous", "asyncio"])
def test_rotation_under_load_loses_no_call(own, world, how):
    peers = []
    enter = world.enter

    def watch(method, context):
        peers.append(serial(context.auth_context()["x509_pem_cert"][0]))
        enter(method, context)

    world.enter = watch
    release = threading.Event()
    world.on_prompt = lambda prompt: prompt.request_id == "long" and release.wait(60)
    gate = Gate(token(own))
    first = serial(read(own, "client.crt"))
    rotating = Rotating(own)
    options = {"credentials": own.client(), "retry": ONCE}

    def rotate():
        """Three rotations; each lets calls go on before, in between and after."""
        for number in range(3):
            count = len(peers) + 20
            fakes.wait_until(lambda count=count: len(peers) > count)
            new = f"token-{number}"
            gate.tokens.add(new)
            (own.path / "next").write_text(f"{new}\n")
            (own.path / "next").replace(own.file("admin.token"))
            renew_certificates(own.path, Request())
            wanted = serial(read(own, "client.crt"))
            fakes.wait_until(lambda wanted=wanted: wanted in peers)
            fakes.wait_until(lambda new=new: f"Bearer {new}" in gate.shown)
            gate.tokens = {new}
        release.set()

    def calls(client):
        while not release.is_set():
            client.info()
            client.score([([1, 2], 1)])
        return len(client.channel._older)

    async def calls_async(address):
        async with AsyncRolloutClient(address, **options) as client:
            long = asyncio.ensure_future(client.generate([Prompt([1], request_id="long")]))
            rotation = asyncio.ensure_future(asyncio.to_thread(rotate))
            while not rotation.done():
                await asyncio.gather(*(client.info() for _ in range(4)))
            await rotation
            assert len((await long)[0]) == 1
            await client.info()
            await client.info()
            assert client.channel._older == []

    with fakes.serve(world, credentials=rotating.credentials(), interceptors=[gate]) as address:
        if how == "asyncio":
            asyncio.run(calls_async(address))
        else:
            with RolloutClient(address, **options) as client, ThreadPoolExecutor(6) as threads:
                # A call that runs all the while, on the first connection.
                long = threads.submit(client.generate, [Prompt([1], request_id="long")])
                running = [threads.submit(calls, client) for _ in range(4)]
                threads.submit(rotate).result()
                for one in running:
                    one.result()
                assert len(long.result()[0]) == 1
                client.info()
                client.info()
                assert client.channel._older == []
    assert first in peers
    assert len(set(peers)) == 4
    assert rotating.loaded == read(own, "server.crt")


def test_a_new_authority_takes_over_without_a_restart(own, world):
    other = make_certificates(own.path.with_name("other"), Request())
    new = read(other, "ca.crt")
    both = read(own, "ca.crt") + new
    old = make_certificates(own.path.with_name("old"), Request())
    Path(old.file("ca.crt")).write_bytes(read(own, "ca.crt"))
    rotating = Rotating(own)
    with (
        fakes.serve(world, credentials=rotating.credentials()) as address,
        RolloutClient(address, credentials=own.client(), retry=ONCE) as client,
    ):
        client.info()
        for directory in (own, other):
            Path(directory.file("ca.crt")).write_bytes(both)
        client.info()
        rotating.directory = other
        with Connection(address, credentials=own.client()) as connection:
            assert connection.health() == "SERVING"
        for name in ("client.key", "client.crt"):
            Path(own.file(name)).write_bytes(read(other, name))
        client.info()
        Path(own.file("ca.crt")).write_bytes(new)
        client.info()
        with pytest.raises(UnavailableError):
            RolloutClient(address, credentials=with_ca(own, old), retry=ONCE).info()
    assert rotating.loaded == read(other, "server.crt")


def test_half_of_a_rotation_changes_nothing(own, world, caplog):
    other = make_certificates(own.path.with_name("other"), Request())
    with secured(own, world) as address, RolloutClient(address, credentials=own.client()) as client:
        client.info()
        before = read(own, "client.crt"), read(own, "admin.token")
        Path(own.file("client.crt")).write_bytes(read(other, "client.crt"))
        Path(own.file("admin.token")).write_text("")
        client.info()
        client.info()
        assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 2
        assert "certificate_file: " in caplog.text
        assert "token_file: " in caplog.text
        assert token(other) not in caplog.text
        Path(own.file("client.crt")).write_bytes(before[0])
        Path(own.file("admin.token")).write_bytes(before[1])
        client.info()


def test_a_file_of_tokens_is_read_when_it_changes(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("one\n\n two \r\n")
    tokens = watched_tokens(file, "token_file")
    assert tokens.contents() == ("one", "two")
    assert tokens.contents() is tokens.contents()
    file.write_text("three")
    assert tokens.contents() == ("three",)
    file.unlink()
    assert tokens.contents() == ("three",)


def test_closing_a_client_ends_calls_on_its_older_connections(own, world):
    started = threading.Event()
    hang = threading.Event()
    world.on_prompt = lambda prompt: started.set() or hang.wait(30)
    with secured(own, world) as address, ThreadPoolExecutor(1) as threads:
        client = RolloutClient(address, credentials=own.client(), retry=ONCE)
        running = threads.submit(client.generate, [PROMPT])
        assert started.wait(30)
        renew_certificates(own.path, Request())
        assert list(client.stream(iter(()))) == []
        assert len(client._streams._older) == 1
        client.close()
        with pytest.raises(Exception, match="CANCELLED"):
            running.result(timeout=30)
        hang.set()


@pytest.mark.parametrize("tls", [False, True])
def test_a_call_of_a_closed_client_is_refused(own, world, tls):
    served = secured(own, world) if tls else fakes.serve(world)
    with served as address:
        client = RolloutClient(address, credentials=own.client() if tls else NO_CREDENTIALS)
        client.info()
        client.close()
        for call in (client.info, client.health, client.open_stream):
            with pytest.raises(ClosedClientError, match="closed"):
                call()
        with pytest.raises(ClosedClientError):
            client.generate([PROMPT])


@pytest.mark.parametrize("tls", [False, True])
async def test_a_call_of_a_closed_asyncio_client_is_refused(own, world, tls):
    served = secured(own, world) if tls else fakes.serve(world)
    with served as address:
        client = AsyncRolloutClient(address, credentials=own.client() if tls else NO_CREDENTIALS)
        await client.info()
        await client.close()
        for call in (client.info, client.health):
            with pytest.raises(ClosedClientError, match="closed"):
                await call()
        with pytest.raises(ClosedClientError):
            client.stream(iter(()))


def test_threads_that_call_while_a_client_closes_get_errors(own, world):
    with secured(own, world) as address:
        for _ in range(20):
            client = RolloutClient(address, credentials=own.client(), retry=ONCE)
            ended = []

            def call(client=client, ended=ended):
                try:
                    while True:
                        client.info()
                except TandemError as error:
                    ended.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            client.info()
            client.close()
            for thread in threads:
                thread.join()
            assert len(ended) == 4


def test_a_client_that_is_made_while_certificates_are_replaced_reads_them_again(own, world):
    key = Path(own.client().private_key_file)
    right = key.read_bytes()
    key.write_text("half of a k")
    work = threading.Timer(0.05, key.write_bytes, [right])
    work.start()
    with secured(own, world) as address, RolloutClient(address, credentials=own.client()) as client:
        client.info()
    work.join()


@pytest.mark.parametrize("kind", ["pipe", "device", "large", "folder"])
def test_what_is_no_file_of_tokens_is_not_read(tmp_path, kind):
    path = tmp_path / "tokens"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"token\n" * (1 << 20))
    else:
        path.symlink_to("/dev/zero")
    says = "has more than 1048576 bytes" if kind == "large" else "is not a regular file"
    with pytest.raises(CredentialsError, match=f"token_file: {path}: {says}"):
        watched_tokens(path, "token_file")


def test_files_that_stay_damaged_are_refused(own):
    Path(own.client().private_key_file).write_text("half of a k")
    with pytest.raises(CredentialsError, match="not a certificate"):
        RolloutClient("127.0.0.1:1", credentials=own.client())


def test_no_channel_uses_a_proxy_of_the_environment(own, world, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for served, credentials in (
        (fakes.serve(world), NO_CREDENTIALS),
        (secured(own, world), own.client()),
    ):
        with (
            served as address,
            RolloutClient(address, credentials=credentials, retry=ONCE) as client,
        ):
            assert client.health() == "SERVING"
            client.info()
            assert client.generate([PROMPT])


async def test_no_asyncio_channel_uses_a_proxy_of_the_environment(world, monkeypatch):
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    with fakes.serve(world) as address:
        async with AsyncRolloutClient(address, retry=ONCE) as client:
            assert await client.health() == "SERVING"
            assert await client.generate([PROMPT])


def test_credentials_show_paths_alone(shared):
    assert token(shared) not in repr(shared.client())
    channel = open_channel("127.0.0.1:1", shared.client(), [])
    assert token(shared) not in repr(vars(channel))
    assert b"PRIVATE KEY" not in repr(vars(channel)).encode()
    channel.close()


def test_a_cluster_takes_certificates_and_tokens_from_a_directory(shared, tmp_path):
    settings = ClusterSettings(
        certs=shared.path,
        rollout=[{}, {"server": {"tokens": {}, "grpc_port": 7}}],
        trainer={"server": {"tls": {"ca_file": "own"}}},
    )
    plan = planned(settings)
    assert plan.rollout[0]["server"] == shared.server()
    assert plan.rollout[1]["server"] == {
        "tls": shared.server()["tls"],
        "tokens": {},
        "grpc_port": 7,
    }
    assert plan.trainer["server"]["tls"] == {"ca_file": "own"}
    assert planned(plan) == plan
    assert LocalCluster(settings).credentials == shared.client()
    explicit = Credentials(token_file=shared.file("user.token"))
    credentials = LocalCluster(settings, credentials=explicit).credentials
    assert credentials == shared.client("user")


def test_a_cluster_whose_directory_has_no_certificates_does_not_start(tmp_path):
    cluster = ClusterSettings(certs=tmp_path, trainer={}, directory=tmp_path / "cluster")
    with pytest.raises(ConfigError, match=r"cluster\.certs: .* is not a directory") as refused:
        LocalCluster(cluster).start()
    assert refused.value.hint == f"`tandem certs {tmp_path}` creates it"


def test_the_reference_of_a_run_is_called_with_credentials(shared, world, run_file, tmp_path):
    """It runs elsewhere, also where the run starts a cluster of its own."""
    gate = Gate(token(shared))
    values = yaml.safe_load(run_file.read_text())
    values["credentials"] = shared.client().record()
    values["objective"] = {"kl_coefficient": 0.1}
    del values["servers"]
    file = tmp_path / "reference.yaml"
    with secured(shared, world, gate) as address:
        values["reference"] = address
        values["cluster"] = {"trainer": {"model": "absent"}, "rollout": {"senior_model": "absent"}}
        file.write_text(yaml.safe_dump(values))
        config = loading.load(RunSettings, file)
        # No server program, or no model, is there.
        with pytest.raises(TandemError):
            check_run(config)
    assert gate.shown
    assert set(gate.shown) == {f"Bearer {token(shared)}"}


def test_paths_of_a_section_start_at_the_files_folder(tmp_path):
    values = {
        "trainer": {
            "server": {
                "tls": {"ca_file": "certs/ca.crt", "require_client_certificate": True},
                "tokens": {"admin_file": "/run/admin"},
                "path_roots": ["runs", "/models"],
            }
        },
        "certs": "certs",
    }
    ClusterSettings.anchor(values, tmp_path)
    server = values["trainer"]["server"]
    assert server["tls"]["ca_file"] == str(tmp_path / "certs/ca.crt")
    assert server["tls"]["require_client_certificate"] is True
    assert server["tokens"]["admin_file"] == "/run/admin"
    assert server["path_roots"] == [str(tmp_path / "runs"), "/models"]
    assert values["certs"] == str(tmp_path / "certs")


def test_a_cluster_whose_tls_refuses_its_client_does_not_wait(own, foreign, world, tmp_path):
    """The start ends, though start_timeout_seconds would outlast the test."""
    with secured(own, world) as address:
        port = int(address.rpartition(":")[2])
        build = tmp_path / "bin"
        build.mkdir()
        script = build / "tandem-trainer-server"
        listening = json.dumps({"event": "listening", "grpc_port": port, "metrics_port": 1})
        script.write_text(f"#!/bin/sh\necho '{listening}'\nexec sleep 60\n")
        script.chmod(0o755)
        settings = ClusterSettings(
            trainer={}, directory=tmp_path / "cluster", start_timeout_seconds=3600
        )
        with (
            pytest.raises(ServerStartError, match="no authority in ca_file"),
            LocalCluster(settings, build_dir=tmp_path, credentials=with_ca(own, foreign)),
        ):
            pass


def test_certificates_of_the_command(tmp_path):
    directory = tmp_path / "certs"
    made = json.loads(
        tandem("certs", directory, "--host", "a.example", "--host", "10.0.0.1", "--json").stdout
    )
    assert made["environment"]["TANDEM_TOKEN_FILE"] == str(directory / "admin.token")
    assert made["settings"]["server"] == CertificateDirectory(directory).server()
    for path in [*made["settings"]["server"]["tls"].values(), *made["environment"].values()]:
        assert Path(path).stat().st_mode & 0o777 == 0o600
    tokens = {token(CertificateDirectory(directory), role) for role in certs.ROLES}
    assert len(tokens) == 3
    assert min(map(len, tokens)) >= 43
    names = subject_names(directory)
    assert names == ["a.example", "10.0.0.1", "localhost", "127.0.0.1", "::1"]

    contents = {one.name: one.read_bytes() for one in directory.iterdir()}
    refused = tandem("certs", directory, check=2)
    assert str(directory) in refused.stderr
    assert contents == {one.name: one.read_bytes() for one in directory.iterdir()}

    shown = tandem("certs", directory, "--renew", "--days", 5)
    assert "server:" in shown.stdout
    assert "export TANDEM_CA_FILE=" in shown.stdout
    changed = {one.name for one in directory.iterdir() if contents[one.name] != one.read_bytes()}
    assert changed == {"server.crt", "server.key", "client.crt", "client.key"}
    assert subject_names(directory) == names
    client = x509.load_pem_x509_certificate((directory / "client.crt").read_bytes())
    assert client.subject.rfc4514_string() == "CN=tandem-client"
    lives = client.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=4, hours=23) < lives <= datetime.timedelta(days=5)
    tandem("certs", directory, "--renew", "--host", "b.example", "--client", "somebody")
    assert "b.example" in subject_names(directory)
    assert "a.example" not in subject_names(directory)


def subject_names(directory):
    certificate = x509.load_pem_x509_certificate((directory / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in names]


def test_names_that_no_certificate_holds(tmp_path, subtests):
    for arguments, message in [
        (["--host", "bücher.example"], "--host 'bücher.example'"),
        (["--host", "a.example:7701"], "--host 'a.example:7701'"),
        (["--host", ""], "--host ''"),
        (["--client", ""], "--client ''"),
        (["--client", "n" * 65], "--client 'nnn"),
        (["--days", "99999999"], "--days 99999999"),
        (["--renew"], "ca.crt: No such file"),
    ]:
        with subtests.test(arguments=arguments, message=message):
            refused = tandem("certs", tmp_path / "certs", *arguments, check=2)
            assert message in refused.stderr
            assert not (tmp_path / "certs").exists()


def test_a_damaged_directory_is_not_renewed(own):
    Path(own.file("ca.key")).write_text("junk")
    with pytest.raises(ConfigError, match="damaged"):
        renew_certificates(own.path, Request())


def test_a_client_checks_the_name_of_the_server(own, world):
    """A server of the same authority under another name is refused."""
    authority = x509.load_pem_x509_certificate(read(own, "ca.crt"))
    key = serialization.load_pem_private_key(read(own, "ca.key"), None)
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    elsewhere = [x509.DNSName("elsewhere.example")]
    certificate, own_key = certs._issued("x", elsewhere, usages, 1, authority, key)
    tls = grpc.ssl_server_credentials([(own_key, certificate)])
    with (
        fakes.serve(world, credentials=tls) as address,
        Connection(address, credentials=own.client()) as connection,
    ):
        assert connection.check_health().reason.endswith(f"does not name the host of {address}")
