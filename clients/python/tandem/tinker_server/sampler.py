"""Sampling: sessions that draw from weights of the rollout server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.openai_server.admission import Admission
from tandem.openai_server.errors import RequestError
from tandem.rpc.aio import AsyncRolloutClient, AsyncTrainerClient
from tandem.rpc.requests import Prompt, ScoredTokens
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import from_tensor
from tandem.tinker_server import limits
from tandem.tinker_server.answers import Floats, SampledSequence, Samples, Top
from tandem.tinker_server.authors import Authors

_FINISH_STOP = trajectory_pb2.FINISH_REASON_STOP
# Fields of a request that rollout servers have nothing for, with what asks for nothing.
_REFUSED: dict[str, Any] = {
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": None,
}


@dataclass(frozen=True)
class SamplingSession:
    """The weights that a sampling client draws from.

    Attributes:
        id: its name.
        digest: that of the weights, for a session of fixed weights; None: whatever is published.
        path: the checkpoint that it names; None for the base model, and for unnamed weights.
    """

    id: str
    digest: str | None
    path: str | None


class Sampler:
    """A rollout server, which holds one version of the weights at a time."""

    def __init__(
        self,
        rollout: AsyncRolloutClient,
        admission: Admission,
        authors: Authors | None,
        model: str | None,
    ) -> None:
        """Arguments as in app.Settings; `authors` is None where no junior writes."""
        self.client = rollout
        self._admission = admission
        self._authors = authors
        self._name = model
        self._sessions: dict[str, SamplingSession] = {}
        # The weights of each checkpoint for sampling that this server made.
        self._checkpoints: dict[str, str] = {}
        self._drawing = 0
        self._changed = asyncio.Condition()
        self._published: str | None = None  # their digest, once this server has published

    async def info(self) -> rollout_pb2.GetServerInfoResponse:
        """Returns what the rollout server serves."""
        return await self.client.info()

    async def model_name(self) -> str:
        """Returns the name of the model that requests must give."""
        return self._name or Path((await self.info()).server.model.path).name

    def session(self, name: str) -> SamplingSession:
        """Returns a session; raises RequestError if there is none of that name."""
        if name not in self._sessions:
            raise RequestError(
                f"sampling_session_id: {name[:200]!r} is not known", "sampling_session_id"
            )
        return self._sessions[name]

    async def open_session(
        self, name: str, base_model: str | None, model_path: str | None
    ) -> SamplingSession:
        """Begins a session of the base model or of a checkpoint, if the rollout server holds it."""
        weights = (await self.info()).server.weights
        if model_path is not None:
            if model_path not in self._checkpoints:
                raise RequestError(
                    f"model_path: {model_path[:200]} was not saved for sampling by this server",
                    "model_path",
                )
            if self._checkpoints[model_path] != weights.digest:
                raise RequestError(
                    f"model_path: {model_path} is no longer held by the rollout server, which "
                    f"serves version {weights.version}; it holds one version at a time",
                    "model_path",
                )
        elif base_model is None:
            raise RequestError("base_model: is required without model_path", "base_model")
        elif weights.version != 0:
            raise RequestError(
                f"base_model: the rollout server holds version {weights.version}, not the base "
                "model; it holds one version at a time",
                "base_model",
            )
        return self._add(SamplingSession(name, weights.digest, model_path))

    async def publish(
        self, trainer: AsyncTrainerClient, *, back: bool
    ) -> server_pb2.WeightsVersion:
        """Sends the trainer's weights, once no session of fixed weights draws."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._drawing == 0)
            weights = await trainer.publish([self.client], allow_rollback=back)
            self._published = weights.digest
            return weights

    def name_checkpoint(self, path: str, weights: server_pb2.WeightsVersion) -> None:
        """Remembers the weights of a checkpoint for sampling."""
        self._checkpoints[path] = weights.digest

    def forget_checkpoint(self, path: str) -> None:
        """Forgets a checkpoint for sampling: no new session can name it."""
        self._checkpoints.pop(path, None)

    def add_session(self, name: str, weights: server_pb2.WeightsVersion, kind: str) -> None:
        """Begins a session of the weights that were published."""
        self._add(SamplingSession(name, weights.digest if kind == "snapshot" else None, None))

    async def sample(
        self, session: SamplingSession, request: types.SampleRequest, sequence_ids: Sequence[str]
    ) -> Samples:
        """Draws the samples of a request, named by `sequence_ids`."""
        prompt = request.prompt.to_ints()
        seed = request.sampling_params.seed
        asked = Prompt(
            prompt,
            seed=prompt_seed(0, request.seq_id or 0, 0, session.id)
            if seed is None
            else seed % 2**64,
            num_samples=request.num_samples,
            sampling=await self._sampling(request.sampling_params, len(prompt)),
            tandem={"enabled": self._authors is not None},
            num_top_logprobs=request.topk_sample_logprobs,
        )
        async with self._holding(session), self._admission.streams:
            [trajectories] = await self.client.generate([asked])
            prompt_logprobs, prompt_top = await self._score(request, prompt)
        for trajectory, name in zip(trajectories, sequence_ids, strict=True):
            self._check_weights(session, trajectory.senior_versions)
            if self._authors is not None:
                self._authors.remember(name, trajectory.authorship_mask)
        return Samples([_sequence(one) for one in trajectories], prompt_logprobs, prompt_top)

    async def _sampling(self, params: types.SamplingParams, prompt: int) -> dict[str, Any]:
        """Returns the fields of SamplingParams."""
        most = params.max_tokens
        if most is None:
            most = max(1, (await self.info()).server.model.max_model_len - prompt)
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        fields = {
            "max_tokens": most,
            "temperature": params.temperature,
            "top_k": max(0, params.top_k),
            "top_p": params.top_p,
        }
        if stop is None:
            return fields
        if not stop:
            return fields | {"ignore_eos": True}
        texts = [one for one in stop if isinstance(one, str)]
        ids = [one for one in stop if not isinstance(one, str)]
        return fields | {"stop": texts, "stop_token_ids": ids}

    async def _score(
        self, request: types.SampleRequest, prompt: Sequence[int]
    ) -> tuple[Floats | None, Top | None]:
        """Returns the log-probabilities of the prompt's tokens, and the likeliest at each place."""
        k = request.topk_prompt_logprobs
        if not request.prompt_logprobs and not k:
            return None, None
        last = request.prompt_logprobs_last_n
        first = 1 if last is None else len(prompt) - last
        logprobs = np.full(len(prompt), np.nan, dtype=np.float32)
        top = Top(
            np.full((len(prompt), k), -1, dtype=np.int32),
            np.zeros((len(prompt), k), dtype=np.float32),
        )
        if first < len(prompt):
            async with self._admission.scores:
                reply = await self.client.score(
                    [ScoredTokens(prompt, first)], temperature=1.0, num_top_logprobs=k
                )
            [scores] = reply.sequences
            logprobs[first:] = from_tensor(scores.senior_logprobs)
            if k:
                top.ids[first:] = from_tensor(scores.senior_top_token_ids)
                top.logprobs[first:] = from_tensor(scores.senior_top_logprobs)
        return (logprobs if request.prompt_logprobs else None), (top if k else None)

    @asynccontextmanager
    async def _holding(self, session: SamplingSession) -> AsyncIterator[None]:
        """Holds publications up while a session of fixed weights draws."""
        if session.digest is None:
            yield
            return
        async with self._changed:
            if self._published is not None and self._published != session.digest:
                raise RequestError(
                    f"sampling_session_id: {session.id} draws from weights that the rollout server "
                    "no longer holds; make a sampling client of the weights saved last",
                    "sampling_session_id",
                )
            self._drawing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._drawing -= 1
                self._changed.notify_all()

    def _check_weights(
        self, session: SamplingSession, runs: Sequence[trajectory_pb2.VersionRun]
    ) -> None:
        """Raises RequestError if other weights wrote than those of the session."""
        if session.digest is None:
            return
        for run in runs:
            if run.weights.digest != session.digest:
                raise RequestError(
                    f"sampling_session_id: another client has published version "
                    f"{run.weights.version} to the rollout server",
                    "sampling_session_id",
                )

    def _add(self, session: SamplingSession) -> SamplingSession:
        if session.id not in self._sessions and (
            len(self._sessions) >= limits.MAX_SAMPLING_SESSIONS
        ):
            del self._sessions[next(iter(self._sessions))]
        return self._sessions.setdefault(session.id, session)


def check_request(request: types.SampleRequest) -> None:
    """Raises RequestError for a request that asks for what rollout servers do not have."""
    for name, nothing in _REFUSED.items():
        if getattr(request, name) not in (nothing, False):
            raise RequestError(
                f"{name}: is not supported by rollout servers", name, code="unsupported_parameter"
            )
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise RequestError("prompt: only text is supported", "prompt", code="unsupported_parameter")
    if not request.prompt.length:
        raise RequestError("prompt: holds no token", "prompt")
    for name, most in (
        ("num_samples", limits.MAX_SAMPLES),
        ("topk_sample_logprobs", limits.MAX_TOP_LOGPROBS),
        ("topk_prompt_logprobs", limits.MAX_TOP_LOGPROBS),
    ):
        least = 1 if name == "num_samples" else 0
        if not least <= getattr(request, name) <= most:
            raise RequestError(f"{name}: must be {least} to {most}", name)
    last = request.prompt_logprobs_last_n
    if last is not None and not 1 <= last < request.prompt.length:
        raise RequestError(
            f"prompt_logprobs_last_n: must be 1 to {request.prompt.length - 1}",
            "prompt_logprobs_last_n",
        )


def capabilities(info: rollout_pb2.GetServerInfoResponse, name: str) -> Mapping[str, Any]:
    """Returns the answer of get_server_capabilities: the one model."""
    model = {
        "model_name": name,
        "max_context_length": info.server.model.max_model_len,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


def _sequence(trajectory: trajectory_pb2.Trajectory) -> SampledSequence:
    top = None
    if trajectory.HasField("top_token_ids"):
        top = Top(
            np.asarray(from_tensor(trajectory.top_token_ids), dtype=np.int32),
            np.asarray(from_tensor(trajectory.top_logprobs), dtype=np.float32),
        )
    return SampledSequence(
        np.array(trajectory.response_token_ids, dtype=np.int32),
        np.asarray(from_tensor(trajectory.author_logprobs), dtype=np.float32),
        trajectory.finish_reason == _FINISH_STOP,
        top,
    )
