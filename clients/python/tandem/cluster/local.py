"""A local cluster: the servers as plain processes of this machine.

with LocalCluster(ClusterSettings(rollout=[{...}], trainer={...})) as cluster:
    TrainerClient(cluster.trainer.address)
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tandem.cluster.keeper import RolloutKeeper
from tandem.cluster.plan import planned
from tandem.errors import ConfigError, ServerStartError, file_error
from tandem.rpc.credentials import Credentials
from tandem.rpc.transport import Connection
from tandem.settings.cluster import ClusterSettings
from tandem.settings.values import dump_values
from tandem.utils.atomic_files import next_attempt
from tandem.utils.text_files import encoded

_log = logging.getLogger(__name__)


# While servers start, a write of _PROBE_BYTES every _SPACE_SECONDS shows a full disk.
_SPACE_SECONDS = 1.0
_PROBE_BYTES = 4096

BUILD_DIR_VARIABLE = "TANDEM_BUILD_DIR"
_REPOSITORY = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Section:
    """The configuration of one server of a cluster.

    Attributes:
        field: the section's key in the cluster file: "trainer", or "rollout.0" where there are
            several rollout servers.
        name: the server's name in messages and of its log, for example "rollout-0".
        has_critic: whether the cluster has a critic, whose address a trainer is told.
    """

    role: str
    field: str
    name: str
    config: dict[str, Any]
    has_critic: bool

    @property
    def ranks(self) -> int:
        """The number of the server's processes. Raises ConfigError for a bad number."""
        ranks = self.config.get("ranks", 1)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ConfigError(f"{self.field}.ranks: must be a positive number, not {ranks!r}")
        return ranks

    @property
    def binary(self) -> str:
        """The name of the server program."""
        return f"tandem-{self.role}-server"

    def with_free_ports(self) -> dict[str, Any]:
        """Returns the server's configuration, with port 0 (any) where it names none.

        Raises ConfigError for a `server` that is not a mapping, or a host that is not text.
        """
        options = self.config.get("server")
        if not isinstance(options, dict | None):
            raise ConfigError(f"{self.field}.server: must be a mapping, not {options!r}")
        host = (options or {}).get("host")
        if not isinstance(host, str | None):
            raise ConfigError(f"{self.field}.server.host: must be a string, not {host!r}")
        config = {key: value for key, value in self.config.items() if key != "ranks"}
        return config | {"server": {"grpc_port": 0, "metrics_port": 0} | (options or {})}


def sections(settings: ClusterSettings) -> list[Section]:
    """Returns the servers of a cluster in the order of their start: a critic before its trainer."""
    settings = planned(settings)
    several = len(settings.rollout) > 1
    servers = [
        ("critic", "critic", "critic", settings.critic),
        *(
            ("rollout", f"rollout.{i}" if several else "rollout", f"rollout-{i}", config)
            for i, config in enumerate(settings.rollout)
        ),
        ("trainer", "trainer", "trainer", settings.trainer),
    ]
    has_critic = settings.critic is not None
    return [
        Section(role, field, name, config, has_critic)
        for role, field, name, config in servers
        if config is not None
    ]


@dataclass
class Server:
    """A running server process: a server, or one rank of it. Clients call rank 0."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    host: str
    rank: int = 0
    has_tls: bool = False
    address: str = ""
    metrics_address: str = ""

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def describe(self) -> dict[str, Any]:
        """Returns the record of the server in status lines and `--json`."""
        return {
            "name": self.name,
            "role": self.role,
            "rank": self.rank,
            "address": self.address,
            "metrics": f"http{'s' * self.has_tls}://{self.metrics_address}/metrics",
            "pid": self.process.pid,
            "log": str(self.log),
        }


class LocalCluster:
    """Starts servers, waits until they serve, and stops them again.

    The critic starts first, and the trainer is told its address unless its section names one.
    Servers get SIGTERM at the end (they drain), SIGKILL after `stop_timeout_seconds`, and die with
    this process whatever happens to it (where util-linux is installed).

    Attributes:
        credentials: those with which clients call the servers: the given ones, else those of the
            settings' `certs`, else those of the environment, field by field.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        build_dir: Path | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.settings = settings
        own = credentials or Credentials()
        self.credentials = own.or_else(settings.credentials()).or_else(
            Credentials.from_environment()
        )
        self.servers: list[Server] = []
        self._build_dir = build_dir
        self._directory = Path()
        self._held_ports: list[socket.socket] = []
        # A server dies with the thread that started it, so that thread must live until stop().
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="cluster")
        self._space_known_until = 0.0
        self._keeper: RolloutKeeper | None = None
        # By the name of a server, the number of times that it was started again.
        self._restarts: dict[str, int] = {}

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
        return [server for server in self.servers if server.role == "rollout" and not server.rank]

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
        for section in sections(self.settings):
            config = section.with_free_ports()
            if (
                section.role == "trainer"
                and section.has_critic
                and not config.get("critic_address")
            ):
                self._wait(self.critic, deadline)
                config["critic_address"] = self.critic.address
            self._launch(section, config)
        for server in self.servers:
            self._wait(server, deadline)
            if server.rank == 0:
                _log.info(f"{server.name} serves at {server.address}")

    def stop(self) -> None:
        """Asks every server to drain and waits for it; kills a server that does not end."""
        if self._keeper is not None:
            self._keeper.stop()
        for server in self.servers:
            if server.running:
                server.process.terminate()
        deadline = time.monotonic() + self.settings.stop_timeout_seconds
        for server in self.servers:
            try:
                server.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.info(
                    f"{server.name} has not ended within {self.settings.stop_timeout_seconds:g} s "
                    "and is being killed"
                )
                server.process.kill()
                server.process.wait()
        self._parent.shutdown()
        for port in self._held_ports:
            port.close()

    def keep_rollouts(self) -> None:
        """Restarts rollout servers that die, at their addresses, until stop()."""
        self._keeper = RolloutKeeper(self)

    def restart(self, name: str) -> None:
        """Restarts a rollout server that has died, at its address, and waits until it serves.

        Raises ServerStartError if it does not.
        """
        section = next(one for one in sections(self.settings) if one.name == name)
        old = [server for server in self.servers if server_name(server) == name]
        for server in old:
            # A rank that is left waits for those that died.
            server.process.kill()
            server.process.wait()
        config = section.with_free_ports()
        for key in ("grpc", "metrics"):
            address = old[0].address if key == "grpc" else old[0].metrics_address
            config["server"][f"{key}_port"] = int(address.rpartition(":")[2])
        self._restarts[name] = self._restarts.get(name, 0) + 1
        started = self._launch(section, config)
        # They take the places of the old ones.
        places = {server.name: server for server in started}
        known = self.servers[: -len(started)]
        self.servers[:] = [places.get(server.name, server) for server in known]
        deadline = time.monotonic() + self.settings.start_timeout_seconds
        for server in started:
            self._wait(server, deadline)

    def death_of(self, server: Server) -> ServerStartError:
        """Returns the error about a server that has died."""
        return self._died(server)

    def check(self, *, spare_rollouts: bool = False) -> None:
        """Raises ServerStartError if a server has died.

        With `spare_rollouts` a rollout server may have died, as long as another one runs, or
        the server is about to be restarted.
        """
        kept = self._keeper.kept if self._keeper is not None else frozenset()
        dead = [
            server
            for server in self.servers
            if not server.running and not (spare_rollouts and server_name(server) in kept)
        ]
        # A server of several ranks needs all of them.
        broken = {server_name(server) for server in dead}
        if spare_rollouts and any(server_name(one) not in broken for one in self.rollouts):
            dead = [server for server in dead if server.role != "rollout"]
        if dead:
            raise self._died(dead[0])

    def _only(self, role: str) -> Server:
        for server in self.servers:
            if server.role == role and not server.rank:
                return server
        raise ServerStartError(f"the cluster has no {role}")

    def _launch(self, section: Section, config: dict[str, Any]) -> list[Server]:
        config_file = self._directory / f"{section.name}.yaml"
        with _usable(self.settings.directory):
            config_file.write_bytes(encoded(dump_values(config)))
        if section.ranks == 1:
            return [self._start_process(section, section.name, config_file, config)]
        port = held_port()
        self._held_ports.append(port)
        started: list[Server] = []
        for rank in range(section.ranks):
            name = section.name if rank == 0 else f"{section.name}-rank-{rank}"
            environment = rank_environment(rank, section.ranks, port.getsockname()[1])
            # Nobody calls the other ranks, and the ports behind that of rank 0 may be taken.
            free = rank > 0 and self._restarts.get(section.name, 0) > 0
            overrides = ("server.grpc_port=0", "server.metrics_port=0") if free else ()
            started.append(
                self._start_process(
                    section, name, config_file, config, rank, environment, overrides
                )
            )
        return started

    def _start_process(
        self,
        section: Section,
        name: str,
        config_file: Path,
        config: Mapping[str, Any],
        rank: int = 0,
        environment: Mapping[str, str] = types.MappingProxyType({}),
        overrides: Sequence[str] = (),
    ) -> Server:
        again = self._restarts.get(section.name, 0)
        log = self._directory / (f"{name}-again-{again}.log" if again else f"{name}.log")
        binary = find_binary(section.binary, self._build_dir)
        with log.open("wb") as output:
            starting = self._parent.submit(
                subprocess.Popen,
                [*_die_with_parent(), binary, "--config", config_file, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which stops the servers in order.
                start_new_session=True,
                # Servers that share cores must not spin while another one works.
                env={"OMP_WAIT_POLICY": "PASSIVE"} | inherited_environment() | dict(environment),
            )
            process = starting.result()
        host = reachable_host(config["server"].get("host"))
        tls = config["server"].get("tls")
        has_tls = isinstance(tls, dict) and bool(tls.get("certificate_file"))
        server = Server(name, section.role, process, log, host, rank, has_tls)
        self.servers.append(server)
        _log.info(f"{name} is starting (pid {process.pid}, log {log})")
        return server

    def _wait(self, server: Server, deadline: float) -> None:
        while not server.address:
            listening = _listening(server.log)
            if listening is not None:
                server.address = f"{server.host}:{listening['grpc_port']}"
                server.metrics_address = f"{server.host}:{listening['metrics_port']}"
            else:
                self._still_starting(server, deadline)
        with Connection(server.address, credentials=self.credentials) as connection:
            while (health := connection.check_health()).status != "SERVING":
                if health.refused:
                    raise ServerStartError(f"{server.name} at {server.address}: {health.reason}")
                self._still_starting(server, deadline)

    def _still_starting(self, server: Server, deadline: float) -> None:
        if not server.running:
            raise self._died(server)
        if self._keeper is not None and self._keeper.stopping:
            raise ServerStartError(f"stopped waiting for {server.name}: the cluster is stopping")
        self._require_space(server)
        if time.monotonic() > deadline:
            raise ServerStartError(
                f"{server.name} is not serving after {self.settings.start_timeout_seconds:.0f} s",
                hint=f"its log: {server.log}",
            )
        time.sleep(0.05)

    def _require_space(self, server: Server) -> None:
        """Raises StorageError if the disk is full: the log could not say that the server serves."""
        if time.monotonic() < self._space_known_until:
            return
        self._space_known_until = time.monotonic() + _SPACE_SECONDS
        with _usable(self.settings.directory):
            probe = server.log.with_suffix(".probe")
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)

    def _died(self, server: Server) -> ServerStartError:
        ending = f"{server.name} ended with {_ending(server.process.returncode)}"
        said, event = _last_words(server.log)
        if event == "rank_failure":
            # The reason is that of the rank that is gone.
            said = "; ".join([said, *self._deaths_beside(server)])
        return ServerStartError(
            f"{ending}: {said}" if said else ending, hint=f"its log: {server.log}"
        )

    def _deaths_beside(self, server: Server) -> list[str]:
        """Returns how the other ranks of a server ended that know more than that a rank is lost."""
        found = []
        for other in self.servers:
            if server_name(other) != server_name(server) or other is server or other.running:
                continue
            said, event = _last_words(other.log)
            if event != "rank_failure":
                ending = f"{other.name} ended with {_ending(other.process.returncode)}"
                found.append(f"{ending}: {said}" if said else ending)
        return found


def server_name(server: Server) -> str:
    """Returns the name of the server whose rank this is."""
    return server.name.removesuffix(f"-rank-{server.rank}")


def _new_attempt(directory: Path) -> Path:
    """Makes logs/attempt_N for the next N: no start overwrites the logs of an earlier one."""
    logs = directory / "logs"
    with _usable(directory):
        logs.mkdir(parents=True, exist_ok=True)
        while True:
            attempt = logs / f"attempt_{next_attempt(logs)}"
            # Another start may have made it first; the next N counts it.
            with suppress(FileExistsError):
                attempt.mkdir()
                return attempt


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Turns an OSError into an error that names the cluster's directory."""
    try:
        yield
    except OSError as error:
        raise file_error(f"directory: {directory}", error) from None


def held_port() -> socket.socket:
    """Returns a socket that reserves a port for a server: bound, but not listening."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def inherited_environment() -> dict[str, str]:
    """This process's environment variables without settings of servers (`TANDEM__…`).

    The file of a cluster says all settings of its servers; a variable of the shell would hold for
    all of them and silently win over the file.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("TANDEM__")}


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the environment variables of torchrun for one rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch looks up the names of its peers, and a slow name server would hold up the start.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def reachable_host(host: str | None) -> str:
    """Returns the HOST of HOST:PORT at which this machine reaches a server that binds `host`."""
    host = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _ending(returncode: int) -> str:
    # Popen reports a signal as a negative code.
    return f"code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def find_binary(name: str, build_dir: Path | None = None) -> Path:
    """Finds a server binary in `build_dir`, $TANDEM_BUILD_DIR, the repository's build, or PATH."""
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
        hint=f"`make build` builds it; ${BUILD_DIR_VARIABLE} names another build",
    )


def _listening(log: Path) -> dict[str, Any] | None:
    for line in _lines(log):
        if isinstance(line, dict) and line.get("event") == "listening":
            return line
    return None


def _last_words(log: Path) -> tuple[str, str]:
    """Returns why a server ended, and the name of that event.

    It is the last error in the log, else the last line of plain text, which is no event.
    """
    lines = _lines(log)
    errors = [one for one in lines if isinstance(one, dict) and one.get("level") == "error"]
    if errors:
        event = str(errors[-1].get("event", ""))
        reasons = (errors[-1].get(key) for key in ("message", "failure", "error", "status"))
        return next((str(reason) for reason in reasons if reason), event), event
    return next((line for line in reversed(lines) if isinstance(line, str)), ""), ""


def _lines(log: Path) -> list[dict[str, Any] | str]:
    """Returns the complete lines of a log: events as mappings, other lines as text."""
    *complete, _ = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_event(line) for line in complete if line.strip()]


def _event(line: str) -> dict[str, Any] | str:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return line
    return event if isinstance(event, dict) else line


def _die_with_parent() -> list[str]:
    # setpriv is part of util-linux. A preexec_fn would fork, and gRPC does not survive a fork.
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
