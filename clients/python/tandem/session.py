"""Everything a run talks to: servers, tokenizer, data and reward, opened and closed together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import grpc

from tandem import settings as settings_module
from tandem.client import CriticClient, Event, RolloutClient, TrainerClient
from tandem.cluster import LocalCluster
from tandem.data import Dataset, load_dataset
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    RpcError,
    ServerStartError,
    TandemError,
    from_status,
)
from tandem.requests import Prompt
from tandem.rewards import Reward
from tandem.settings import ClusterSettings, RunSettings
from tandem.text import TextCodec
from tandem.types.v1 import server_pb2, trajectory_pb2


class RolloutPool:
    """Several rollout servers as one: prompts are dealt out in equal, contiguous parts."""

    def __init__(self, clients: Sequence[RolloutClient]) -> None:
        self.clients = list(clients)
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="rollout")

    def generate(
        self, prompts: Sequence[Prompt], on_event: Callable[[Event], None] | None = None
    ) -> list[list[trajectory_pb2.Trajectory]]:
        """The samples of every prompt, in order. One batch per server: see SubmitPrompts."""
        named = [prompt.named(index) for index, prompt in enumerate(prompts)]
        count = len(self.clients)
        bounds = [len(named) * i // count for i in range(count + 1)]
        parts = [named[a:b] for a, b in itertools.pairwise(bounds)]
        # A single server is called from this thread, so that Ctrl-C reaches the call.
        if count == 1:
            return self.clients[0].generate(named, on_event=on_event)
        futures = [
            self._threads.submit(client.generate, part, on_event=on_event)
            for client, part in zip(self.clients, parts, strict=True)
        ]
        return [samples for future in futures for samples in future.result()]

    def close(self) -> None:
        """Closes every client."""
        for client in self.clients:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Session:
    """An opened RunSettings; a context manager.

    Attributes:
        note: tells people what goes on.
    """

    rollouts: RolloutPool
    trainer: TrainerClient
    critic_address: str | None
    codec: TextCodec
    data: Dataset
    eval_data: Dataset | None
    reward: Reward
    cluster: LocalCluster | None = None

    def __init__(
        self, settings: RunSettings, on_progress: Callable[[str], None] | None = None
    ) -> None:
        self.settings = settings
        self.note = on_progress or (lambda _: None)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def check(self) -> None:
        """Raises ServerStartError when a server of the run's own cluster has died."""
        if self.cluster is not None:
            self.cluster.check()

    def publish(self) -> None:
        """Brings every rollout server to the trainer's weights.

        The trainer may reach them by other addresses than the client: those they report.
        """
        servers = [client.info().server for client in self.rollouts.clients]
        reply = self.trainer.publish_weights(server.advertised_address for server in servers)
        for result in reply.results:
            if result.status.code:
                failure = from_status(result.status, method="PublishWeights")
                failure.message = f"{result.target}: {failure.message}"
                raise failure
            if result.digest != reply.weights.digest:
                raise TandemError(f"{result.target} received other weights than were sent")

    def synchronize(self) -> int:
        """Publishes when a rollout server serves another version; returns the trainer's.

        Raises:
            FailedPreconditionError: a server has the trainer's version, but other weights. The
                version alone would hide that, and no publication would put it right.
        """
        trainer = self.trainer.info().server.weights
        stale = False
        for client in self.rollouts.clients:
            served = client.weights_version()
            stale = stale or served.version != trainer.version
            if served.version == trainer.version and served.digest != trainer.digest:
                raise _other_weights(client.address, served, trainer)
        if stale:
            self.publish()
        return trainer.version

    def serve_checkpoint(self, path: Path) -> int:
        """Loads a checkpoint into the trainer, then synchronize(); returns its version."""
        self.trainer.load_checkpoint(str(path))
        return self.synchronize()

    def critic(self) -> CriticClient:
        """A client of the run's critic; whoever asks for it closes it.

        Raises ConfigError when neither the settings nor the trainer name one.
        """
        if self.critic_address is None:
            raise ConfigError("servers.critic: not set, and the trainer has no critic_address")
        return CriticClient(
            self.critic_address, timeout_seconds=self.settings.servers.timeout_seconds
        )

    def _close(self, error: BaseException | None) -> None:
        with self._stack:
            if isinstance(error, RpcError):
                try:
                    self.check()
                except ServerStartError as death:
                    raise death from error

    def _open(self) -> None:
        settings = self.settings
        self.codec = TextCodec(settings.tokenizer)
        self.reward = self._stack.enter_context(closing(Reward(settings.reward)))
        data = load_dataset(settings.data, self.codec, settings.seed, note=self.note)
        self.eval_data = None
        if settings.eval.data is not None:
            self.eval_data = load_dataset(
                settings.eval.data, self.codec, field="eval.data", note=self.note
            )
            # What is held out is never trained on, also where two seeds make the same problem.
            data = data.without({key for held in self.eval_data.examples for key in held.keys})
        self.data = data

        servers = settings.servers
        if settings.cluster is not None:
            servers = self._start(settings.cluster)
        timeout = settings.servers.timeout_seconds
        self.trainer = self._stack.enter_context(
            TrainerClient(servers.trainer, timeout_seconds=timeout)
        )
        self.rollouts = RolloutPool(
            [RolloutClient(address, timeout_seconds=timeout) for address in servers.rollout]
        )
        self._stack.callback(self.rollouts.close)
        trainer = self.trainer.info()
        self.critic_address = servers.critic or trainer.critic_address or None
        longest = [client.info().server.model.max_model_len for client in self.rollouts.clients]
        self._require_short_prompts(min([*longest, trainer.server.model.max_model_len]))

    def _require_short_prompts(self, max_model_len: int) -> None:
        self.data.require_prompts_below(max_model_len)
        if self.eval_data is not None:
            self.eval_data.require_prompts_below(max_model_len, "eval.data")

    def _start(self, cluster_file: Path) -> settings_module.ServersSettings:
        settings = settings_module.load(ClusterSettings, cluster_file)
        for role in ("rollout", "trainer"):
            if getattr(settings, role) in (None, []):
                raise ConfigError(f"{cluster_file}: {role}: a run needs a {role} server")
        cluster = LocalCluster(settings, on_progress=self.note)
        self.cluster = self._stack.enter_context(cluster)
        return addresses_of(self.cluster)


def addresses_of(cluster: LocalCluster) -> settings_module.ServersSettings:
    """The addresses of a local cluster, as a run wants them."""
    return settings_module.ServersSettings(
        rollout=[server.address for server in cluster.rollouts],
        trainer=cluster.trainer.address,
        critic=cluster.critic.address if cluster.has("critic") else None,
    )


def _other_weights(
    address: str, served: server_pb2.WeightsVersion, trainer: server_pb2.WeightsVersion
) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{address} serves version {served.version} with digest {served.digest}, the trainer's "
        f"version {trainer.version} has {trainer.digest}: other weights",
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="WEIGHTS_DIFFER",
        hint="one of them was trained by another run, or went back to a checkpoint after the other "
        "had its weights: start both from the same model",
    )
