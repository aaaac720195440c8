"""Kills servers and clients of training runs at random; resumed runs end as undisturbed ones do.

    kills.py [--kills N] [--seed S] [--first I] [--kinds NAME …] [--limit SECONDS]

A run is started, one of its processes gets SIGKILL at a random moment, and the run is resumed,
until it is done. Its weights, optimizer states, metrics, trajectories, evaluations and their
answers must then be those of an undisturbed run, bit for bit. Run I of seed S always has the same
victims and moments, as far as clocks allow. The KINDS of runs take turns, or those of `--kinds`,
and so do two ways to run servers: started by the run, which starts its rollout server again and
ends with the others; and kept by a supervisor, which restarts what was killed. In every run the
judge takes its process down for some responses and changes its rows, a tracker fails every other
time, and the servers' disk is slow, so that kills fall into saves and loads. `make chaos` runs
this.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import harness
import psutil
import yaml
from tandem.cluster.local import find_binary
from tandem.rpc.transport import Connection
from tandem.settings import loading

TRAIN = [sys.executable, "-m", "tandem", "train"]
STEPS = 5
# Most kills of one run; then it is left alone.
MAX_KILLS_PER_RUN = 6
# Time limit of one attempt, killed or not; a machine that other programs use needs more.
ATTEMPT_SECONDS = 120.0
SLOW_DISK = {"TANDEM_TEST_DISK_BYTES_PER_SECOND": "4000000"}
# The steps between two checkpoints are not a multiple of max_staleness.
ASYNC = {"async": {"max_staleness": 3}}
LORA = {"rank": 4, "alpha": 8}


@dataclass(frozen=True)
class Kind:
    """A kind of run: changes to the settings of the run, and to the sections of the servers.

    `senior_as_junior`: the junior is the base model of the senior, whose weights it shares.
    """

    run: dict[str, Any]
    rollout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    critic: dict[str, Any] | None = None
    senior_as_junior: bool = False


KINDS = {
    "grpo": Kind({"objective": {"junior_token_loss_weight": 0.5}}),
    "ppo": Kind(
        {
            "objective": {
                "advantage_estimator": "gae",
                "gae_lambda": 0.95,
                "whiten_advantages": True,
            }
        },
        critic={},
    ),
    "async": Kind(ASYNC),
    "async-lora": Kind(
        ASYNC,
        rollout={"senior": {"lora": LORA}},
        trainer={"lora": LORA},
        senior_as_junior=True,
    ),
}
JUDGE = """
import os, signal


def reward(prompt, response, **row):
    row.clear()
    if len(response) % 23 == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return (len(response) + 3 * response.count("e")) / 10
"""
# A stand-in for the module mlflow.
TRACKER = """
import itertools
from types import SimpleNamespace

entities = SimpleNamespace(Metric=lambda *fields: fields)
calls = itertools.count()


class MlflowClient:
    def __getattr__(self, name):
        def call(*arguments, **options):
            if next(calls) % 2 == 0:
                raise ConnectionError("the tracker is away")
            return SimpleNamespace(info=SimpleNamespace(run_id="1")) if "create" in name else []

        return call


def set_experiment(name):
    return SimpleNamespace(experiment_id="1")
"""
# The results of a run, by name: the lines of its metrics, and digests of its files.
Fingerprint = dict[str, str]


class BrokenRunError(AssertionError):
    """A run failed, hung, or left something else than an undisturbed run."""


@dataclass
class Process:
    """A server that the supervisor starts again whenever it ends."""

    name: str
    command: list[str]
    log: Path
    running: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Starts the process."""
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | SLOW_DISK,
            )


class Supervisor:
    """Keeps servers running at fixed addresses; a context manager."""

    def __init__(self, directory: Path, sections: dict[str, dict[str, Any]]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        ports = {name: _free_port() for name in sections}
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self.servers: list[Process] = []
        if "critic" in sections:
            critic = {"critic_address": self.addresses["critic"]}
            sections = sections | {"trainer": sections["trainer"] | critic}
        for name, section in sections.items():
            server = {"grpc_port": ports[name], "metrics_port": _free_port()}
            config = directory / f"{name}.yaml"
            config.write_text(yaml.safe_dump(section | {"server": server}))
            command = [str(find_binary(f"tandem-{name}-server")), "--config", str(config)]
            self.servers.append(Process(name, command, directory / f"{name}.log"))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Supervisor:
        for server in self.servers:
            server.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()
        for server in self.servers:
            server.running.kill()
            server.running.wait()

    def wait_until_serving(self) -> None:
        """Returns when every server is ready; raises BrokenRunError when one is not in time."""
        deadline = time.monotonic() + ATTEMPT_SECONDS
        for name, address in self.addresses.items():
            with Connection(address) as connection:
                while connection.health() != "SERVING":
                    if time.monotonic() > deadline:
                        raise BrokenRunError(
                            f"the {name} server is not ready after {ATTEMPT_SECONDS:.0f} s"
                        )
                    time.sleep(0.05)

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            for server in self.servers:
                if server.running.poll() is not None:
                    server.start()


@dataclass(frozen=True)
class Scenario:
    """The run file and the cluster file of one kind of run."""

    directory: Path
    kind: str
    sections: dict[str, dict[str, Any]]

    @classmethod
    def write(cls, directory: Path, models: harness.Models, kind: str) -> Scenario:
        """Writes both files."""
        chosen = KINDS[kind]
        if chosen.senior_as_junior:
            models = replace(models, junior=models.senior)
        sections = harness.sections(
            models, rollout=chosen.rollout, trainer=chosen.trainer, critic=chosen.critic
        )
        scenario = cls(directory / kind, kind, sections)
        scenario.directory.mkdir()
        scenario.cluster_file.write_text(
            yaml.safe_dump(sections | {"directory": str(scenario.directory / "cluster")})
        )
        config = harness.run_settings(
            scenario.directory,
            models,
            None,
            steps=STEPS,
            cluster=str(scenario.cluster_file),
            checkpoint={"every": 2},
            eval={"every": 3, "modes": ["solo", "legibility"], "max_tokens": 8},
            trackers=["tensorboard", "mlflow"],
            **chosen.run,
        )
        (scenario.directory / "reward.py").write_text(JUDGE)
        (scenario.directory / "mlflow.py").write_text(TRACKER)
        config.reward.executor, config.reward.workers = "process", 2
        config.reward.on_error = "skip"
        scenario.run_file.write_text(loading.dump(config))
        return scenario

    @property
    def cluster_file(self) -> Path:
        """Configuration of the servers."""
        return self.directory / "cluster.yaml"

    @property
    def run_file(self) -> Path:
        """Configuration of the run."""
        return self.directory / "run.yaml"


class Run:
    """One run, from its first start to its end."""

    def __init__(
        self,
        scenario: Scenario,
        name: str,
        random: Random,
        supervisor: Supervisor | None,
        limit: float,
    ) -> None:
        self.kills: list[str] = []
        self._scenario = scenario
        self._random = random
        self._supervisor = supervisor
        self._limit = limit
        # Servers started by a run that was killed, or that lost one of them: they must end too.
        self._orphans: list[int] = []
        self._path = scenario.directory / name
        self._log = scenario.directory / f"{name}.log"

    def undisturbed(self) -> tuple[Fingerprint, float]:
        """Runs to the end; returns what the run left, and how many seconds it took."""
        started = time.monotonic()
        client = self._start()
        self._wait(client, self._limit)
        if client.returncode != 0:
            raise BrokenRunError(f"the undisturbed run failed:\n{self._tail()}")
        return fingerprint(self._path), time.monotonic() - started

    def disturbed(self, kills: int, seconds: float) -> Fingerprint:
        """Kills a process `kills` times, within `seconds` of a start, then lets the run end."""
        while True:
            moment = self._random.uniform(0.2, 0.9) * seconds
            client = self._start()
            killed = len(self.kills) < kills and self._kill(client, moment)
            self._wait(client, self._limit)
            if client.returncode == 0:
                return fingerprint(self._path)
            if not killed:
                raise BrokenRunError(f"the run failed without a kill:\n{self._tail()}")

    def _start(self) -> subprocess.Popen[bytes]:
        # Servers that outlived the client hold updates that the run makes again.
        overrides = [f"run_dir={self._path}", "start_from=base"]
        if self._supervisor is not None:
            self._supervisor.wait_until_serving()
            addresses = self._supervisor.addresses
            overrides += [
                "cluster=null",
                f"servers.rollout=[{addresses['rollout']}]",
                f"servers.trainer={addresses['trainer']}",
            ]
            if "critic" in addresses:
                overrides.append(f"servers.critic={addresses['critic']}")
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*TRAIN, str(self._scenario.run_file), *overrides, "--resume", "auto"],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ
                | SLOW_DISK
                | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": self._modules},
            )

    @property
    def _modules(self) -> str:
        """The places of modules, with that of the tracker."""
        known = os.environ.get("PYTHONPATH", "")
        return os.pathsep.join(filter(None, [str(self._scenario.directory), known]))

    def _kill(self, client: subprocess.Popen[bytes], moment: float) -> bool:
        """Waits `moment` seconds and kills the client or a server; False if the run ended first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(moment)
            return False
        servers = self._server_pids(client)
        victims = {"client": client.pid} | servers
        name = self._random.choice(sorted(victims))
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(victims[name]).kill()
        self.kills.append(f"{name} after {moment:.2f} s")
        if self._supervisor is None:
            self._orphans = [*servers.values()]
        return True

    def _server_pids(self, client: subprocess.Popen[bytes]) -> dict[str, int]:
        if self._supervisor is not None:
            return {server.name: server.running.pid for server in self._supervisor.servers}
        with contextlib.suppress(psutil.NoSuchProcess):
            # Not the judge's processes: a response whose judge is killed has no reward.
            children = psutil.Process(client.pid).children()
            return {one.name(): one.pid for one in children if one.name().startswith("tandem-")}
        return {}

    def _wait(self, client: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            client.wait(seconds)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()
            raise BrokenRunError(
                f"the run did not end within {seconds:.0f} s:\n{self._tail()}"
            ) from None
        deadline = time.monotonic() + 20
        while any(map(_alive, self._orphans)):
            if time.monotonic() > deadline:
                raise BrokenRunError(f"servers {self._orphans} outlived their run")
            time.sleep(0.05)
        self._orphans = []

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def fingerprint(run: Path) -> Fingerprint:
    """The results of a run, except clock times and the run's own name."""
    state = json.loads((run / "state.json").read_text())
    result = {
        f"metrics of step {line['step']}": json.dumps(line)
        for line in harness.metrics_without_clock(run)
    }
    checkpoints = [run / state[role] for role in ("trainer", "critic") if state[role]]
    files = [
        *(file for folder in checkpoints for file in folder.glob("*.safetensors")),
        *(run / "trajectories").glob("step_*.parquet"),
        *(run / "evaluations").glob("step_*.parquet"),
        *run.glob("evals.jsonl"),
    ]
    for file in sorted(files):
        result[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return result


class Chaos:
    """Starts runs and kills their processes, until there were enough kills.

    Attributes:
        kills: number of kills so far.
        runs: number of runs that ended as an undisturbed one.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        kinds: Sequence[str] = tuple(KINDS),
        say: Callable[[str], None] = print,
        limit: float = ATTEMPT_SECONDS,
    ) -> None:
        """Writes the files of the runs; `kinds` take turns."""
        self.kills = 0
        self.runs = 0
        self._seed = seed
        self._say = say
        self._limit = limit
        models = harness.make_models(directory / "models")
        self._scenarios = [Scenario.write(directory, models, kind) for kind in kinds]
        self._expected: dict[tuple[str, bool], tuple[Fingerprint, float]] = {}

    def go(self, kills: int, first: int = 0) -> None:
        """Kills `kills` processes; raises BrokenRunError with the command that repeats the run."""
        number = first
        while self.kills < kills:
            try:
                self._run(number, min(kills - self.kills, MAX_KILLS_PER_RUN))
            except BrokenRunError as error:
                kinds = " ".join(scenario.kind for scenario in self._scenarios)
                raise BrokenRunError(
                    f"{error}\n  make chaos SEED={self._seed} FIRST={number} "
                    f"KILLS={MAX_KILLS_PER_RUN} KINDS='{kinds}'"
                ) from None
            number += 1

    def _run(self, number: int, most: int) -> None:
        random = Random(f"{self._seed}/{number}")
        scenario = self._scenarios[number % len(self._scenarios)]
        supervised = number // len(self._scenarios) % 2 == 1
        expected, seconds = self._undisturbed(scenario, supervised)
        count = min(most, random.randint(1, MAX_KILLS_PER_RUN))
        with self._servers(scenario, supervised) as supervisor:
            run = Run(scenario, f"run-{number}", random, supervisor, self._limit)
            started = time.monotonic()
            try:
                left = run.disturbed(count, seconds)
            except BrokenRunError as error:
                raise BrokenRunError(f"run {number} ({run.kills}): {error}") from None
            if not run.kills:  # The run ended before the kill: the machine is faster now.
                seconds = min(seconds, time.monotonic() - started)
                self._expected[scenario.kind, supervised] = expected, seconds
        how = "supervised servers" if supervised else "servers of its own"
        self._say(f"run {number}, {scenario.kind}, {how}: killed {', '.join(run.kills) or 'none'}")
        if different := _differences(expected, left):
            raise BrokenRunError(f"run {number} ({run.kills}): other than undisturbed: {different}")
        self.kills += len(run.kills)
        self.runs += 1

    def _undisturbed(self, scenario: Scenario, supervised: bool) -> tuple[Fingerprint, float]:
        """Returns the files of an undisturbed run, and its seconds with these servers."""
        key = (scenario.kind, supervised)
        if key not in self._expected:
            with self._servers(scenario, supervised) as supervisor:
                name = "undisturbed-supervised" if supervised else "undisturbed"
                run = Run(scenario, name, Random(0), supervisor, self._limit)
                self._expected[key] = run.undisturbed()
        return self._expected[key]

    @contextlib.contextmanager
    def _servers(self, scenario: Scenario, supervised: bool) -> Iterator[Supervisor | None]:
        if not supervised:
            yield None
            return
        with Supervisor(scenario.directory / "supervised", scenario.sections) as supervisor:
            supervisor.wait_until_serving()
            yield supervisor


def _differences(expected: Fingerprint, left: Fingerprint) -> str:
    """The names whose values differ, separated by commas."""
    return ", ".join(
        sorted(name for name in expected | left if expected.get(name) != left.get(name))
    )


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--limit", type=float, default=ATTEMPT_SECONDS)
    options = parser.parse_args()
    seed = Random().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        chaos = Chaos(Path(directory), seed, options.kinds, limit=options.limit)
        try:
            chaos.go(options.kills, options.first)
        except BrokenRunError as error:
            print(error)
            return 1
    seconds = time.monotonic() - started
    print(f"{chaos.kills} kills, {chaos.runs} runs, {seconds:.0f} s: every run as undisturbed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
