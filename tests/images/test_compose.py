"""The compose files, read for every profile, and brought up: demo, killed trainer, drain, TLS."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine
import pytest
import yaml
from engine import REPOSITORY

COMPOSE = REPOSITORY / "deploy/compose"
PLAIN = ("compose.yaml",)
TLS = ("compose.yaml", "compose.tls.yaml")
PROFILES = {
    "cpu": {"rollout", "trainer"},
    "critic": {"rollout", "trainer-with-critic", "critic"},
    "ranks": {"rollout", "trainer-0", "trainer-1"},
    "gpu": {"rollout-gpu", "trainer-gpu"},
    "gpu-critic": {"rollout-gpu", "trainer-gpu-with-critic", "critic-gpu"},
    "gpu-node": {*(f"rollout-node-{gpu}" for gpu in range(4)), "trainer-node"},
    "demo": {"demo-model", "demo-rollout", "demo-trainer", "demo"},
    "client": {"client"},
    "monitoring": {"prometheus", "alertmanager", "grafana"},
}
ALL = set().union(*PROFILES.values())
# Seconds of a run of two steps on a busy machine of two cores.
PATIENCE = 900


@dataclass(frozen=True)
class Project:
    """Compose files under a project's name, with values of their variables."""

    name: str
    files: Sequence[str] = PLAIN
    variables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, timeout: float = PATIENCE) -> str:
        """Runs podman-compose; returns its standard output."""
        command = [
            str(REPOSITORY / ".venv/bin/podman-compose"),
            f"--project-name={self.name}",
            *(f"--file={COMPOSE / file}" for file in self.files),
            *arguments,
        ]
        # The variables of the environment win over a file .env, which stays unread.
        done = subprocess.run(
            command,
            cwd=COMPOSE,
            env=os.environ | {"IMAGES": "", "TAG": ""} | self.variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def services(self, *profiles: str) -> dict[str, Any]:
        """Returns the services of profiles, resolved."""
        options = [f"--profile={profile}" for profile in profiles]
        return yaml.safe_load(self(*options, "config"))["services"]

    def container(self, service: str) -> engine.Container:
        """Returns the container of a service."""
        return engine.Container(f"{self.name}_{service}_1")


def is_server(service: Mapping[str, Any]) -> bool:
    """Returns whether a service is a server of Tandem."""
    return "TANDEM_CONFIG" in service.get("environment", {})


@pytest.fixture(scope="module", params=[PLAIN, TLS], ids=["plain", "tls"])
def files(request: pytest.FixtureRequest) -> Sequence[str]:
    """The compose files that are given together."""
    return request.param


def test_every_profile_resolves_to_its_services(files: Sequence[str]):
    project = Project("tandem", files)
    for profile, services in PROFILES.items():
        assert project.services(profile).keys() == services
    everything = project.services(*PROFILES)
    assert everything.keys() == ALL
    assert not project.services().keys()


def test_every_folder_and_file_that_is_mounted_exists(files: Sequence[str]):
    volumes = set(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"])
    if files == TLS:
        volumes |= set(yaml.safe_load((COMPOSE / "compose.tls.yaml").read_text())["volumes"])
    for name, service in Project("tandem", files).services(*PROFILES).items():
        folders = {}
        for mount in service.get("volumes", []):
            source, target = mount.split(":")[:2]
            assert source in volumes or (COMPOSE / source).exists(), f"{name}: {mount}"
            folders[target] = COMPOSE / source
        for argument in service.get("command", []):
            if argument.startswith("--config.file="):
                file = Path(argument.partition("=")[2])
                [found] = {
                    folders[one] / file.relative_to(one)
                    for one in folders
                    if file.is_relative_to(one)
                }
                assert found.is_file(), f"{name}: {argument}"


def test_every_service_is_restricted(files: Sequence[str]):
    for name, service in Project("tandem", files).services(*PROFILES).items():
        assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if is_server(service):
            assert service["mem_limit"], name
            drain = int(service["environment"]["TANDEM__SERVER__DRAIN_SECONDS"])
            assert _seconds(service["stop_grace_period"]) > drain, name


def _seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def test_tls_reaches_every_server_and_client():
    for name, service in Project("tandem", TLS).services(*PROFILES).items():
        environment = service.get("environment", {})
        if is_server(service):
            assert environment["TANDEM__SERVER__INSECURE"] == "false", name
            assert environment["TANDEM__SERVER__TLS__CERTIFICATE_FILE"], name
        elif "tandem-client" in service["image"]:
            assert environment["TANDEM_CA_FILE"], name


def test_the_example_of_variables_has_all_of_them_with_their_defaults():
    texts = [(COMPOSE / file).read_text() for file in TLS]
    used = {found for text in texts for found in re.findall(r"\$\{(\w+):-([^}]*)\}", text)}
    assert not re.search(r"\$\{\w+\}|\$\w", "".join(texts))
    lines = engine.package_list(COMPOSE / "example.env")
    assert used == {tuple(line.split("=", 1)) for line in lines}


def test_the_images_of_the_build_file_are_those_of_the_compose_file():
    targets = set(
        re.findall(r"^FROM .* AS (\S+)", (REPOSITORY / "docker/Dockerfile").read_text(), re.M)
    )
    for name, service in Project("tandem").services(*PROFILES).items():
        if "build" in service:
            target = service["build"]["target"]
            assert target in targets, name
            assert service["image"].split(":")[0] == f"tandem-{target}", name


def _free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """The servers of the demo, brought up; everything is taken down at the end."""
    images = {"IMAGES": os.environ["IMAGES"], "TAG": os.environ["TAG"]}
    programs = ("ROLLOUT", "TRAINER", "CRITIC", "PROMETHEUS", "ALERTMANAGER")
    ports = {f"{name}_PORT": _free_port() for name in programs}
    one = Project(
        f"test{secrets.token_hex(3)}",
        variables=images | ports | {"DEMO_STEPS": "2", "ROLLOUT_MEMORY": "3g"},
    )
    try:
        # Where there is no systemd podman runs no health checks by itself, which the job waits for.
        servers = ("demo-rollout", "demo-trainer")
        one("--profile=demo", "up", "--detach", *servers)
        for service in servers:
            one.container(service).wait_healthy(PATIENCE)
        yield one
    finally:
        used = ("demo", "cpu", "ranks", "monitoring")
        for service in set().union(*(PROFILES[profile] for profile in used)):
            engine.podman("rm", "--force", "--volumes", one.container(service).name, check=False)
        one(*(f"--profile={profile}" for profile in used), "down", "--volumes")


def read_run(project: Project, file: str) -> str:
    """Returns a file of the volume with the runs."""
    volume = f"--volume={project.name}_runs:/runs:ro"
    with engine.container("client", volume, "--entrypoint=cat", command=[f"/runs/{file}"]) as job:
        job.wait()
        return job.logs()


def steps(project: Project, run: str) -> list[int]:
    """Returns the steps in a run's metrics."""
    lines = read_run(project, f"{run}/metrics.jsonl").splitlines()
    return [json.loads(line)["step"] for line in lines if line.startswith("{")]


def test_every_server_takes_its_environment(project: Project):
    """Every setting that the compose files name is one of the server's."""
    assert project.container("demo-model").wait() == 0
    for name, service in project.services(*PROFILES).items():
        if not is_server(service) or "cuda" in service["image"]:
            continue
        environment = [f"--env={key}={value}" for key, value in service["environment"].items()]
        config = service["volumes"][0].split(":")
        volumes = [
            f"--volume={COMPOSE / config[0]}:{config[1]}:ro",
            f"--volume={project.name}_models:/models:ro",
        ]
        target = service["build"]["target"]
        with engine.container(target, *environment, *volumes, command=["--check-config"]) as job:
            code, logs = job.wait(), job.logs()
            # A machine with little memory left knows the settings, too.
            assert code == 0 or "GB are available" in logs, f"{name}: {logs}"
            assert 'host: "0.0.0.0"' in logs


def test_the_demo_makes_its_steps(project: Project):
    project("--profile=demo", "up", "--detach", "demo")
    demo = project.container("demo")
    assert demo.wait(PATIENCE) == 0, demo.logs()
    assert steps(project, "demo") == [1, 2]
    evaluated = [json.loads(line) for line in read_run(project, "demo/evals.jsonl").splitlines()]
    assert {line["step"] for line in evaluated} == {0, 2}


def test_the_metrics_of_the_servers_can_be_scraped_in_the_network(project: Project):
    script = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    for target in ("rollout", "trainer"):
        url = f"http://{target}:{engine.PORTS[target][1]}/metrics"
        options = [f"--network={project.name}_tandem", "--entrypoint=python"]
        with engine.container("client", *options, command=["-c", script, url]) as job:
            assert job.wait() == 0, job.logs()
            assert re.search(rf'^tandem_server_info{{.*role="{target}".*}} 1', job.logs(), re.M)
            assert re.search(r"^tandem_server_ready 1", job.logs(), re.M)


def test_stop_drains_the_servers(project: Project):
    """The servers of the demo are gone afterwards."""
    project("--profile=demo", "stop")
    for service in ("demo-rollout", "demo-trainer"):
        one = project.container(service)
        state = one.state()
        assert (state["Status"], state["ExitCode"]) == ("exited", 0), one.logs()


def train(project: Project, *further: str) -> list[str]:
    """Returns podman's options and the command of a run of four steps, saved after each."""
    return [
        f"--network={project.name}_tandem",
        f"--volume={project.name}_models:/models:ro",
        f"--volume={project.name}_runs:/runs",
        f"--volume={REPOSITORY / 'examples'}:/examples:ro",
        engine.image("client"),
        "train",
        "/examples/sums/run.yaml",
        "cluster=null",
        "tokenizer=/models/SmolLM2-135M-Instruct",
        "run_dir=/runs/killed",
        "servers.rollout=[rollout:7701]",
        "servers.trainer=trainer:7702",
        "steps=4",
        "checkpoint.every=1",
        "batch.prompts_per_step=2",
        "eval.every=0",
        *further,
    ]


def test_a_killed_trainer_is_restarted_and_the_run_goes_on(project: Project):
    # Not the servers of the demo: podman does not start a container again if one that it depends
    # on has ended, as the job demo-model has.
    project("--profile=cpu", "up", "--detach")
    trainer = project.container("trainer")
    for one in (trainer, project.container("rollout")):
        one.wait_healthy(PATIENCE)
    before = trainer.inspect()
    for attempt in ("--clean", "--resume"):
        started = engine.podman("run", "--detach", *engine.RESTRICTED, *train(project, attempt))
        run = engine.Container(started.stdout.strip().splitlines()[-1])
        try:
            if attempt == "--clean":
                engine.wait_for(lambda: 2 in steps(project, "killed"), PATIENCE)
                # The process, as a crash would: a container that `podman kill` ends stays down.
                os.kill(trainer.state()["Pid"], signal.SIGKILL)
            code = run.wait(PATIENCE)
            logs = run.logs()
        finally:
            engine.podman("rm", "--force", "--volumes", run.name)
        if code == 0:
            break
        # The supervisor has started the trainer again; the run goes on after its last checkpoint.
        engine.wait_for(lambda: trainer.state()["Status"] == "running", 60)
        trainer.wait_healthy()
    assert code == 0, logs
    assert trainer.inspect()["RestartCount"] > before["RestartCount"]
    assert steps(project, "killed") == [1, 2, 3, 4]


def _ask(project: Project, program: str, path: str) -> Any:
    """Returns the JSON answer of Prometheus or Alertmanager; None if there is none yet."""
    port = project.variables[f"{program}_PORT"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return json.load(reply)
    except (OSError, http.client.HTTPException):
        return None


def test_prometheus_scrapes_the_servers_and_alertmanager_has_its_alert(project: Project):
    """Grafana is not brought up: Debian has no package of it."""
    project("--profile=demo", "stop")
    project("--profile=cpu", "up", "--detach")
    rollout = project.container("rollout")
    for one in (rollout, project.container("trainer")):
        one.wait_healthy(PATIENCE)
    project("--profile=monitoring", "up", "--detach", "prometheus", "alertmanager")

    def values(query: str) -> dict[str, float]:
        path = f"/api/v1/query?query={urllib.parse.quote(query)}"
        found = _ask(project, "PROMETHEUS", path) or {"data": {"result": []}}
        return {one["metric"]["server"]: float(one["value"][1]) for one in found["data"]["result"]}

    engine.wait_for(lambda: values("tandem_server_ready").keys() == {"rollout", "trainer"}, 120)

    # Another process takes the memory of the rollout server's container.
    available = values("tandem_available_memory_bytes")["rollout"]
    resident = values("process_resident_memory_bytes")["rollout"]
    size = int(available - 0.02 * (available + resident))
    hold = f"head -c {size} /dev/zero | tail -c {size} | sleep 1000"
    engine.podman("exec", "--detach", rollout.name, "sh", "-c", hold)

    def alerts() -> set[tuple[str, str]]:
        found = _ask(project, "ALERTMANAGER", "/api/v2/alerts") or []
        return {(one["labels"]["alertname"], one["labels"]["server"]) for one in found}

    engine.wait_for(lambda: ("TandemMemoryShort", "rollout") in alerts(), 400)
    project("--profile=monitoring", "stop")


def test_a_trainer_of_two_ranks_serves_and_drains(project: Project):
    for profile in ("demo", "cpu"):
        project(f"--profile={profile}", "stop")
    # The job brings the model, if this test runs alone.
    project("--profile=demo", "up", "--detach", "demo-model")
    assert project.container("demo-model").wait() == 0
    ranks = ("trainer-0", "trainer-1")
    project("--profile=ranks", "up", "--detach", *ranks)
    for service in ranks:
        project.container(service).wait_healthy(PATIENCE)
    # SIGTERM to rank 0 ends both.
    engine.podman("kill", "--signal=TERM", project.container("trainer-0").name)
    for service in ranks:
        assert project.container(service).wait(PATIENCE) == 0, project.container(service).logs()


def test_a_cluster_with_tls_turns_strangers_away():
    """Certificates are made by the job `certs`; a client without them is refused."""
    images = {"IMAGES": os.environ["IMAGES"], "TAG": os.environ["TAG"]}
    ports = {f"{name}_PORT": _free_port() for name in ("ROLLOUT", "TRAINER", "CRITIC")}
    project = Project(f"test{secrets.token_hex(3)}", TLS, images | ports)
    network = f"--network={project.name}_tandem"
    certificates = f"--volume={project.name}_certs:/certs:ro"
    try:
        project("--profile=certs", "up", "--detach")
        assert project.container("certs").wait() == 0, project.container("certs").logs()
        project("--profile=demo", "up", "--detach", "demo-rollout", "demo-trainer")
        client = project.services("client")["client"]["environment"]
        environment = [f"--env={key}={value}" for key, value in client.items()]
        for service, address in (
            ("demo-rollout", "rollout:7701"),
            ("demo-trainer", "trainer:7702"),
        ):
            project.container(service).wait_healthy(PATIENCE)
            role = address.split(":")[0]
            status = ["status", f"--{role}={address}"]
            with engine.container(
                "client", network, certificates, *environment, command=status
            ) as job:
                assert job.wait() == 0, job.logs()
                assert "SERVING" in job.logs()
            with engine.container("client", network, command=status) as job:
                assert job.wait() == 3, job.logs()
    finally:
        for service in (*PROFILES["demo"], "certs"):
            engine.podman(
                "rm", "--force", "--volumes", project.container(service).name, check=False
            )
        project("--profile=demo", "--profile=certs", "down", "--volumes")
