"""Several clients use three servers at random for some minutes, which must change nothing.

    cluster_soak.py [--minutes M] [--clients N] [--seed S]

The same request under the same weights must give the same bits, whoever asks and whatever else the
servers do. At the end every process is alive, gauges are 0, the reference replies are what they
were at the start, the servers drain with exit code 0, and memory was flat: a server's mean over the
last tenth of the time is at most MEMORY_SLACK_BYTES above its mean over the third tenth. `make
soak` runs this.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import harness
from google.protobuf.message import Message
from grpc import StatusCode
from steadiness import (
    SEQUENCES,
    DisturbanceError,
    MemoryWatch,
    Servers,
    require_alive,
    require_flat,
    require_idle,
    serving,
)
from tandem._proto.types.v1 import trajectory_pb2
from tandem.errors import CancelledError, DeadlineError, RpcError
from tandem.rpc import requests
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, Prompt

# Errors that clients cause each other when they train the same servers. Any other is a failure.
EXPECTED_REASONS = frozenset(
    {
        "STALE_POLICY_VERSION", "UNKNOWN_POLICY_VERSION", "TRAJECTORY_TOO_OLD", "WEIGHTS_DIFFER",
        "STALE_WEIGHT_VERSION", "WEIGHTS_CHANGED",
    }
)  # fmt: skip
# A receiver takes one update at a time.
PUBLICATIONS = threading.Lock()


class Replies:
    """The replies so far: the same request under the same weights has one reply."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], bytes] = {}
        self.compared = 0

    def expect(self, request: str, weights: str, reply: Message) -> None:
        """Raises DisturbanceError when the request had another reply before."""
        data = reply.SerializeToString(deterministic=True)
        with self._lock:
            known = self._known.setdefault((request, weights), data)
            self.compared += known is not data
        if known != data:
            raise DisturbanceError(f"{request} under weights {weights} has two replies")


class Soak:
    """Clients that take random actions.

    Attributes:
        done: number of successes of every action, by its name.
        refused: number of actions refused for an expected reason, by reason.
    """

    def __init__(self, servers: Servers, seed: int) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.replies = Replies()
        self._servers = servers
        self._seed = seed
        self._memory = MemoryWatch(servers)
        self._failed = threading.Event()

    def run(self, seconds: float, clients: int) -> None:
        """Runs the clients; raises DisturbanceError when the servers are not as before."""
        servers = self._servers
        reference = servers.reference()
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as threads:
            running = [threads.submit(self._client, number, until) for number in range(clients)]
            self._memory.watch(until, self._failed)
        for client in running:
            client.result()
        require_alive(servers)
        require_idle(servers)
        servers.restore()
        servers.require_same(reference)
        require_flat(*self._memory.means())

    def summary(self) -> str:
        """Returns the counts of actions, and the memory in the third tenth and in the last."""
        return "\n".join(
            [
                ", ".join(f"{n} {name}" for name, n in self.done.most_common()),
                "refused: " + ", ".join(f"{n} {name}" for name, n in self.refused.most_common()),
                f"{self.replies.compared} replies compared with an earlier one",
                *self._memory.summary(),
            ]
        )

    def _client(self, number: int, until: float) -> None:
        random = Random(f"{self._seed}/{number}")
        with contextlib.ExitStack() as stack:
            client = Client(self._servers, random, self.replies, stack)
            actions, weights = zip(*client.actions.items(), strict=True)
            while time.monotonic() < until and not self._failed.is_set():
                [action] = random.choices(actions, weights)
                name = action.__name__.replace("_", " ")
                try:
                    action()
                except RpcError as error:
                    # ABORTED: the critic's weights changed in the middle of a step.
                    if error.reason not in EXPECTED_REASONS and error.code != StatusCode.ABORTED:
                        self._failed.set()
                        raise DisturbanceError(f"{name}: {error}") from error
                    self.refused[error.reason or error.code.name] += 1
                except BaseException:
                    self._failed.set()
                    raise
                else:
                    self.done[name] += 1


class Client:
    """A client with channels of its own; `actions` holds what it may do, with weights."""

    def __init__(
        self, servers: Servers, random: Random, replies: Replies, stack: contextlib.ExitStack
    ) -> None:
        cluster = servers.cluster
        self._servers = servers
        self._random = random
        self._replies = replies
        self._rollout = stack.enter_context(RolloutClient(cluster.rollouts[0].address))
        self._trainer = stack.enter_context(TrainerClient(cluster.trainer.address))
        self._critic = stack.enter_context(CriticClient(cluster.critic.address))
        self.actions: dict[Callable[[], None], float] = {
            self.generate: 20,
            self.leave_a_stream: 5,
            self.cancel_prompts: 5,
            self.run_out_of_time: 2,
            self.score: 10,
            self.compute_log_probs: 10,
            self.compute_values: 10,
            self.train: 6,
            self.train_with_the_critic: 3,
            self.train_supervised: 3,
            self.publish: 4,
            self.pause: 1,
            self.save: 3,
            self.go_back: 2,
            self.look_around: 3,
        }

    def generate(self) -> None:
        """Samples, and compares the trajectories that are of one version of the weights."""
        for trajectory in harness.flat(self._rollout.generate(self._prompts(4))):
            self._compare(trajectory)

    def leave_a_stream(self) -> None:
        """Cancels a stream after at most three events."""
        prompts = [prompt.named(index) for index, prompt in enumerate(self._prompts(8))]
        events = self._rollout.stream(requests.submit(prompts))
        for _ in range(self._random.randrange(4)):
            next(events, None)
        events.close()

    def cancel_prompts(self) -> None:
        """Cancels every other prompt of a stream and waits for the rest."""
        prompts = [prompt.named(index) for index, prompt in enumerate(self._prompts(6))]
        with self._rollout.open_stream() as stream:
            stream.submit(prompts)
            stream.cancel([prompt.request_id for prompt in prompts[::2]])
            stream.half_close()
            for event in stream:
                if event.WhichOneof("event") == "finished":
                    self._compare(event.finished.trajectory)

    def run_out_of_time(self) -> None:
        """Generates with a deadline of at most 50 ms."""
        with contextlib.suppress(DeadlineError, CancelledError):
            self._rollout.generate(self._prompts(8), timeout_seconds=self._random.random() / 20)

    def score(self) -> None:
        """Scores a sequence under both models."""
        tokens = self._tokens(12)
        reply = self._rollout.score([(tokens, 1)], junior=True)
        self._replies.expect(f"Score {tokens}", reply.weights.digest, reply.sequences[0])

    def compute_log_probs(self) -> None:
        """Computes log-probs of SEQUENCES under the trainer's weights."""
        for sequence, reply in zip(
            SEQUENCES, self._trainer.compute_log_probs(SEQUENCES), strict=True
        ):
            digest = reply.weights.digest
            reply.weights.ClearField("version")
            self._replies.expect(f"ComputeLogProbs {sequence}", digest, reply)

    def compute_values(self) -> None:
        """Computes values of SEQUENCES under the critic's weights."""
        for sequence, reply in zip(SEQUENCES, self._critic.compute_values(SEQUENCES), strict=True):
            digest = reply.weights.digest
            reply.weights.ClearField("version")
            self._replies.expect(f"ComputeValues {sequence}", digest, reply)

    def train(self) -> None:
        """One GRPO step on samples of its own; another client's step may come first."""
        self._train_on_samples({"max_staleness": 100, "junior_token_loss_weight": 0.5})

    def train_with_the_critic(self) -> None:
        """One PPO step on samples of its own."""
        self._train_on_samples({"max_staleness": 100, "advantage_estimator": "gae"})

    def train_supervised(self) -> None:
        """One supervised step on fixed sequences."""
        self._trainer.train_step(
            SEQUENCES, run_id=self._name(), step=1, expected_version=self._trainer_version()
        )

    def publish(self) -> None:
        """Brings the rollout server to the trainer's weights."""
        with PUBLICATIONS:
            self._servers.publish()

    def pause(self) -> None:
        """Stops generation for a moment."""
        try:
            self._rollout.pause()
            time.sleep(self._random.random() / 50)
        finally:
            self._rollout.resume()

    def save(self) -> None:
        """Saves under a name that other clients use too."""
        number = self._random.randrange(3)
        folder = str(self._servers.base / "saved")
        self._trainer.save_checkpoint(folder, f"trainer-{number}", keep=2)
        self._critic.save_checkpoint(folder, f"critic-{number}", keep=2)

    def go_back(self) -> None:
        """Loads the checkpoints of the start."""
        self._trainer.load_checkpoint(str(self._servers.base / "trainer"))
        self._critic.load_checkpoint(str(self._servers.base / "critic"))

    def look_around(self) -> None:
        """Scrapes metrics and checks health, as monitoring does."""
        for client in (self._rollout, self._trainer, self._critic):
            client.info()
            if client.health() != "SERVING":
                raise DisturbanceError(f"the {client.role} server is not healthy")
        for server in self._servers:
            harness.metrics_text(server)

    def _train_on_samples(self, objective: Mapping[str, object]) -> None:
        version = self._trainer_version()
        groups = self._rollout.generate(self._prompts(2, samples=2))
        samples = [
            PolicySample(trajectory, f"group-{number}", reward=self._random.random())
            for number, group in enumerate(groups)
            for trajectory in group
        ]
        self._trainer.train_step(
            samples, run_id=self._name(), step=1, expected_version=version, objective=objective
        )

    def _trainer_version(self) -> int:
        return self._trainer.info().server.weights.version

    def _compare(self, trajectory: trajectory_pb2.Trajectory) -> None:
        if len(trajectory.senior_versions) != 1:
            return
        [run] = trajectory.senior_versions
        request = f"Generate {trajectory.prompt_token_ids} {trajectory.tandem} {trajectory.seed}"
        digest = run.weights.digest
        run.weights.ClearField("version")
        self._replies.expect(f"{request} {trajectory.sample_index}", digest, trajectory)

    def _prompts(self, most: int, samples: int = 1) -> list[Prompt]:
        """Some of ten prompts, so that other clients send the same requests."""
        return [
            Prompt(
                [number + 3, 50, 60],
                seed=number,
                num_samples=samples,
                sampling={"max_tokens": 12, "temperature": 0.9},
                tandem=list(harness.TANDEM.values())[number % len(harness.TANDEM)],
                return_other_logprobs=True,
            )
            for number in self._random.sample(range(10), 1 + self._random.randrange(most))
        ]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(5)] * count

    def _name(self) -> str:
        return f"run-{self._random.randrange(4)}"


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models = harness.make_models(Path(directory) / "models")
        with serving(Path(directory) / "run", models) as servers:
            soak = Soak(servers, options.seed)
            try:
                soak.run(options.minutes * 60, options.clients)
            except (DisturbanceError, RpcError) as error:
                print(error)
                return 1
            finally:
                print(soak.summary())
        if codes := {s.name: s.process.returncode for s in servers if s.process.returncode}:
            print(f"the servers did not drain: {codes}")
            return 1
    print(f"{options.minutes} minutes: nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
