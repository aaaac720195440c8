"""The web application: routes, requests and streams."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.aio import AsyncRolloutClient
from tandem.credentials import Credentials, WatchedFiles
from tandem.errors import REQUEST_ID_KEY, ConfigError, TandemError
from tandem.images import VisionInput
from tandem.openai_server.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    prompt_text,
    usage,
)
from tandem.openai_server.choices import Choice, generate, score
from tandem.openai_server.errors import (
    CLIENT_CLOSED_REQUEST,
    RequestError,
    error_headers,
    error_object,
    http_status,
)
from tandem.openai_server.fields import ChatRequest, CompletionRequest, parse
from tandem.requests import Prompt, ScoredTokens
from tandem.schedule import prompt_seed
from tandem.text import TextCodec
from tandem.transport import CALLER_REQUEST_ID, RetryPolicy
from tandem.types.v1 import sampling_pb2
from tandem.wire import to_message

# OpenAI's default for /v1/completions.
DEFAULT_MAX_TOKENS = 16
# Most bytes of a request's body: ids as JSON take more than in the 4 MiB of a message.
MAX_BODY_BYTES = 32 << 20
# An id of a request that a rollout server accepts.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Settings:
    """The server's options.

    Attributes:
        address: the rollout server's.
        codec: its tokenizer.
        model: the name of the model that requests must give.
        max_model_len: most tokens of prompt and response.
        tandem: whether the junior takes part where a request does not say.
        speculative: fields of SpeculativeConfig, of all responses.
        timeout_seconds: longest time of a request.
        credentials: those for the rollout server; None: those of the environment.
        api_keys: keys, one of which a request must show; None: any request is answered.
    """

    address: str
    codec: TextCodec
    model: str
    max_model_len: int
    tandem: bool = False
    speculative: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 3600.0
    credentials: Credentials | None = None
    api_keys: WatchedFiles[tuple[str, ...]] | None = None


@dataclass
class Job:
    """A request with what it needs from the rollout server."""

    request: CompletionRequest | ChatRequest
    answer: Answer
    prompts: list[list[int]]
    choices: list[Choice]
    submitted: list[Prompt]
    logprobs: bool
    likeliest: bool
    echo: bool

    def text(self, choice: Choice, text: str) -> str:
        """Returns a whole choice's text as the answer shows it."""
        return (prompt_text(choice)[0] if self.echo else "") + text


Endpoint = Callable[[Request], Awaitable[Response]]


def application(settings: Settings) -> Starlette:
    """Returns the ASGI application."""
    server = _Server(settings)

    def keyed(endpoint: Endpoint) -> Endpoint:
        async def run(request: Request) -> Response:
            _check_key(request, settings.api_keys)
            return await endpoint(request)

        return _guarded(run)

    routes = [
        Route("/health", _guarded(server.health)),
        Route("/v1/models", keyed(server.models)),
        Route("/v1/models/{name:path}", keyed(server.one_model)),
        Route("/v1/completions", keyed(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", keyed(server.chat), methods=["POST"]),
    ]
    handlers = {404: _no_such_page, 405: _no_such_page, 500: _failure}
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=handlers)


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        """Returns ASCII: what a client sent, and an error shows, may be no Unicode text."""
        return json.dumps(content).encode()


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Gives a request its id and failures their JSON."""

    async def run(request: Request) -> Response:
        given = request.headers.get(REQUEST_ID_KEY, "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        CALLER_REQUEST_ID.set(name)
        try:
            response = await endpoint(request)
        except TandemError as error:
            headers = error_headers(error)
            response = _Json(error_object(error), http_status(error), headers)
        response.headers[REQUEST_ID_KEY] = name
        return response

    return run


def _check_key(request: Request, keys: WatchedFiles[tuple[str, ...]] | None) -> None:
    """Raises RequestError unless the request shows one of the keys."""
    if keys is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    known = [hmac.compare_digest(shown.strip().encode(), key.encode()) for key in keys.contents()]
    if scheme.lower() != "bearer" or not any(known):
        raise RequestError(
            "the API key is not one of this server's",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", HTTPStatus.NOT_FOUND)
    problem = RequestError(f"{request.method} {request.url.path}: no such page", status=status)
    return _Json(error_object(problem), status)


async def _failure(request: Request, error: Exception) -> Response:
    # The error itself is in the server's log.
    problem = TandemError("the server failed; its log says why")
    return _Json(error_object(problem), HTTPStatus.INTERNAL_SERVER_ERROR)


class _Server:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = int(time.time())
        self._client: AsyncRolloutClient

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Holds the channel while the application runs."""
        self._client = AsyncRolloutClient(
            self._settings.address,
            timeout_seconds=self._settings.timeout_seconds,
            credentials=self._settings.credentials,
            # Back-pressure is for the HTTP client, which waits and calls again.
            retry=RetryPolicy(attempts=1),
        )
        async with self._client:
            yield

    async def health(self, request: Request) -> Response:
        """Says whether the rollout server serves."""
        health = await self._client.check_health()
        serving = health.status == "SERVING"
        status = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
        return _Json({"status": health.status, "reason": health.reason}, status)

    async def models(self, request: Request) -> Response:
        """Lists the one model."""
        return _Json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """Describes the one model."""
        self._check_model(request.path_params["name"])
        return _Json(self._model())

    async def completions(self, request: Request) -> Response:
        """Continues texts."""
        asked = parse(CompletionRequest, await _json(request))
        self._check_model(asked.model)
        prompts = await asyncio.to_thread(self._encode, asked.prompt)
        count = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        job = await self._job(asked, CompletionAnswer, prompts, [count] * len(prompts))
        job.echo = bool(asked.echo)
        job.logprobs = asked.logprobs is not None
        job.likeliest = bool(asked.logprobs)
        return await self._respond(request, job)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        asked = parse(ChatRequest, await _json(request))
        self._check_model(asked.model)
        messages = [message.record() for message in asked.messages]
        try:
            prompt, images = await asyncio.to_thread(
                self._settings.codec.chat_with_images, messages
            )
        except ConfigError as error:
            raise RequestError(error.message, "messages") from None
        room = max(1, self._settings.max_model_len - len(prompt))
        count = asked.max_completion_tokens or asked.max_tokens or room
        job = await self._job(asked, ChatAnswer, [prompt], [count], images)
        job.logprobs, job.likeliest = bool(asked.logprobs), bool(asked.top_logprobs)
        return await self._respond(request, job)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "max_model_len": self._settings.max_model_len,
        }

    def _check_model(self, name: str) -> None:
        if name != self._settings.model:
            raise RequestError(
                f"model: {name!r} is not served, {self._settings.model!r} is",
                "model",
                status=HTTPStatus.NOT_FOUND,
                code="model_not_found",
            )

    def _encode(self, prompt: str | Sequence[Any]) -> list[list[int]]:
        """Returns the ids of every prompt of /v1/completions."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise RequestError("prompt: is empty", "prompt")
        encode = self._settings.codec.encode
        try:
            ids = [encode(one) if isinstance(one, str) else list(one) for one in prompt]
        except ConfigError as error:
            raise RequestError(error.message, "prompt") from None
        if not all(ids):
            raise RequestError("prompt: a prompt must have a token", "prompt")
        return ids

    async def _job(
        self,
        asked: CompletionRequest | ChatRequest,
        kind: type[Answer],
        prompts: list[list[int]],
        max_tokens: Sequence[int],
        images: Sequence[VisionInput] = (),
    ) -> Job:
        codec = self._settings.codec
        ids = {text: codec.special_token_id(text) for text in asked.stop_texts}
        # Special tokens are no part of the text: the rollout server finds them.
        stop_ids = [token for token in ids.values() if token is not None]
        stops = [text for text, token in ids.items() if token is None]
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        tandem = {"enabled": self._settings.tandem if asked.tandem is None else True}
        tandem |= asked.tandem or {}
        try:
            to_message(tandem, sampling_pb2.TandemConfig(), "tandem")
        except ConfigError as error:
            raise RequestError(error.message, "tandem") from None
        weights = await self._client.weights_version()
        choices, submitted = [], []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            for _ in range(asked.n or 1):
                index = len(choices)
                choices.append(Choice(index, prompt, codec, stops, images))
                submitted.append(
                    Prompt(
                        token_ids=prompt,
                        vision_inputs=images,
                        # That of `tandem generate --seed`.
                        seed=prompt_seed(seed, 0, index, "generate"),
                        sampling={
                            "max_tokens": count,
                            "temperature": asked.temperature,
                            "top_p": asked.top_p,
                            "top_k": asked.top_k,
                            "min_p": asked.min_p,
                            "stop_token_ids": stop_ids,
                        },
                        tandem=tandem,
                        speculative=self._settings.speculative,
                        stream_tokens=True,
                        request_id=f"choice-{index}",
                        # Higher comes first among prompts, lower in OpenAI requests.
                        priority=-(asked.priority or 0),
                    )
                )
        answer = kind(self._settings.model, f"{weights.version}-{weights.digest}")
        return Job(asked, answer, prompts, choices, submitted, False, False, False)

    async def _grow(self, job: Job) -> AsyncIterator[Choice]:
        """Yields every choice whenever it has grown."""
        if getattr(job.request, "max_tokens", None) == 0:
            for choice in job.choices:
                choice.finish_reason = "length"
                yield choice
            return
        async with aclosing(generate(self._client, job.submitted, job.choices)) as growing:
            async for choice in growing:
                yield choice

    async def _logprobs(self, job: Job, choices: Sequence[Choice]) -> dict[int, Any]:
        """Returns the log-probabilities of finished choices by index; null unless asked for."""
        if not job.logprobs:
            return {choice.index: None for choice in choices}
        first = {choice.index: 1 if job.echo else len(choice.prompt) for choice in choices}
        sequences = {
            choice.index: ScoredTokens(
                [*choice.prompt, *choice.shown()[0]], first[choice.index], choice.images
            )
            for choice in choices
        }
        scores = await score(self._client, sequences, job.likeliest)
        return {
            choice.index: job.answer.logprobs(choice, scores[choice.index], job.echo)
            for choice in choices
        }

    async def _respond(self, request: Request, job: Job) -> Response:
        if not job.request.stream:
            return await _while_connected(request, self._whole(job))
        chunks = self._chunks(job)
        # A request that is refused gets its status: the first chunk is there before the stream.
        first = await _while_connected(request, anext(chunks))
        if isinstance(first, Response):
            return first
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(_events(first, chunks), 200, headers, "text/event-stream")

    async def _whole(self, job: Job) -> Response:
        async with aclosing(self._grow(job)) as growing:
            async for _ in growing:
                pass
        logprobs = await self._logprobs(job, job.choices)
        choices = [
            job.answer.whole_choice(choice, job.text(choice, choice.text), logprobs[choice.index])
            for choice in job.choices
        ]
        tokens = usage(job.prompts, job.choices)
        return _Json(job.answer.object(job.answer.whole, choices, usage=tokens))

    async def _chunks(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of a stream. With logprobs a choice comes whole, in one chunk."""
        answer, begun = job.answer, set()
        options = job.request.stream_options
        counts = bool(options and options.include_usage)
        rest = {"usage": None} if counts else {}
        async with aclosing(self._grow(job)) as growing:
            async for choice in growing:
                if job.logprobs and not choice.finish_reason:
                    continue
                text = choice.new_text()
                if not text and not choice.finish_reason:
                    continue
                if choice.index not in begun:
                    begun.add(choice.index)
                    text = job.text(choice, text)
                    if (opening := answer.first_choice(choice)) is not None:
                        yield answer.object(answer.chunk, [opening], **rest)
                logprobs = await self._logprobs(job, [choice] if choice.finish_reason else [])
                part = answer.chunk_choice(choice, text, logprobs.get(choice.index))
                yield answer.object(answer.chunk, [part], **rest)
        if counts:
            tokens = usage(job.prompts, job.choices)
            yield answer.object(answer.chunk, [], usage=tokens)


async def _json(request: Request) -> Any:
    """Returns the JSON of a request's body."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"the body has more than {MAX_BODY_BYTES} bytes",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """Returns the result of `work`, or a Response that nobody reads if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[str]:
    """Yields server-sent events; a failure in the middle is the last one, without [DONE]."""
    try:
        yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
    except TandemError as error:
        yield _event(error_object(error))
        return
    finally:
        await chunks.aclose()
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
