"""Clients use a rollout server at random, in several configurations in turn.

    rollout_soak.py [--minutes M] [--clients N] [--seed S] [--kept PART] [--only CONFIGURATION]

Every client generates, converses, cancels, leaves, stops reading, scores, pauses, brings new
weights and sends what must be refused. A part of the responses and scores is kept. At the end the
process is alive, gauges are 0, memory was flat, sequences were preempted where the cache is short,
the log has no line that nobody provoked, and the server drains with exit code 0. Then an idle
server of the same configuration, which runs one sequence at a time, gives the same answers to what
was kept: to the bit where the kernels promise it. The minutes are those of all configurations
together. `make soak-rollout` runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import harness
from soak_clients import SoakClient, Workload
from soak_configurations import CONFIGURATIONS, Configuration
from soak_replays import Replays
from steadiness import (
    DisturbanceError,
    MemoryWatch,
    require_alive,
    require_flat,
    require_idle,
)
from tandem.cluster.local import LocalCluster
from tandem.errors import RpcError
from weight_sets import weight_sets

WEIGHT_SETS = 4
# Codes of the calls that fail because clients want them to.
EXPECTED_CODES = frozenset({"INVALID_ARGUMENT", "DEADLINE_EXCEEDED"})


class RolloutSoak:
    """A soak of one configuration.

    Attributes:
        preemptions: number of sequences that were preempted.
        workload: what the clients did and kept, once they have ended.
        replays: comparisons with the idle server, once they are made.
    """

    workload: Workload
    replays: Replays

    def __init__(
        self,
        configuration: Configuration,
        models: harness.Models,
        directory: Path,
        *,
        seed: int,
        kept_part: float = 0.1,
    ) -> None:
        self.preemptions = 0.0
        self._configuration = configuration
        self._models = models
        self._directory = directory
        self._seed = seed
        self._kept_part = kept_part
        self._lines: list[str] = []

    def run(self, seconds: float, clients: int, patience: float = 2.0) -> None:
        """Runs the clients, then the replays; raises DisturbanceError for what must not be."""
        section = self._configuration.soaked(self._models)
        with harness.cluster(self._directory / "soaked", self._models, rollout=section) as running:
            self.workload = self._use(running, seconds, clients, patience)
        for server in running.servers:
            if code := server.process.returncode:
                raise DisturbanceError(f"{server.name} ended with exit code {code}")
            require_expected_log(server.log)
        self.replays = Replays(self._configuration, self.workload)
        self.replays.compare(self._directory / "alone", self._models)
        self._lines.append(self.replays.summary())

    def summary(self) -> str:
        """Returns what was done, as far as the soak came."""
        return "\n".join(f"  {line}" for line in self._lines)

    def _use(
        self, running: LocalCluster, seconds: float, clients: int, patience: float
    ) -> Workload:
        [server] = running.rollouts
        with harness.rollout_client(running) as client:
            info = client.info()
            workload = Workload(
                seed=f"{self._seed}/{self._configuration.name}",
                address=server.address,
                sets=weight_sets(self._models.senior, WEIGHT_SETS),
                num_token_ids=info.server.model.num_token_ids,
                max_queue=info.max_queue,
                kept_part=self._kept_part,
                patience=patience,
            )
            workload.update(client, workload.sets[0])
        memory = MemoryWatch(running.servers)
        try:
            _act(workload, memory, time.monotonic() + seconds, clients)
        except DisturbanceError:
            require_alive(running.servers)  # the end of a process says more than that of its calls
            raise
        finally:
            counts = ", ".join(f"{n} {name}" for name, n in workload.done.most_common())
            self._lines += [counts, *memory.summary()]
        require_alive(running.servers)
        require_idle(running.servers)
        require_flat(*memory.means())
        self.preemptions = harness.gauge(server, "tandem_preemptions_total")
        self._lines.append(f"{self.preemptions:.0f} preemptions")
        if harness.gauge(server, "tandem_generation_paused"):
            raise DisturbanceError("generation is paused")
        if self._configuration.short_cache and not self.preemptions:
            raise DisturbanceError("no sequence was preempted")
        return workload


def _act(workload: Workload, memory: MemoryWatch, until: float, clients: int) -> None:
    failed = threading.Event()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(clients) as threads:
        actors = [SoakClient(workload, number, stack) for number in range(clients)]
        running = [threads.submit(actor.run, until, failed) for actor in actors]
        memory.watch(until, failed)
        for actor in running:
            actor.result()


def require_expected_log(log: Path) -> None:
    """Raises DisturbanceError for a warning or an error that no client provoked."""
    for line in log.read_text().splitlines():
        record = json.loads(line)
        # The line that names the ports is for programs, and has no level.
        if record.get("level", "info") in ("debug", "info"):
            continue
        if record["event"] == "rpc_handled" and record["grpc_code"] in EXPECTED_CODES:
            continue
        raise DisturbanceError(f"in the log of the server: {line}")


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=float, default=0.1)
    parser.add_argument("--only", choices=list(CONFIGURATIONS))
    options = parser.parse_args()
    names = [options.only] if options.only else list(CONFIGURATIONS)
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        models = harness.make_models(Path(directory) / "models")
        for name in names:
            print(f"{name}, seed {options.seed}:")
            soak = RolloutSoak(
                CONFIGURATIONS[name],
                models,
                Path(directory) / name,
                seed=options.seed,
                kept_part=options.kept,
            )
            minutes = options.minutes / len(names)
            try:
                soak.run(minutes * 60, options.clients)
            except (DisturbanceError, RpcError, grpc.RpcError) as error:
                failures += 1
                print(f"  {error}")
                print(f"  make soak-rollout ONLY={name} SEED={options.seed} MINUTES={minutes:.1f}")
            finally:
                print(soak.summary(), flush=True)
    print(f"{options.minutes} minutes: " + (f"{failures} failed" if failures else "as it must be"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
