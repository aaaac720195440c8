"""Containers of the images under test, through podman's command line."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[2]
SERVERS = ("rollout", "trainer", "critic")
# gRPC and metrics ports of the servers.
PORTS = {"rollout": (7701, 9701), "trainer": (7702, 9702), "critic": (7703, 9703)}
TARGETS = (*SERVERS, "client", "demo-model")
BASE = "localhost/debian:12-slim"
BILL = "/usr/share/tandem/sbom.cdx.json"
USER = "65532"
# Options that every image must run with.
RESTRICTED = (
    "--read-only",
    # podman would put memory file systems over /tmp and /run; docker does not.
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
)

Result = TypeVar("Result")


def image(target: str) -> str:
    """Returns the name of the image that run.sh built from a target."""
    return f"{os.environ.get('IMAGES', 'tandem')}-{target}:{os.environ.get('TAG', '0.1.0')}"


def podman(
    *arguments: str, check: bool = True, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs podman; CalledProcessError has its output as a note."""
    command = ["podman", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command)
        error.add_note(done.stdout + done.stderr)
        raise error
    return done


def run_in(name: str, program: str, *arguments: str) -> str:
    """Runs a program of an image, restricted as in production; returns its standard output."""
    return podman("run", "--rm", *RESTRICTED, "--entrypoint", program, name, *arguments).stdout


@contextmanager
def mounted(name: str) -> Iterator[Path]:
    """Yields the folder with the files of an image."""
    folder = podman("image", "mount", name).stdout.strip()
    try:
        yield Path(folder)
    finally:
        podman("image", "unmount", name)


def configuration(name: str) -> dict[str, Any]:
    """Returns the configuration of an image: user, entry point, labels and so on."""
    [described] = json.loads(podman("image", "inspect", name).stdout)
    return described["Config"] | {"Healthcheck": described.get("Healthcheck")}


def packages(name: str) -> dict[str, str]:
    """Returns the versions of the Debian packages in an image."""
    form = "${Package}\t${Version}\n"
    listed = run_in(name, "dpkg-query", "--show", f"--showformat={form}")
    return dict(line.split("\t") for line in listed.splitlines())


def package_list(file: Path) -> set[str]:
    """Returns the entries of a list of packages, without its comments."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return {line for line in lines if line}


@dataclass(frozen=True)
class Container:
    """A container that was started."""

    name: str

    def inspect(self) -> dict[str, Any]:
        """Returns what podman says about the container."""
        [described] = json.loads(podman("container", "inspect", self.name).stdout)
        return described

    def state(self) -> dict[str, Any]:
        """Returns the container's state: Status, ExitCode and so on."""
        return self.inspect()["State"]

    def logs(self) -> str:
        """Returns what the container wrote to standard output and standard error."""
        done = podman("logs", self.name)
        return done.stdout + done.stderr

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container."""
        return podman("exec", self.name, *command, check=check)

    def address(self, port: int) -> str:
        """Returns the address on this machine of a port that the container publishes."""
        return podman("port", self.name, str(port)).stdout.strip()

    def healthy(self) -> bool:
        """Runs the image's health check once."""
        return podman("healthcheck", "run", self.name, check=False).returncode == 0

    def wait_healthy(self, seconds: float = 120) -> None:
        """Waits until the health check succeeds; fails if the container ends before."""

        def check() -> bool:
            state = self.state()
            assert state["Status"] == "running", f"{state}\n{self.logs()}"
            return self.healthy()

        wait_for(check, seconds, lambda: f"{self.name} is not healthy\n{self.logs()}")

    def wait(self, seconds: float = 600) -> int:
        """Waits for the container's end; returns its exit code."""
        return int(podman("wait", self.name, timeout=seconds).stdout)


@contextmanager
def container(target: str, *options: str, command: Sequence[str] = ()) -> Iterator[Container]:
    """Starts a container of an image, restricted as in production; removes it at the end."""
    started = podman("run", "--detach", *RESTRICTED, *options, image(target), *command)
    one = Container(started.stdout.strip().splitlines()[-1])
    try:
        yield one
    finally:
        podman("rm", "--force", "--volumes", "--time", "5", one.name)


def wait_for(
    condition: Callable[[], Result],
    seconds: float,
    failure: Callable[[], str] = lambda: "it did not happen",
) -> Result:
    """Waits until a condition returns something true, and returns that."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{failure()} (after {seconds:g} s)"
        time.sleep(0.5)
    return result
