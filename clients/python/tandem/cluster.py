"""A local cluster: the servers as plain processes of this machine.

with LocalCluster(ClusterSettings(rollout=[{...}], trainer={...})) as cluster:
    TrainerClient(cluster.trainer.address)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from tandem.errors import ConfigError, ServerStartError
from tandem.run_dir import next_attempt
from tandem.settings import ClusterSettings
from tandem.transport import Connection

BUILD_DIR_VARIABLE = "TANDEM_BUILD_DIR"
_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass
class Server:
    """One running server process."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    host: str
    address: str = ""
    metrics_address: str = ""

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process.poll() is None

    def describe(self) -> dict[str, Any]:
        """For status lines and `--json`."""
        return {
            "name": self.name,
            "role": self.role,
            "address": self.address,
            "metrics": f"http://{self.metrics_address}/metrics",
            "pid": self.process.pid,
            "log": str(self.log),
        }


class LocalCluster:
    """Starts servers, waits until they serve, and stops them again.

    The critic starts first, and the trainer is told its address unless its section names one.
    Servers get SIGTERM at the end (they drain), SIGKILL after `stop_timeout_seconds`, and die with
    this process whatever happens to it (where util-linux is installed).
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        build_dir: Path | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.servers: list[Server] = []
        self._build_dir = build_dir
        self._directory = Path()
        # "Dies with its parent" means the thread that started it: ours lives until stop().
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="cluster")
        self._say = on_progress or (lambda _: None)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def rollouts(self) -> list[Server]:
        """The rollout servers."""
        return [server for server in self.servers if server.role == "rollout"]

    @property
    def trainer(self) -> Server:
        """The trainer."""
        return self._only("trainer")

    @property
    def critic(self) -> Server:
        """The critic."""
        return self._only("critic")

    def has(self, role: str) -> bool:
        """Whether a server of this role was started."""
        return any(server.role == role for server in self.servers)

    def start(self) -> None:
        """Starts every configured server and waits until all of them serve.

        Raises:
            ServerStartError: a server ended, does not serve in time, or is not built.
            ConfigError: a section is not a mapping, or the directory cannot be made.
        """
        self._directory = _new_attempt(self.settings.directory.resolve())
        deadline = time.monotonic() + self.settings.start_timeout_seconds
        critic = None
        if self.settings.critic is not None:
            critic = self._launch("critic", "critic", self.settings.critic)
        for index, config in enumerate(self.settings.rollout):
            self._launch(f"rollout-{index}", "rollout", config)
        if self.settings.trainer is not None:
            config = dict(self.settings.trainer)
            if critic is not None and not config.get("critic_address"):
                self._wait(critic, deadline)
                config["critic_address"] = critic.address
            self._launch("trainer", "trainer", config)
        for server in self.servers:
            self._wait(server, deadline)
            self._say(f"{server.name} serves at {server.address}")

    def stop(self) -> None:
        """Asks every server to drain and waits for it; kills what does not end."""
        for server in self.servers:
            if server.running:
                server.process.terminate()
        deadline = time.monotonic() + self.settings.stop_timeout_seconds
        for server in self.servers:
            try:
                server.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(f"{server.name} does not end: killed")
                server.process.kill()
                server.process.wait()
        self._parent.shutdown()

    def check(self) -> None:
        """Raises when a server has died."""
        for server in self.servers:
            if not server.running:
                raise self._died(server)

    def _only(self, role: str) -> Server:
        for server in self.servers:
            if server.role == role:
                return server
        raise ServerStartError(f"the cluster has no {role}")

    def _launch(self, name: str, role: str, config: dict[str, Any]) -> Server:
        options = _server_options(name, config)
        host = reachable_host(options.get("host"))
        config_file = self._directory / f"{name}.yaml"
        config_file.write_text(yaml.safe_dump(config | {"server": options}, sort_keys=False))
        log = self._directory / f"{name}.log"
        binary = find_binary(f"tandem-{role}-server", self._build_dir)
        with log.open("wb") as output:
            starting = self._parent.submit(
                subprocess.Popen,
                [*_die_with_parent(), binary, "--config", config_file],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for us: we stop the servers in order.
                start_new_session=True,
                # Servers that share cores must not spin while another one works.
                env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
            )
            process = starting.result()
        server = Server(name, role, process, log, host)
        self.servers.append(server)
        self._say(f"{name} starts (pid {process.pid}, log {log})")
        return server

    def _wait(self, server: Server, deadline: float) -> None:
        while not server.address:
            listening = _listening(server.log)
            if listening is not None:
                server.address = f"{server.host}:{listening['grpc_port']}"
                server.metrics_address = f"{server.host}:{listening['metrics_port']}"
            else:
                self._still_starting(server, deadline)
        with Connection(server.address) as connection:
            while connection.health() != "SERVING":
                self._still_starting(server, deadline)

    def _still_starting(self, server: Server, deadline: float) -> None:
        if not server.running:
            raise self._died(server)
        if time.monotonic() > deadline:
            raise ServerStartError(
                f"{server.name} does not serve after {self.settings.start_timeout_seconds:.0f} s",
                hint=f"its log: {server.log}",
            )
        time.sleep(0.05)

    def _died(self, server: Server) -> ServerStartError:
        tail = server.log.read_text(errors="replace").splitlines()[-5:]
        return ServerStartError(
            f"{server.name} ended with {_ending(server.process.returncode)}: " + " | ".join(tail),
            hint=f"its log: {server.log}",
        )


def _new_attempt(directory: Path) -> Path:
    """Makes logs/attempt_N for the next N: no start overwrites what an earlier one wrote."""
    logs = directory / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        while True:
            attempt = logs / f"attempt_{next_attempt(logs)}"
            # It exists when another start was faster: then that one is counted next time.
            with suppress(FileExistsError):
                attempt.mkdir()
                return attempt
    except OSError as error:
        raise ConfigError(f"directory: {directory}: {error.strerror}") from None


def _server_options(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The section's `server`, with free ports where it names none."""
    options = config.get("server")
    field = f"{name.replace('-', '.')}.server"
    if not isinstance(options, dict | None):
        raise ConfigError(f"{field}: must be a mapping, not {options!r}")
    host = (options or {}).get("host")
    if not isinstance(host, str | None):
        raise ConfigError(f"{field}.host: must be a string, not {host!r}")
    return {"grpc_port": 0, "metrics_port": 0} | (options or {})


def reachable_host(host: str | None) -> str:
    """The host by which this machine reaches a server that binds `host`, as in HOST:PORT."""
    host = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _ending(returncode: int) -> str:
    # Popen's way to tell a signal is a negative code.
    return f"code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def find_binary(name: str, build_dir: Path | None = None) -> Path:
    """A server binary: in `build_dir`, $TANDEM_BUILD_DIR, the repository's build, or PATH."""
    named = build_dir or os.environ.get(BUILD_DIR_VARIABLE)
    root = Path(named) if named else _REPOSITORY / "build" / "release"
    service = name.removeprefix("tandem-").removesuffix("-server")
    for place in (root / "bin", root / "services" / service, root):
        if (place / name).is_file():
            return place / name
    if found := shutil.which(name):
        return Path(found)
    raise ServerStartError(
        f"{name} is neither under {root} nor on PATH",
        hint=f"`make build` makes it; ${BUILD_DIR_VARIABLE} names another build",
    )


def _listening(log: Path) -> dict[str, Any] | None:
    for line in log.read_text(errors="replace").splitlines(keepends=True):
        if '"listening"' in line and line.endswith("\n"):
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if event.get("event") == "listening":
                return event
    return None


def _die_with_parent() -> list[str]:
    # Of util-linux. A preexec_fn would do, but forks, and gRPC does not survive a fork.
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
