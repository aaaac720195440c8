"""Checks that use and abuse of servers left no trace, and three servers to use.

Reference replies must be the same bits, gauges 0, memory flat, and every process alive.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import psutil
from harness import TANDEM
from tandem._proto.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem.cluster.local import LocalCluster, Server
from tandem.errors import from_status
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt, SupervisedSample

# Growth of a server's memory from a warm state to the end that allocators explain. A leak of 1 kB
# per call exceeds it in 65,000 calls.
MEMORY_SLACK_BYTES = 64 << 20
# The gauges of work in progress.
GAUGES = (
    "tandem_sequences_running",
    "tandem_sequences_waiting",
    "tandem_kv_tokens",
    "tandem_generate_streams",
    "tandem_call_queue_depth",
    "grpc_server_live_calls",
)
_SAMPLE_SECONDS = 0.5
# The metrics of a server that answered every kind of call are about 40 kB.
MAX_METRICS_BYTES = 1 << 20

PROMPTS = [
    Prompt(
        token_ids=[5, 60, 7 + index, 110],
        seed=77 + index,
        num_samples=2,
        sampling={"max_tokens": 16, "temperature": 0.9, "top_p": 0.95},
        tandem=TANDEM[strategy],
        return_other_logprobs=True,
    )
    for index, strategy in enumerate(("word", "bernoulli"))
]
SEQUENCES = [SupervisedSample([9, 8, 7], [21, 22, 23, 24]), SupervisedSample([30], [31])]


class DisturbanceError(AssertionError):
    """Something changed that must not."""


@dataclass(frozen=True)
class Servers:
    """A rollout server with a junior, a trainer with a reference model, and its critic.

    Attributes:
        directory: working directory of the servers; it starts empty.
        base: directory of the checkpoints that trainer and critic saved at the start.
    """

    cluster: LocalCluster
    rollout: RolloutClient
    trainer: TrainerClient
    critic: CriticClient
    directory: Path
    base: Path

    def __iter__(self) -> Iterator[Server]:
        return iter(self.cluster.servers)

    def restore(self) -> None:
        """Restores the weights and the state that the servers started with."""
        self.rollout.resume()
        self.trainer.load_checkpoint(str(self.base / "trainer"))
        self.critic.load_checkpoint(str(self.base / "critic"))
        receiver = weights_pb2_grpc.WeightServiceStub(self.rollout.channel)
        served = receiver.GetVersion(weights_pb2.GetVersionRequest())
        if served.open_update_id:
            receiver.AbortUpdate(weights_pb2.AbortUpdateRequest(update_id=served.open_update_id))
        if served.weights != self.trainer.info().server.weights:
            self.publish()

    def publish(self) -> None:
        """Publishes the trainer's weights, whether newer or older; raises the receiver's error."""
        targets = [server.address for server in self.cluster.rollouts]
        reply = self.trainer.publish_weights(targets, allow_rollback=True)
        for result in reply.results:
            if result.status.code:
                raise from_status(result.status, method="PublishWeights")

    def reference(self) -> dict[str, bytes]:
        """Serialized replies to fixed requests, by method; they depend on the weights alone."""
        groups = self.rollout.generate(PROMPTS)
        scored = [([*s.prompt_token_ids, *s.response_token_ids], 1) for s in SEQUENCES]
        replies: dict[str, Sequence[Any]] = {
            "Generate": harness.flat(groups),
            "Score": [self.rollout.score(scored, junior=True, temperature=0.7)],
            "ComputeLogProbs": self.trainer.compute_log_probs(SEQUENCES, temperature=0.7),
            "ComputeValues": self.critic.compute_values(SEQUENCES),
            "GetServerInfo": [
                client.info().server.weights for client in (self.trainer, self.critic, self.rollout)
            ],
        }
        return {
            name: b"".join(message.SerializeToString(deterministic=True) for message in messages)
            for name, messages in replies.items()
        }

    def require_same(self, before: Mapping[str, bytes]) -> None:
        """Raises DisturbanceError when a reference reply differs from `before`."""
        changed = [name for name, reply in self.reference().items() if reply != before[name]]
        if changed:
            raise DisturbanceError(f"the reference reply of {', '.join(changed)} changed")

    def clean(self) -> None:
        """Empties the working directory."""
        for entry in self.directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def require_alive(servers: Iterable[Server]) -> None:
    """Raises DisturbanceError when a process ended."""
    for server in servers:
        if not server.running:
            tail = server.log.read_text(errors="replace")[-2000:]
            raise DisturbanceError(
                f"{server.name} ended with {server.process.returncode}; its log:\n{tail}"
            )


def require_idle(servers: Iterable[Server], seconds: float = 30) -> None:
    """Waits until no call or sequence is in progress; raises DisturbanceError if some stay."""
    servers = list(servers)
    deadline = time.monotonic() + seconds
    while busy := [line for server in servers for line in _busy(server)]:
        if time.monotonic() > deadline:
            raise DisturbanceError(f"{seconds:.0f} s after the last call: {'; '.join(busy)}")
        time.sleep(0.02)


def memory(servers: Iterable[Server]) -> dict[str, int]:
    """Returns the resident bytes of every server, by name."""
    return {server.name: psutil.Process(server.process.pid).memory_info().rss for server in servers}


def require_flat(before: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Raises DisturbanceError when a server grew by more than MEMORY_SLACK_BYTES."""
    for name, bytes_before in before.items():
        if now[name] > bytes_before + MEMORY_SLACK_BYTES:
            grown = f"{bytes_before / 2**20:.0f} to {now[name] / 2**20:.0f} MiB"
            raise DisturbanceError(f"memory of {name} grew from {grown}")


class MemoryWatch:
    """A record of the memory of servers: its mean in the third tenth of the time, and in the last.

    The first two tenths are a warm-up: every kind of call has been made, and allocators hold what
    they keep.
    """

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = list(servers)
        self._samples: list[Mapping[str, int]] = []

    def watch(self, until: float, stopped: threading.Event) -> None:
        """Takes samples until the moment `until` of time.monotonic(), or until `stopped`."""
        while time.monotonic() < until and not stopped.wait(_SAMPLE_SECONDS):
            self._samples.append(memory(self._servers))

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the mean bytes of every server in the third tenth, and in the last."""
        tenth = max(1, len(self._samples) // 10)
        early = self._samples[2 * tenth : 3 * tenth] or self._samples
        return _mean(early), _mean(self._samples[-tenth:])

    def summary(self) -> list[str]:
        """Returns a line with the two means of every server."""
        before, after = self.means()
        return [
            f"{name}: {before[name] / 2**20:.0f} MiB, then {after[name] / 2**20:.0f} MiB"
            for name in before
        ]


def _mean(samples: Sequence[Mapping[str, int]]) -> dict[str, float]:
    names = samples[0] if samples else {}  # None were taken if the run failed at once.
    return {name: statistics.fmean(sample[name] for sample in samples) for name in names}


@contextmanager
def serving(directory: Path, models: harness.Models) -> Iterator[Servers]:
    """Starts the servers; `directory` is absolute and empty, or does not exist."""
    # Relative paths in requests lead into this folder, and "../" paths into the one above.
    working = directory / "servers" / "working"
    working.mkdir(parents=True)
    with ExitStack() as stack:
        with contextlib.chdir(working):
            cluster = stack.enter_context(
                harness.cluster(
                    directory / "cluster",
                    models,
                    trainer={"reference_model": str(models.senior)},
                    critic={},
                )
            )
        servers = Servers(
            cluster,
            stack.enter_context(harness.rollout_client(cluster)),
            stack.enter_context(harness.trainer_client(cluster)),
            stack.enter_context(harness.critic_client(cluster)),
            working,
            directory / "base",
        )
        servers.trainer.save_checkpoint(str(servers.base), "trainer")
        servers.critic.save_checkpoint(str(servers.base), "critic")
        yield servers


def _busy(server: Server) -> list[str]:
    text = harness.metrics_text(server)
    if len(text) > MAX_METRICS_BYTES:
        raise DisturbanceError(f"the metrics of {server.name} take {len(text)} bytes")
    lines = re.findall(rf"^(?:{'|'.join(GAUGES)})(?:{{.*}})? .*$", text, re.MULTILINE)
    return [f"{server.name}: {line}" for line in lines if float(line.rpartition(" ")[2]) != 0]
