"""The model in training: what its requests do, one at a time and in the order of their numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from tandem.errors import TandemError
from tandem.openai_server.errors import RequestError
from tandem.rpc.aio import AsyncTrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.tinker_server import limits
from tandem.tinker_server.answers import Losses, Plain
from tandem.tinker_server.authors import Authors
from tandem.tinker_server.checkpoints import Checkpoints, Saved
from tandem.tinker_server.datums import Example, example
from tandem.tinker_server.futures import Answer
from tandem.tinker_server.losses import kind_of, loss_of
from tandem.tinker_server.paths import TRAINING, CheckpointPath

# Losses of responses that a policy drew: their authors must be known.
_POLICY_LOSSES = frozenset({"importance_sampling", "ppo", "cispo", "gspo", "dro"})


class TrainedModel:
    """The one model that a trainer trains for its client.

    The trainer holds no gradient between two calls: forward_backward asks for log-probabilities and
    keeps the data with the derivatives of their losses, and the optimizer's step trains all data
    since the last one as one TrainStep.

    Attributes:
        id: its name, and the run_id of its steps.
        session: the session that made it.
        metadata: what its client said about it.
        adapter: fields of answers that say whether it is an adapter, and of which rank.
        version: that of the trainer's weights after its last step.
        publishes_back: whether its next publication may go to an older version.
        last_request: when it was last asked for something (seconds of the epoch).
    """

    def __init__(
        self,
        trainer: AsyncTrainerClient,
        authors: Authors | None,
        checkpoints: Checkpoints,
        junior_token_loss_weight: float,
        *,
        name: str,
        session: str,
        metadata: Mapping[str, Any],
        adapter: Mapping[str, Any],
        max_samples: int,
    ) -> None:
        """Arguments as in app.Settings; `authors` is None where no junior writes."""
        self._trainer = trainer
        self._authors = authors
        self._checkpoints = checkpoints
        self._junior_weight = junior_token_loss_weight
        self._max_samples = max_samples
        self.id = name
        self.session = session
        self.metadata = metadata
        self.adapter = adapter
        self.version = 0
        self.publishes_back = True
        self.last_request = time.time()
        self._steps = 0
        self._samples: list[SupervisedSample] = []
        self._tokens = 0
        self._next = 1
        self._waiting = 0
        self._ended = False
        self._turn = asyncio.Condition()

    def request_id(self, seq_id: int) -> str:
        """Returns the id of one of its requests; raises RequestError for a wrong number."""
        if seq_id < 1:
            raise RequestError("seq_id: is required, and counts from 1", "seq_id")
        if seq_id >= self._next + limits.MAX_WAITING:
            raise RequestError(f"seq_id: is {seq_id}, but {self._next} has not come", "seq_id")
        self.last_request = time.time()
        return f"{self.id}:{seq_id}"

    def is_done(self, seq_id: int) -> bool:
        """Returns whether the request with this number had its turn."""
        return seq_id < self._next

    async def in_turn(self, seq_id: int, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Runs a request after all with lower numbers; one that fails does not stop the others."""
        if self._waiting >= limits.MAX_WAITING:
            raise RequestError(
                f"{self._waiting} requests wait for their turn",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_seconds=1,
            )
        self._waiting += 1
        try:
            async with self._turn:
                await self._turn.wait_for(lambda: self._ended or self._next == seq_id)
        finally:
            self._waiting -= 1
        if self._ended:
            raise RequestError(f"model_id: {self.id} has ended", "model_id")
        try:
            return await work()
        finally:
            async with self._turn:
                self._next += 1
                self._turn.notify_all()

    async def end(self) -> None:
        """Refuses all requests that have not had their turn."""
        async with self._turn:
            self._ended = True
            self._turn.notify_all()

    async def losses(self, request: wire.ForwardBackwardRequest) -> Losses:
        """Computes losses; the next step learns them, unless only a forward pass is wanted."""
        kind_of(request.loss_fn)
        config = _config(request)
        if not request.data:
            raise RequestError("data: holds no datum", "data")
        examples = [example(datum, f"data[{i}]") for i, datum in enumerate(request.data)]
        tokens = sum(len(one.tokens) for one in examples)
        if not request.forward_only:
            self._check_room(len(examples), tokens)
        juniors = [self._junior(one, i, request.loss_fn) for i, one in enumerate(examples)]
        replies = await self._trainer.compute_log_probs([one.sample() for one in examples])
        value, logprobs, terms, samples = 0.0, [], [], []
        for i, (one, junior, reply) in enumerate(zip(examples, juniors, replies, strict=True)):
            self._check_version(reply.weights.version)
            own = from_tensor(reply.logprobs)
            try:
                loss = loss_of(request.loss_fn, config, own.astype(np.float64), one.inputs)
            except RequestError as error:
                raise RequestError(f"data[{i}]: {error.message}", error.param) from None
            value += loss.value
            logprobs.append(own)
            terms.append(loss.terms.astype(np.float32))
            samples.append(one.sample(np.where(junior, self._junior_weight, 1.0) * loss.weights))
        if not request.forward_only:
            self._samples += samples
            self._tokens += tokens
        return Losses({"logprobs": logprobs, "elementwise_loss": terms}, {"loss:sum": value})

    async def step(self, seq_id: int, params: types.OptimParams) -> Plain:
        """Makes the optimizer's step on all data since the last one."""
        if not isinstance(params, types.AdamParams):
            raise RequestError(
                f"optim_params: {params.type!r} is not served, adamw is", "optim_params"
            )
        if not self._samples:
            raise RequestError("optim_step: there was no forward_backward since the last step")
        reply = await self._trainer.train_step(
            self._samples,
            run_id=self.id,
            step=self._steps + 1,
            expected_version=self.version,
            objective={"aggregation": "token_sum"},
            optimizer={
                "learning_rate": params.learning_rate,
                "beta1": params.beta1,
                "beta2": params.beta2,
                "epsilon": params.eps,
                "weight_decay": params.weight_decay,
                "max_grad_norm": max(0.0, params.grad_clip_norm),
            },
            request_id=str(seq_id),
        )
        self._forget()
        self._steps += 1
        report = reply.report
        if report.skipped:
            raise TandemError(f"the step was left out: {report.skip_reason}")
        self.version = report.weights.version
        return Plain({"metrics": {name: float(one) for name, one in report.metrics.items()}})

    async def save(
        self, name: str, folder: str, *, overwrite: bool, metadata: Mapping[str, str]
    ) -> CheckpointPath:
        """Writes a checkpoint of weights and optimizer; returns its path."""
        path = CheckpointPath(self.id, folder, name)
        if path in self._checkpoints and not overwrite:
            raise RequestError(f"path: {path} exists; overwrite replaces it", "path")
        with self._checkpoints.using(path):
            await self._trainer.save_checkpoint(
                self._checkpoints.folder(path), name, expected_version=self.version
            )
            self._checkpoints.add(Saved(path, time.time(), metadata))
        return path

    async def load(self, path: str, *, optimizer: bool) -> CheckpointPath:
        """Goes on from a checkpoint, and forgets data that no step has learnt."""
        place = CheckpointPath.parse(path)
        if place.folder != TRAINING:
            raise RequestError(
                f"path: {place} is for sampling; {TRAINING} are for training", "path"
            )
        with self._checkpoints.using(place):
            weights = await self._trainer.load_checkpoint(
                self._checkpoints.directory(place), fresh_optimizer=not optimizer
            )
        self._begin(weights.version)
        return place

    async def load_base_model(self) -> None:
        """Begins with the weights of the trainer's start, and a new optimizer."""
        self._begin((await self._trainer.load_base_model()).version)

    def _begin(self, version: int) -> None:
        self.version = version
        self.publishes_back = True
        self._forget()

    def _forget(self) -> None:
        self._samples, self._tokens = [], 0

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise TandemError(
                f"the trainer is at version {version} of its weights, the model at {self.version}: "
                "another client trains, or the trainer has started since; load a checkpoint"
            )

    def _check_room(self, data: int, tokens: int) -> None:
        if len(self._samples) + data > self._max_samples:
            raise RequestError(
                f"data: {len(self._samples) + data} between two steps of the optimizer, at most "
                f"{self._max_samples} (max_samples of the trainer)",
                "data",
            )
        if self._tokens + tokens > limits.MAX_STEP_TOKENS:
            raise RequestError(
                f"data: {self._tokens + tokens} tokens between two steps of the optimizer, at most "
                f"{limits.MAX_STEP_TOKENS}",
                "data",
            )

    def _junior(self, one: Example, index: int, loss: str) -> Any:
        """Returns which targets the junior wrote."""
        nobody = np.zeros(len(one.targets), dtype=bool)
        if self._authors is None:
            return nobody
        place = f"data[{index}].loss_fn_input_spans"
        if not one.spans:
            if loss in _POLICY_LOSSES:
                raise RequestError(
                    f"{place}: is required by {loss} where a junior writes, too: a token without "
                    "provenance would be trained as the senior's",
                    place,
                )
            return nobody
        return self._authors.junior_tokens(one.spans, len(one.targets), place)


def _config(request: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    """Returns the settings of a loss, of which version 2 of the field goes first."""
    settings: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return settings
