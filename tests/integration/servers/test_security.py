"""TLS, tokens and roles of the real servers: who is refused, how, and what that costs."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import harness
import pytest
import yaml
from commands import tandem
from credential_files import expired, read, tapped, token, with_ca
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from roles import ROLES, methods_of
from tandem import Credentials
from tandem.certs.authority import Request, make_certificates, renew_certificates
from tandem.cluster import registry
from tandem.cluster.local import LocalCluster
from tandem.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc,
)
from tandem.rpc.channel import open_channel
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.retry import ONCE
from tandem.rpc.transport import Connection
from tandem.settings.cluster import ClusterSettings

CLIENTS = {"rollout": RolloutClient, "trainer": TrainerClient, "critic": CriticClient}
UNKNOWN = "a-token-that-no-server-knows"
# Services of gRPC itself: health is for everybody, reflection for readers.
HEALTH = "grpc.health.v1.Health"
# A server looks every second whether files have changed.
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Certificates and tokens of the servers."""
    return make_certificates(tmp_path_factory.mktemp("own") / "certs", Request())


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Those of another authority."""
    return make_certificates(tmp_path_factory.mktemp("foreign") / "certs", Request())


@pytest.fixture(scope="module")
def secured(models, directory, tmp_path_factory):
    """A server of each kind, with TLS for both sides and tokens."""
    place = tmp_path_factory.mktemp("secured")
    with harness.cluster(place, models, trainer={}, critic={}, certs=directory.path) as running:
        yield running


def server_of(running, role):
    return running.rollouts[0] if role == "rollout" else getattr(running, role)


def credentials_without_token(directory):
    return Credentials(**directory.client().record() | {"token_file": None})


def credentials_with(directory, tmp_path, text):
    """Credentials of a client that shows the token `text`."""
    file = tmp_path / "shown.token"
    file.write_text(f"{text}\n")
    return Credentials(token_file=file).or_else(directory.client())


def metrics(server, directory, shown):
    """The text of the metrics port; `shown` is the authorization, None for none."""
    context = ssl.create_default_context(cafile=directory.file("ca.crt"))
    context.load_cert_chain(directory.file("client.crt"), directory.file("client.key"))
    request = urllib.request.Request(f"https://{server.metrics_address}/metrics")
    if shown is not None:
        request.add_header("authorization", shown)
    with urllib.request.urlopen(request, timeout=10, context=context) as reply:
        return reply.read().decode()


def denials(server, directory):
    """The number of denials by reason."""
    text = metrics(server, directory, f"Bearer {token(directory, 'reader')}")
    found = re.findall(r'^tandem_auth_denials_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


@pytest.mark.parametrize("role", CLIENTS)
def test_clients_with_certificate_and_token_are_served(secured, directory, role):
    server = server_of(secured, role)
    with CLIENTS[role](server.address, credentials=directory.client("reader")) as client:
        assert client.info().server.weights.version == 0
    assert server.describe()["metrics"].startswith("https://")


class Refused:
    """Clients that TLS refuses: their credentials, the explanation, and the counted reason."""

    @staticmethod
    def wrong_authority(own, foreign):
        return with_ca(own, foreign), "no authority in ca_file", "handshake_failed"

    @staticmethod
    def no_certificate(own, foreign):
        credentials = Credentials(own.file("ca.crt"), token_file=own.file("admin.token"))
        return credentials, "certificate_file is not set", "certificate_missing"

    @staticmethod
    def expired_certificate(own, foreign):
        key, certificate = (own.file(name) for name in expired(own, "client"))
        credentials = Credentials(certificate_file=certificate, private_key_file=key)
        reason = "may refuse certificate_file"
        return credentials.or_else(own.client()), reason, "certificate_refused"

    @staticmethod
    def foreign_certificate(own, foreign):
        return with_ca(foreign, own), "may refuse certificate_file", "certificate_refused"

    @staticmethod
    def plain_bytes(own, foreign):
        return Credentials(), "may require TLS, but ca_file is not set", "not_tls"

    @staticmethod
    def plain_bytes_with_a_token(own, foreign):
        credentials = Credentials(token_file=own.file("admin.token"))
        return credentials, "may require TLS, but ca_file is not set", "not_tls"


@pytest.mark.parametrize("case", [name for name in vars(Refused) if name[0] != "_"])
@pytest.mark.parametrize("role", CLIENTS)
def test_connections_that_tls_refuses_are_explained_and_counted(
    secured, directory, foreign, role, case
):
    credentials, explanation, reason = getattr(Refused, case)(directory, foreign)
    server = server_of(secured, role)
    before = denials(server, directory)
    with (
        CLIENTS[role](server.address, credentials=credentials, retry=ONCE) as client,
        pytest.raises(UnavailableError) as refused,
    ):
        client.info()
    assert explanation in refused.value.hint
    with Connection(server.address, credentials=credentials) as connection:
        health = connection.check_health()
    assert health.refused
    assert explanation in health.reason
    after = denials(server, directory)
    assert after.get(reason, 0) > before.get(reason, 0), after


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize("port", ["address", "metrics_address"])
@pytest.mark.parametrize("role", CLIENTS)
def test_versions_of_tls_before_1_2_are_refused(secured, directory, role, port):
    host, _, number = getattr(server_of(secured, role), port).rpartition(":")

    def shake_hands(version):
        context = ssl.create_default_context(cafile=directory.file("ca.crt"))
        context.load_cert_chain(directory.file("client.crt"), directory.file("client.key"))
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.set_ciphers("ALL:@SECLEVEL=0")  # without it OpenSSL does not offer 1.1
        context.minimum_version = context.maximum_version = version
        with socket.create_connection((host, int(number)), timeout=10) as connection:
            return context.wrap_socket(connection, server_hostname=host).version()

    assert shake_hands(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        shake_hands(ssl.TLSVersion.TLSv1_1)


def test_a_server_whose_certificate_expires_is_refused(models, tmp_path):
    made = make_certificates(tmp_path / "certs", Request())
    key, certificate = expired(made, "server", seconds=10)
    Path(made.file(key)).replace(made.file("server.key"))
    Path(made.file(certificate)).replace(made.file("server.crt"))
    with harness.cluster(tmp_path / "cluster", models, certs=made.path) as running:
        server = running.rollouts[0]

        def is_explained():
            with Connection(server.address, credentials=made.client()) as connection:
                return "server's certificate has expired" in connection.check_health().reason

        assert not is_explained()
        harness.wait_until(is_explained, PATIENCE_SECONDS)
        renew_certificates(made.path, Request())

        def serves():
            with Connection(server.address, credentials=made.client()) as connection:
                return connection.health() == "SERVING"

        harness.wait_until(serves, PATIENCE_SECONDS)


def services(server, directory):
    """The services that a server offers, by reflection."""
    channel = open_channel(server.address, directory.client("reader"), [])
    names = ProtoReflectionDescriptorDatabase(channel).get_services()
    channel.close()
    return sorted(names)


def every_method(server, directory):
    """The role of every method of a server but health, by path."""
    found = {}
    for service in services(server, directory):
        if service.startswith("grpc.reflection."):
            found[f"/{service}/ServerReflectionInfo"] = "reader"
        elif service != HEALTH:
            found |= methods_of(service)
    return found


def status_of(address, path, credentials):
    """How a call with one empty message ends, as a typed exception; None: it gives an answer."""
    channel = open_channel(address, credentials, [])
    try:
        next(channel.stream_stream(path)(iter([b""]), timeout=5))
    except StopIteration:
        return None
    except grpc.RpcError as error:
        return from_rpc(error, request_id="", method=path, address=address)
    finally:
        channel.close()
    return None


@pytest.mark.parametrize("role", CLIENTS)
def test_every_method_is_refused_without_a_token_of_its_role(secured, directory, tmp_path, role):
    server = server_of(secured, role)
    methods = every_method(server, directory)
    assert set(methods.values()) == set(ROLES)
    assert any(path.startswith("/tandem.") for path in methods)
    without = credentials_without_token(directory)
    unknown = credentials_with(directory, tmp_path, UNKNOWN)
    for path, needed in methods.items():
        missing = status_of(server.address, path, without)
        assert isinstance(missing, UnauthenticatedError), path
        assert missing.reason == "TOKEN_MISSING", path
        wrong = status_of(server.address, path, unknown)
        assert isinstance(wrong, UnauthenticatedError), path
        assert wrong.reason == "TOKEN_UNKNOWN", path
        for shown in ROLES[: ROLES.index(needed)]:
            small = status_of(server.address, path, directory.client(shown))
            assert isinstance(small, PermissionDeniedError), (path, shown)
            assert not isinstance(small, UnauthenticatedError), (path, shown)
            assert small.reason == "INSUFFICIENT_ROLE", (path, shown)
            assert needed in small.message, (path, shown)
        for error in (missing, wrong):
            assert error.hint, path
            assert UNKNOWN not in str(error.describe())


@pytest.mark.parametrize("role", CLIENTS)
def test_every_method_takes_a_token_of_its_role(secured, directory, role):
    """An empty message is no good request, but the role is good."""
    server = server_of(secured, role)
    for path, needed in every_method(server, directory).items():
        for shown in ROLES[ROLES.index(needed) :]:
            status = status_of(server.address, path, directory.client(shown))
            assert not isinstance(status, PermissionDeniedError), (path, shown, str(status))
    if role == "rollout":
        with RolloutClient(server.address, credentials=directory.client()) as client:
            client.resume()  # The loop has paused it.


@pytest.mark.parametrize("role", CLIENTS)
def test_health_needs_no_token(secured, directory, role):
    address = server_of(secured, role).address
    channel = open_channel(address, credentials_without_token(directory), [])
    stub = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == serving
    watched = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
    assert next(watched).status == serving
    watched.cancel()
    channel.close()


@pytest.mark.parametrize("role", CLIENTS)
def test_the_metrics_port_asks_for_a_token_of_any_role(secured, directory, role):
    server = server_of(secured, role)
    for shown in ROLES:
        assert "tandem_" in metrics(server, directory, f"Bearer {token(directory, shown)}")
    for wrong in (None, "Bearer", f"Bearer {UNKNOWN}", token(directory)):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            metrics(server, directory, wrong)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        harness.metrics_text(server)


@pytest.mark.parametrize("role", CLIENTS)
def test_denials_are_counted_and_no_secret_is_shown(secured, directory, tmp_path, role):
    server = server_of(secured, role)
    path = next(p for p, needed in every_method(server, directory).items() if needed == "admin")
    before = denials(server, directory)
    status_of(server.address, path, credentials_without_token(directory))
    status_of(server.address, path, credentials_with(directory, tmp_path, UNKNOWN))
    status_of(server.address, path, directory.client("reader"))
    after = denials(server, directory)
    for reason in ("token_missing", "token_unknown", "insufficient_role"):
        assert after[reason] >= before.get(reason, 0) + 1, after
    text = metrics(server, directory, f"Bearer {token(directory)}")
    log = server.log.read_text()
    assert "PERMISSION_DENIED" in log
    assert "UNAUTHENTICATED" in log
    for secret in (UNKNOWN, *(token(directory, one) for one in ROLES)):
        assert secret not in text
        assert secret not in log


def test_tokens_do_not_travel_in_the_clear(secured, directory):
    with (
        tapped(secured.rollouts[0].address) as (address, seen),
        RolloutClient(address, credentials=directory.client()) as client,
    ):
        client.info()
        client.score([([5, 6, 7], 1)])
    assert len(seen) > 500
    assert token(directory).encode() not in seen


def test_tokens_work_on_this_machine_without_tls(models, directory, tmp_path):
    tokens = {"server": {"tokens": {"admin_file": directory.file("admin.token")}}}
    with harness.cluster(tmp_path, models, rollout=tokens) as running:
        address = running.rollouts[0].address
        shown = Credentials(token_file=directory.file("admin.token"))
        with RolloutClient(address, credentials=shown) as client:
            client.info()
        with (
            RolloutClient(address, credentials=Credentials()) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.info()


def test_tls_alone_needs_tokens_or_certificates_of_clients(models, directory, tmp_path):
    """The metrics port asks for what the gRPC port asks for."""
    tls = directory.server()["tls"]
    no_authority = {name: path for name, path in tls.items() if name != "ca_file"}
    tokens = {"server": {"tls": no_authority, "tokens": directory.server()["tokens"]}}
    section = harness.sections(models, rollout=tokens)
    user = Credentials(directory.file("ca.crt"), token_file=directory.file("user.token"))
    config = ClusterSettings(directory=tmp_path / "tokens", **section)
    with LocalCluster(config, credentials=user) as running:
        assert harness.rollout_client(running).info().server.role == "rollout"
        text = metrics(running.rollouts[0], directory, f"Bearer {token(directory, 'user')}")
        assert "tandem_" in text
    section = harness.sections(models, rollout={"server": {"tls": tls}})
    config = ClusterSettings(directory=tmp_path / "certificates", **section)
    with LocalCluster(config, credentials=credentials_without_token(directory)) as running:
        assert harness.rollout_client(running).info().server.role == "rollout"
        [server] = running.rollouts
        assert "tandem_" in metrics(server, directory, None)
        context = ssl.create_default_context(cafile=directory.file("ca.crt"))
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            url = f"https://{server.metrics_address}/metrics"
            urllib.request.urlopen(url, timeout=10, context=context)


def test_every_rank_has_tls_and_tokens(models, directory, tmp_path):
    ranks = {"strategy": {"name": "zero"}, "ranks": 2}
    with harness.cluster(tmp_path / "cluster", models, trainer=ranks, certs=directory.path) as two:
        assert len(harness.run_on(two, models, tmp_path, steps=1)) == 1
        for server in two.servers:
            assert "tandem_" in metrics(server, directory, f"Bearer {token(directory, 'reader')}")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                metrics(server, directory, None)


def replace_tokens(directory, *lines):
    """Replaces the admin's tokens in one step."""
    file = Path(directory.file("admin.token"))
    new = file.with_name("new.token")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(file)


def test_rotation_under_load_loses_no_call(models, tmp_path):
    """Certificates and tokens of servers and clients change twice while calls go on."""
    made = make_certificates(tmp_path / "certs", Request())
    done = threading.Event()
    counts = []
    with harness.cluster(
        tmp_path / "cluster", models, trainer={}, critic={}, certs=made.path
    ) as running:
        addresses = [server_of(running, role).address for role in CLIENTS]
        # The clients' own copy: servers know a new token before clients show it.
        shown = tmp_path / "client.token"
        shown.write_bytes(read(made, "admin.token"))
        credentials = Credentials(token_file=shown).or_else(made.client())
        options = {"credentials": credentials, "retry": ONCE}
        rollout, trainer, critic = (
            kind(address, **options)
            for kind, address in zip(CLIENTS.values(), addresses, strict=True)
        )

        def load(work):
            count = 0
            while not done.is_set():
                work()
                count += 1
            counts.append(count)

        def publish():
            reply = trainer.publish_weights([running.rollouts[0].address], allow_rollback=True)
            assert [result.status.code for result in reply.results] == [0], reply

        prompts = harness.prompts(4, harness.TANDEM["word"])
        works = [
            lambda: rollout.generate(prompts),
            rollout.info,
            lambda: rollout.score([([5, 6, 7, 8], 1)]),
            publish,
            critic.info,
        ]

        def knows(text):
            """Whether every server takes a token."""
            own = credentials_with(made, tmp_path, text)
            for kind, address in zip(CLIENTS.values(), addresses, strict=True):
                with kind(address, credentials=own, retry=ONCE) as client:
                    try:
                        client.info()
                    except UnauthenticatedError:
                        return False
            return True

        def served_certificates():
            pems = []
            for address in addresses:
                host, _, port = address.rpartition(":")
                pems.append(ssl.get_server_certificate((host, int(port))))
            return pems

        with ThreadPoolExecutor(len(works)) as threads:
            running_works = [threads.submit(load, work) for work in works]
            try:
                for number in range(2):
                    old, new = token(made), f"the-new-token-number-{number}"
                    replace_tokens(made, old, new)
                    harness.wait_until(lambda new=new: knows(new), PATIENCE_SECONDS)
                    shown.with_suffix(".new").write_text(f"{new}\n")
                    shown.with_suffix(".new").replace(shown)
                    replace_tokens(made, new)
                    harness.wait_until(lambda old=old: not knows(old), PATIENCE_SECONDS)
                    before = served_certificates()
                    renew_certificates(made.path, Request())
                    harness.wait_until(
                        lambda before=before: not set(before) & set(served_certificates()),
                        PATIENCE_SECONDS,
                    )
            finally:
                done.set()
            for work in running_works:
                work.result()
        for client in (rollout, trainer, critic):
            client.info()
            client.close()
    assert min(counts) > 3


def test_paths_outside_of_the_roots_are_refused(models, directory, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for one in (inside, outside):
        one.mkdir()
    (inside / "link").symlink_to(outside)
    section = {"server": {"path_roots": [str(inside)]}}
    with harness.cluster(
        tmp_path / "cluster", models, trainer=section, critic=section, certs=directory.path
    ) as running:
        for client in (harness.trainer_client(running), harness.critic_client(running)):
            saved = Path(client.save_checkpoint(str(inside), client.role))
            assert saved.parent == inside
            client.load_checkpoint(str(saved))
            written = client.export_model(str(inside / f"{client.role}-export"))
            assert Path(written, "config.json").exists()
            for place in (outside, inside / "link", inside / ".." / "outside", Path("/proc")):
                for call, *arguments in (
                    (client.save_checkpoint, str(place), "a"),
                    (client.load_checkpoint, str(place / "a")),
                    (client.export_model, str(place / "a")),
                ):
                    with pytest.raises(PermissionDeniedError) as refused:
                        call(*arguments)
                    assert refused.value.reason == "PATH_OUTSIDE_ROOTS", place
                    assert refused.value.field in ("path", "directory")
            with pytest.raises(NotFoundError):
                client.load_checkpoint(str(inside / "absent"))
            client.close()
    assert list(outside.iterdir()) == []


def results_of(models, place, certs):
    """Metrics, digests and tensors of a run on servers of its own."""
    with harness.cluster(place / "cluster", models, trainer={}, certs=certs) as running:
        metrics_lines = harness.run_on(running, models, place)
        with harness.trainer_client(running) as trainer:
            held = trainer.info().server.weights
    run = place / "run"
    lines = harness.json_lines(run / "versions.jsonl")
    versions = [(one["version"], one["digest"]) for one in lines]
    tensors = (run / "checkpoints" / "step_000003" / "model.safetensors").read_bytes()
    return metrics_lines, versions, (held.version, held.digest), tensors


def test_a_run_over_tls_with_tokens_has_the_bits_of_one_without(models, directory, tmp_path):
    plain = results_of(models, tmp_path / "plain", None)
    secure = results_of(models, tmp_path / "secure", directory.path)
    assert len(plain[0]) == 3
    assert plain == secure
    for file in (tmp_path / "secure").rglob("*"):
        if file.is_file():
            assert token(directory).encode() not in file.read_bytes(), file


def test_commands_take_the_credentials_of_the_cluster_that_runs(
    secured, directory, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with registry.announced(secured):
        shown = json.loads(tandem("status", "--json").stdout)["servers"]
        assert [one["health"] for one in shown] == ["SERVING"] * 3
        assert all("version" in one for one in shown)
        tandem("score", "one two three")
        record = next((tmp_path / "state").rglob("*.json")).read_text()
    assert directory.file("admin.token") in record
    assert token(directory) not in record


def test_a_reader_looks_and_a_user_computes(secured, directory, models, tmp_path):
    """No command needs a larger role than docs/operations/security.md says."""
    config = harness.run_settings(tmp_path, models, secured, eval={"modes": ["solo"]})
    values = config.model_dump(mode="json", exclude_none=True)
    file = tmp_path / "run.yaml"
    addresses = [
        word for role in CLIENTS for word in (f"--{role}", server_of(secured, role).address)
    ]
    options = {
        role: [
            word
            for name, path in directory.client(role).record().items()
            for word in (f"--{name.replace('_', '-')}", path)
        ]
        for role in ROLES
    }
    shown = json.loads(tandem("status", "--json", *addresses, *options["reader"]).stdout)
    assert all("version" in one for one in shown["servers"])
    tandem("generate", "one", *addresses[:2], *options["reader"], check=1)
    tandem("generate", "one", *addresses[:2], *options["user"])
    for role in ("reader", "user"):
        values["credentials"] = directory.client(role).record()
        file.write_text(yaml.safe_dump(values))
        printed = tandem("eval", file, check=0 if role == "user" else 1)
    assert "accuracy" in printed.stdout
    assert "INSUFFICIENT_ROLE" in tandem("train", file, check=1).stderr


def test_a_dry_run_checks_a_cluster_with_certificates(models, directory, tmp_path):
    """The servers' --check-config reads certificates and tokens, too."""
    cluster = harness.sections(models, trainer={}, critic={}) | {"certs": directory.path}
    config = harness.run_settings(tmp_path, models, None, cluster=cluster)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    shown = tandem("train", file, "--dry-run").stdout
    assert directory.file("server.crt") in shown
    assert token(directory) not in shown
    absent = "{certificate_file: /absent, private_key_file: /absent}"
    refused = tandem("train", file, "--dry-run", f"cluster.trainer.server.tls={absent}", check=2)
    assert "cluster.trainer: server.tls.certificate_file" in refused.stderr
