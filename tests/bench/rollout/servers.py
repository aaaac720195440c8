"""Rollout servers of this project as sides."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from tandem.cluster.local import LocalCluster, Server
from tandem.errors import ServerStartError
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt
from tandem.settings.cluster import ClusterSettings

from rollout.turns import Job, Moment, Turn

OFF: Mapping[str, Any] = MappingProxyType({"enabled": False})
WORD: Mapping[str, Any] = MappingProxyType(
    {"enabled": True, "selection_strategy": "word", "prob_senior": 0.5}
)


_RECEIVED = "tandem_weight_bytes_received_total"


class NotSupportedError(Exception):
    """The server refuses a setting."""


class RolloutServer:
    """A running rollout server.

    Args:
        settings: of the server, without those that follow from `longest` and `sequences`.
        asked: further settings that a build may lack; a server that refuses one of them makes
            entering raise NotSupportedError.
        sequences: most that run at the same time.
        longest: most tokens of a sequence.
        trainer: settings of a trainer beside it, if there is to be one.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        sequences: int,
        longest: int,
        asked: Mapping[str, Any] = MappingProxyType({}),
        trainer: dict[str, Any] | None = None,
    ) -> None:
        self._asked = asked
        bounds = {"max_num_seqs": sequences, "max_model_len": longest}
        section = {**bounds, **settings, **asked}
        self.cluster = LocalCluster(
            ClusterSettings(directory=directory, rollout=[section], trainer=trainer)
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.cluster)
        except ServerStartError as error:
            if any(setting in str(error) for setting in self._asked):
                raise NotSupportedError(str(error)) from error
            raise
        self.client = self._stack.enter_context(RolloutClient(self.process.address))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def process(self) -> Server:
        """The server."""
        return self.cluster.rollouts[0]

    def received_by_transport(self) -> dict[str, float]:
        """Returns the bytes of weight updates that the server has accepted, by transport."""
        url = f"http://{self.process.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
        found = re.findall(rf'^{_RECEIVED}{{transport="(\w+)"}} (\S+)$', text, re.MULTILINE)
        return {transport: float(value) for transport, value in found}


def prompts_of(
    job: Job, tandem: Mapping[str, Any], *, streamed: int, token_ids: int = 20000
) -> list[Prompt]:
    """Returns a job's prompts; the first `streamed` of them stream their tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1000, token_ids, (job.sequences, job.prompt_tokens), generator=generator)
    return [
        Prompt(
            row.tolist(),
            seed=index,
            sampling={"max_tokens": job.new_tokens, "ignore_eos": True},
            tandem=tandem,
            stream_tokens=index < streamed,
        )
        for index, row in enumerate(rows)
    ]


class RolloutSide:
    """Requests to a rollout server: `tandem` is theirs, and `changes` are fields of every prompt.

    By default only the first prompt streams its tokens, of which the first one marks the end of the
    prefill: the prompts are admitted together and fit into one pass.
    """

    def __init__(
        self,
        server: RolloutServer,
        tandem: Mapping[str, Any],
        *,
        stream_all: bool = False,
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._server = server
        self._changes = changes
        self._tandem = tandem
        self._stream_all = stream_all

    def run(self, job: Job) -> Turn:
        """Does the job."""
        pids = [self._server.process.process.pid]
        streamed = job.sequences if self._stream_all else 1
        prompts = [
            dataclasses.replace(prompt, **self._changes)
            for prompt in prompts_of(job, self._tandem, streamed=streamed)
        ]
        first: list[Moment] = []

        def on_event(event: Any) -> None:
            if not first and event.WhichOneof("event") == "tokens":
                first.append(Moment.now(pids))

        begin = Moment.now(pids)
        groups = self._server.client.generate(prompts, on_event=on_event)
        end = Moment.now(pids)
        responses = [one for group in groups for one in group]
        lengths = {len(one.response_token_ids) for one in responses}
        if lengths != {job.new_tokens}:
            raise RuntimeError(f"responses of {lengths} tokens, not of {job.new_tokens}")
        authors = [one.authorship_mask for one in responses]
        return Turn(job, first[0] - begin, end - first[0], authors)


def greedy(server: RolloutServer, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns the senior's most likely continuation."""
    sampling = {"max_tokens": new_tokens, "ignore_eos": True, "temperature": 0.0}
    [[one]] = server.client.generate([Prompt(prompt, sampling=sampling, tandem=OFF)])
    return list(one.response_token_ids)
