"""The web application: routes, requests and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tinker import types

from tandem._proto.types.v1 import server_pb2
from tandem.errors import TandemError, UnsavedUpdatesError
from tandem.openai_server import limits as body_limits
from tandem.openai_server.admission import Admission
from tandem.openai_server.errors import RequestError
from tandem.openai_server.fields import json_of
from tandem.openai_server.pages import HANDLERS, Endpoint, Json, check_key, guarded
from tandem.rpc.aio import AsyncRolloutClient, AsyncTrainerClient
from tandem.rpc.credentials import Credentials, WatchedFiles
from tandem.tinker_server import limits, refused, runs
from tandem.tinker_server.adapters import check_adapter, described, trained_parts
from tandem.tinker_server.answers import Plain
from tandem.tinker_server.authors import Authors
from tandem.tinker_server.bodies import Asked, decompressed, digest, parsed
from tandem.tinker_server.checkpoints import Checkpoints
from tandem.tinker_server.datums import request_of_bytes, request_of_json
from tandem.tinker_server.errors import failure_object, status_of
from tandem.tinker_server.futures import Answer, Futures
from tandem.tinker_server.paths import SAMPLER, TRAINING, CheckpointPath
from tandem.tinker_server.sampler import Sampler, capabilities, check_request
from tandem.tinker_server.sessions import ClientSessions
from tandem.tinker_server.trained_model import TrainedModel

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Settings:
    """The server's options.

    Attributes:
        trainer: the trainer's address.
        rollout: the rollout server's.
        checkpoints: the directory of checkpoints on the trainer's file system.
        model: the name of the model that requests must give; None: that of its directory.
        tandem: whether the junior of the rollout server writes, too.
        junior_token_loss_weight: the weight of its tokens in losses, 0 to 1.
        unembed_optional: whether a client that asks for adapters of the output layer gets the
            others.
        credentials: those for both servers; None: those of the environment.
        api_keys: keys, one of which a request must show; None: any request is answered.
    """

    trainer: str
    rollout: str
    checkpoints: str
    model: str | None = None
    tandem: bool = False
    junior_token_loss_weight: float = 0.0
    unembed_optional: bool = False
    credentials: Credentials | None = None
    api_keys: WatchedFiles[tuple[str, ...]] | None = None


def application(settings: Settings) -> Starlette:
    """Returns the ASGI application."""
    server = _Server(settings)

    def keyed(endpoint: Endpoint) -> Endpoint:
        async def run(request: Request) -> Response:
            _check_key(request, settings.api_keys)
            with server.admission.request():
                return await endpoint(request)

        return guarded(run, status_of)

    def page(method: str, path: str, endpoint: Endpoint) -> Route:
        return Route(f"/api/v1/{path}", keyed(endpoint), methods=[method])

    def get(path: str, endpoint: Endpoint) -> Route:
        return page("GET", path, endpoint)

    def post(path: str, endpoint: Endpoint) -> Route:
        return page("POST", path, endpoint)

    checkpoint = "training_runs/{run}/checkpoints/{checkpoint:path}"
    routes = [
        *(
            page(method, path, refused.refusal(path, why))
            for (method, path), why in refused.PAGES.items()
        ),
        Route("/api/v1/healthz", guarded(server.health, status_of), methods=["GET"]),
        post("client/config", server.client_config),
        post("client/dynamic_config", server.dynamic_config),
        post("auth/token", server.auth_token),
        get("get_server_capabilities", server.capabilities),
        post("telemetry", server.telemetry),
        post("create_session", server.create_session),
        post("session_heartbeat", server.heartbeat),
        get("sessions", server.list_sessions),
        get("sessions/{session}", server.get_session),
        post("sessions/{session}/finish", server.finish_session),
        post("create_model", server.create_model),
        post("unload_model", server.unload_model),
        post("get_info", server.get_info),
        post("forward", server.forward),
        post("forward_backward", server.forward_backward),
        post("optim_step", server.optim_step),
        post("save_weights", server.save_weights),
        post("save_weights_for_sampler", server.save_weights_for_sampler),
        post("load_weights", server.load_weights),
        post("weights_info", server.weights_info),
        get("training_runs", server.list_runs),
        get("training_runs/{run}", server.get_run),
        get("training_runs/{run}/checkpoints", server.list_checkpoints),
        page("PUT", f"{checkpoint}/ttl", server.set_ttl),
        page("DELETE", checkpoint, server.delete_checkpoint),
        get("checkpoints", server.list_all_checkpoints),
        post("create_sampling_session", server.create_sampling_session),
        get("samplers/{sampler}", server.get_sampler),
        get("sequences/{sequence:path}", server.get_sequence),
        post("asample", server.asample),
        post("retrieve_future", server.retrieve_future),
        post("cancel_future", server.cancel_future),
    ]
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=HANDLERS)


def _check_key(request: Request, keys: WatchedFiles[tuple[str, ...]] | None) -> None:
    """Raises RequestError unless the request shows one of the keys."""
    if keys is not None:
        check_key(request.headers.get("x-api-key", ""), keys)


class _Server:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.admission = Admission()
        self._sessions = ClientSessions()
        self._checkpoints = Checkpoints(settings.checkpoints)
        self._authors = Authors() if settings.tandem else None
        self._model: TrainedModel | None = None
        self._creating = asyncio.Lock()
        # Whether the trainer's weights are those of a model of this server.
        self._trained_here = False
        self._trainer: AsyncTrainerClient
        self._sampler: Sampler
        self._futures: Futures

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Holds the channels while the application runs."""
        settings = self._settings
        async with AsyncExitStack() as held:
            connect = held.enter_async_context
            self._trainer = await connect(
                AsyncTrainerClient(settings.trainer, credentials=settings.credentials)
            )
            rollout = await connect(
                AsyncRolloutClient(settings.rollout, credentials=settings.credentials)
            )
            self._sampler = Sampler(rollout, self.admission, self._authors, settings.model)
            self._futures = Futures()
            held.push_async_callback(self._futures.stop)
            yield

    # Pages about the server and its clients.

    async def health(self, request: Request) -> Response:
        """Says whether both servers serve."""
        for client in (self._trainer, self._sampler.client):
            health = await client.check_health()
            if health.status != "SERVING":
                status = HTTPStatus.SERVICE_UNAVAILABLE
                return Json({"status": health.status, "reason": health.reason}, status)
        return Json({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        """Tells the SDK how to send requests: in their order, and with the key itself."""
        return Json(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": False,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_len": limits.MAX_CHUNK_DATA,
                "fwdbwd_max_chunk_bytes_count": limits.MAX_CHUNK_BYTES,
                "sample_max_concurrent_requests": body_limits.MAX_REQUESTS // 2,
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        """Tells the SDK that samples that nobody waits for may be cancelled."""
        return Json({"sample_cancel_enabled": True})

    async def auth_token(self, request: Request) -> Response:
        """Keys are not exchanged; client/config says so."""
        raise RequestError(
            "auth/token: is not served; this server takes the API key itself (X-API-Key)",
            code="unsupported_parameter",
        )

    async def capabilities(self, request: Request) -> Response:
        """Lists the one model."""
        name = await self._sampler.model_name()
        return Json(capabilities(await self._sampler.info(), name))

    async def telemetry(self, request: Request) -> Response:
        """Takes what the SDK tells about itself, and keeps nothing of it."""
        async with self.admission.body(request):
            return Json({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        """Begins the session of a client."""
        asked = await self._asked(request, types.CreateSessionRequest)
        name = self._sessions.begin(asked.user_metadata)
        return Json({"type": "create_session", "session_id": name})

    async def heartbeat(self, request: Request) -> Response:
        """Keeps a session."""
        asked = await self._asked(request, types.SessionHeartbeatRequest)
        self._sessions.find(asked.session_id)
        return Json({"type": "session_heartbeat"})

    async def list_sessions(self, request: Request) -> Response:
        """Lists the sessions."""
        return Json(runs.page("sessions", self._sessions.names(), request.query_params))

    async def get_session(self, request: Request) -> Response:
        """Describes a session."""
        session = self._sessions.find(request.path_params["session"])
        metadata = {name: str(value) for name, value in session.metadata.items()}
        return Json(
            {
                "training_run_ids": session.runs,
                "sampler_ids": session.samplers,
                "user_metadata": metadata,
            }
        )

    async def finish_session(self, request: Request) -> Response:
        """Ends a session; its model makes room for the next one."""
        self._sessions.find(request.path_params["session"]).ended = True
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # The model in training.

    async def create_model(self, request: Request) -> Response:
        """Begins to train the base model."""
        asked = await self._asked(request, types.CreateModelRequest)
        check_adapter(
            asked.lora_config,
            await self._trained(),
            unembed_optional=self._settings.unembed_optional,
        )
        await self._check_base_model(asked.base_model)
        _check_optimizer(asked.optimizer_config)
        name = f"{asked.session_id}:train:{asked.model_seq_id}"

        async def begin() -> Answer:
            model = await self._new_model(name, asked.session_id, asked.user_metadata)
            await model.load_base_model()
            self._model = model
            return Plain({"type": "create_model", "model_id": name})

        return self._begin_model(name, asked, begin)

    async def load_weights(self, request: Request) -> Response:
        """Loads a checkpoint into the model in training, or begins a model with it."""
        asked = await self._asked(request, types.LoadWeightsRequest)
        CheckpointPath.parse(asked.path)
        if asked.weights_access_token is not None:
            raise RequestError(
                "weights_access_token: is not supported; checkpoints have no owners",
                "weights_access_token",
                code="unsupported_parameter",
            )
        if asked.optimizer_config is not None:
            _check_optimizer(asked.optimizer_config)
        if asked.model_id is not None:
            model = self._find_model(asked.model_id)

            async def load() -> Answer:
                place = await model.load(asked.path, optimizer=asked.optimizer)
                return Plain({"type": "load_weights", "path": str(place), "model_id": model.id})

            return self._begin(model, asked.seq_id, digest(asked), load)
        if asked.session_id is None or asked.model_seq_id is None:
            raise RequestError("model_id: is required without session_id and model_seq_id")
        if asked.base_model is not None:
            await self._check_base_model(asked.base_model)
        name = f"{asked.session_id}:train:{asked.model_seq_id}"
        session = asked.session_id

        async def begin() -> Answer:
            model = await self._new_model(name, session, asked.user_metadata)
            place = await model.load(asked.path, optimizer=asked.optimizer)
            self._model = model
            return Plain({"type": "load_weights", "path": str(place), "model_id": name})

        return self._begin_model(name, asked, begin)

    async def unload_model(self, request: Request) -> Response:
        """Ends the model in training, and forgets what no checkpoint has."""
        asked = await self._asked(request, types.UnloadModelRequest)
        model = self._find_model(asked.model_id)

        async def end() -> Answer:
            await self._end_model()
            return Plain({"type": "unload_model", "model_id": model.id})

        name = f"{model.id}:unload"
        self._futures.begin(name, digest(asked), end)
        return Json({"request_id": name, "model_id": model.id})

    async def get_info(self, request: Request) -> Response:
        """Describes the model in training."""
        asked = await self._asked(request, types.GetInfoRequest)
        model = self._find_model(asked.model_id)
        served = await self._trained()
        name = await self._sampler.model_name()
        return Json(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": name,
                "model_data": {
                    "arch": served.model_type,
                    "model_name": name,
                    "tokenizer_id": served.path,
                },
                **model.adapter,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        """Computes losses and, unless told otherwise, their gradients."""
        return await self._losses(request, forward_only=None)

    async def forward(self, request: Request) -> Response:
        """Computes losses."""
        return await self._losses(request, forward_only=True)

    async def optim_step(self, request: Request) -> Response:
        """Makes a step of the optimizer."""
        asked = await self._asked(request, types.OptimStepRequest)
        model = self._find_model(asked.model_id)
        seq_id = asked.seq_id or 0
        return self._begin(
            model, seq_id, digest(asked), lambda: model.step(seq_id, asked.optim_params)
        )

    async def save_weights(self, request: Request) -> Response:
        """Writes a checkpoint."""
        asked = await self._asked(request, types.SaveWeightsRequest)
        model = self._find_model(asked.model_id)

        async def save() -> Answer:
            place = await model.save(
                asked.path or f"step-{asked.seq_id}",
                TRAINING,
                overwrite=asked.overwrite,
                metadata=asked.user_metadata or {},
            )
            return Plain({"type": "save_weights", "path": str(place)})

        return self._begin(model, asked.seq_id, digest(asked), save)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """Gives the rollout server the trainer's weights; with a name also writes a checkpoint."""
        asked = await self._asked(request, types.SaveWeightsForSamplerRequest)
        model = self._find_model(asked.model_id)

        async def save() -> Answer:
            fields: dict[str, Any] = {"type": "save_weights_for_sampler"}
            place = None
            if asked.path is not None:
                metadata = asked.user_metadata or {}
                place = await model.save(asked.path, SAMPLER, overwrite=False, metadata=metadata)
            weights = await self._sampler.publish(self._trainer, back=model.publishes_back)
            model.publishes_back = False
            if place is not None:
                self._sampler.name_checkpoint(str(place), weights)
                return Plain(fields | {"path": str(place)})
            name = self._sampling_session(model.session, asked.sampling_session_seq_id or 0)
            self._sampler.add_session(name, weights, asked.kind)
            return Plain(fields | {"sampling_session_id": name})

        return self._begin(model, asked.seq_id, digest(asked), save)

    # Runs and their checkpoints.

    async def list_runs(self, request: Request) -> Response:
        """Lists the one run."""
        found = [] if self._model is None else [await self._run(self._model)]
        return Json(runs.page("training_runs", found, request.query_params))

    async def get_run(self, request: Request) -> Response:
        """Describes the run."""
        return Json(await self._run(self._find_model(request.path_params["run"])))

    async def list_checkpoints(self, request: Request) -> Response:
        """Lists the checkpoints of a run, which may have ended."""
        run = request.path_params["run"]
        saved = self._checkpoints.of(run)
        if not saved:
            self._find_model(run)
        return Json({"checkpoints": runs.checkpoints(saved)})

    async def list_all_checkpoints(self, request: Request) -> Response:
        """Lists the checkpoints of all runs."""
        found = runs.checkpoints(self._checkpoints.all())
        return Json(runs.page("checkpoints", found, request.query_params))

    async def delete_checkpoint(self, request: Request) -> Response:
        """Deletes a checkpoint; sampling clients that have its weights go on."""
        deleted = await self._checkpoints.delete(_checkpoint(request))
        self._sampler.forget_checkpoint(str(deleted))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def set_ttl(self, request: Request) -> Response:
        """Checkpoints never expire, which is all that a client may ask for."""
        _checkpoint(request)
        async with self.admission.body(request) as body:
            given = json_of(body)
        if not isinstance(given, dict) or given.get("ttl_seconds") is not None:
            raise RequestError(
                "ttl_seconds: must be null: checkpoints do not expire; delete them",
                "ttl_seconds",
                code="unsupported_parameter",
            )
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def weights_info(self, request: Request) -> Response:
        """Describes a checkpoint: every one has what the trainer trains."""
        async with self.admission.body(request) as body:
            given = json_of(body)
        path = given.get("tinker_path") if isinstance(given, dict) else None
        CheckpointPath.parse(str(path), "tinker_path")
        name = await self._sampler.model_name()
        model = await self._trained()
        return Json({"base_model": name, **described(model), **trained_parts(model)})

    # Sampling.

    async def create_sampling_session(self, request: Request) -> Response:
        """Begins a sampling session of the base model or of a checkpoint."""
        asked = await self._asked(request, types.CreateSamplingSessionRequest)
        self._sessions.find(asked.session_id)
        if asked.base_model is not None:
            await self._check_base_model(asked.base_model)
        name = self._sampling_session(asked.session_id, asked.sampling_session_seq_id)
        await self._sampler.open_session(name, asked.base_model, asked.model_path)
        return Json({"type": "create_sampling_session", "sampling_session_id": name})

    async def get_sampler(self, request: Request) -> Response:
        """Describes a sampling session."""
        session = self._sampler.session(request.path_params["sampler"])
        name = await self._sampler.model_name()
        return Json({"sampler_id": session.id, "base_model": name, "model_path": session.path})

    async def get_sequence(self, request: Request) -> Response:
        """Says who wrote a sampled sequence, as spans of two sequence ids."""
        if self._authors is None:
            raise RequestError("sequence_id: no junior writes here; --tandem lets it")
        return Json({"spans": self._authors.spans(request.path_params["sequence"])})

    async def asample(self, request: Request) -> Response:
        """Draws samples."""
        asked = await self._asked(request, types.SampleRequest)
        check_request(asked)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise RequestError("sampling_session_id: is required, with seq_id")
        session = self._sampler.session(asked.sampling_session_id)
        name = f"{session.id}:{asked.seq_id}"
        ids = [f"{name}:{index}" for index in range(asked.num_samples)]
        self._futures.begin(name, digest(asked), lambda: self._sampler.sample(session, asked, ids))
        return Json({"request_id": name, "sample_sequence_ids": ids})

    async def retrieve_future(self, request: Request) -> Response:
        """Gives the answer of a request, once there is one; 408 asks the client to ask again."""
        asked = await self._asked(request, types.FutureRetrieveRequest)
        try:
            answer = await self._futures.answer(asked.request_id, limits.WAIT_SECONDS)
        except RequestError as error:
            if not self._futures.knows(asked.request_id):
                raise
            return Json(failure_object(error))
        except TandemError as error:
            return Json(failure_object(error))
        if answer is None:
            waits = {"type": "try_again", "queue_state": "active", "request_id": asked.request_id}
            return Json(waits, HTTPStatus.REQUEST_TIMEOUT)
        if PROTOBUF in request.headers.get("accept", ""):
            message = await asyncio.to_thread(answer.proto)
            if message is not None:
                return Response(message, media_type=PROTOBUF)
        return Json(await asyncio.to_thread(answer.json))

    async def cancel_future(self, request: Request) -> Response:
        """Ends sampling that nobody waits for; training continues."""
        asked = await self._asked(request, types.FutureRetrieveRequest)
        if ":train:" not in asked.request_id:
            self._futures.cancel(asked.request_id)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # Helpers.

    async def _asked(self, request: Request, kind: type[Asked]) -> Asked:
        """Returns the request in a JSON body; raises RequestError, which names the field."""
        async with self.admission.body(request) as body:
            given = await asyncio.to_thread(json_of, body)
            return await asyncio.to_thread(parsed, kind, given)

    async def _losses(self, request: Request, forward_only: bool | None) -> Response:
        async with self.admission.body(request) as body:
            plain = await asyncio.to_thread(
                decompressed, request.headers.get("content-encoding", ""), body
            )
            if request.headers.get("content-type", "").startswith(PROTOBUF):
                asked = await asyncio.to_thread(request_of_bytes, plain)
            else:
                given = await asyncio.to_thread(json_of, plain)
                asked = await asyncio.to_thread(request_of_json, given)
        if forward_only is not None:
            asked.forward_only = forward_only
        model = self._find_model(asked.model_id)
        payload = await asyncio.to_thread(digest, asked)
        return self._begin(model, asked.seq_id, payload, lambda: model.losses(asked))

    def _begin(
        self,
        model: TrainedModel,
        seq_id: int | None,
        payload: str,
        work: Callable[[], Awaitable[Answer]],
    ) -> Response:
        """Starts a request of the model in its turn, unless it was begun before."""
        self._sessions.find(model.session)
        number = seq_id or 0
        name = model.request_id(number)
        if model.is_done(number) and not self._futures.knows(name):
            raise RequestError(f"seq_id: {number} was answered, and its answer is gone", "seq_id")
        self._futures.begin(name, payload, lambda: model.in_turn(number, work))
        return Json({"request_id": name, "model_id": model.id})

    def _begin_model(
        self, name: str, asked: pydantic.BaseModel, work: Callable[[], Awaitable[Answer]]
    ) -> Response:
        """Starts a model, unless it was begun before; raises RequestError if too many are held."""
        request_id = f"{name}:create"
        if not self._futures.knows(request_id):
            self._check_room()

        async def alone() -> Answer:
            async with self._creating:
                self._check_room()
                return await work()

        self._futures.begin(request_id, digest(asked), alone)
        return Json({"request_id": request_id, "model_id": name})

    def _check_room(self) -> None:
        model = self._model
        if model is not None and self._sessions.lives(model.session):
            raise RequestError(
                f"create_model: {model.id} trains; the server trains one model at a time, until "
                "unload_model ends it, or its client closes its session or is silent for "
                f"{limits.SESSION_SECONDS} s",
                code="one_model_at_a_time",
            )

    async def _new_model(
        self, name: str, session: str, metadata: Mapping[str, Any] | None
    ) -> TrainedModel:
        """Returns a model without weights; raises an error where others would be lost."""
        self._sessions.find(session).runs.append(name)
        info = await self._trainer.info()
        if info.unsaved and not self._trained_here:
            raise UnsavedUpdatesError(
                "the trainer holds updates that no checkpoint has, of another client than this "
                "server; save them, or start the trainer again"
            )
        self._trained_here = True
        await self._end_model()
        return TrainedModel(
            self._trainer,
            self._authors,
            self._checkpoints,
            self._settings.junior_token_loss_weight,
            name=name,
            session=session,
            metadata=metadata or {},
            adapter=described(info.server.model),
            max_samples=info.max_samples,
        )

    async def _run(self, model: TrainedModel) -> dict[str, Any]:
        return runs.run(model, await self._sampler.model_name(), self._checkpoints.of(model.id))

    async def _trained(self) -> server_pb2.ModelInfo:
        return (await self._trainer.info()).server.model

    async def _end_model(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            await model.end()

    def _find_model(self, name: str) -> TrainedModel:
        if self._model is None or self._model.id != name:
            raise RequestError(
                f"model_id: {name[:200]!r} is not in training",
                "model_id",
                status=HTTPStatus.NOT_FOUND,
            )
        return self._model

    async def _check_base_model(self, name: str) -> None:
        served = await self._sampler.model_name()
        path = (await self._sampler.info()).server.model.path
        if name not in (served, path):
            raise RequestError(
                f"base_model: {name[:200]!r} is not served, {served!r} is",
                "base_model",
                code="model_not_found",
            )

    def _sampling_session(self, session: str, number: int) -> str:
        name = f"{session}:sample:{number}"
        self._sessions.find(session).samplers.append(name)
        return name


def _checkpoint(request: Request) -> CheckpointPath:
    """Returns the checkpoint that a page is about."""
    run, name = request.path_params["run"], request.path_params["checkpoint"]
    return CheckpointPath.parse(f"tinker://{run}/{name}")


def _check_optimizer(config: types.OptimizerConfig) -> None:
    if not isinstance(config, types.AdamOptimizerConfig):
        raise RequestError(
            f"optimizer_config.type: {config.type!r} is not served, adamw is",
            "optimizer_config.type",
            code="unsupported_parameter",
        )
