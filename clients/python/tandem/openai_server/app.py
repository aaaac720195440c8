"""The web application: routes, requests and streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tandem._proto.types.v1 import sampling_pb2
from tandem.errors import REQUEST_ID_KEY, ConfigError, TandemError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server import limits
from tandem.openai_server.admission import Admission
from tandem.openai_server.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    prompt_text,
    usage,
)
from tandem.openai_server.choices import Choice, generate, score
from tandem.openai_server.conversation import Conversation
from tandem.openai_server.errors import (
    CLIENT_CLOSED_REQUEST,
    RequestError,
    error_object,
)
from tandem.openai_server.fields import ChatRequest, CompletionRequest, Kind, parse_json, texts
from tandem.openai_server.pages import HANDLERS, Endpoint, Json, check_key, guarded
from tandem.openai_server.served import Served, Source
from tandem.openai_server.session_routes import SessionPages, session_routes
from tandem.openai_server.session_turns import (
    continued,
    digest_of_settings,
    digests_of_answer,
    session_id,
    turns_of,
)
from tandem.openai_server.sessions import Call, Sessions
from tandem.openai_server.tools import ToolCalls
from tandem.rpc.aio import AsyncRolloutClient
from tandem.rpc.credentials import Credentials, WatchedFiles
from tandem.rpc.images import VisionInput
from tandem.rpc.requests import Prompt, ScoredTokens
from tandem.rpc.retry import RetryPolicy
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import to_message
from tandem.settings.environment import ToolCallFormat

# OpenAI's default for /v1/completions.
DEFAULT_MAX_TOKENS = 16
# A rollout server that is away is waited for by the HTTP client.
RETRY = RetryPolicy(seconds=5.0)
# Bytes of a text from which one alone is turned into tokens at a time.
_LONG_TEXT_BYTES = 64 << 10

# Headers that say which trajectory of a session an answer belongs to, and which turn of it it is.
TRAJECTORY_KEY = "x-session-trajectory"
TURN_KEY = "x-session-turn"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """The server's options.

    Attributes:
        address: the rollout server's.
        codec: the tokenizer; None: that of the rollout server's model.
        model: the name of the model that requests must give; None: that of its directory.
        tandem: whether the junior takes part where a request does not say.
        speculative: fields of SpeculativeConfig, of all responses.
        timeout_seconds: longest time of a request.
        credentials: those for the rollout server; None: those of the environment.
        api_keys: keys, one of which a request must show; None: any request is answered.
        allowed_origins: origins of web pages that may call the server; "*": any.
        retry: how long a request waits for a rollout server that is away, before its first token.
        tool_calls: how the model writes calls of tools; None: as its chat template names it.
    """

    address: str
    codec: TextCodec | None = None
    model: str | None = None
    tandem: bool = False
    speculative: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 3600.0
    credentials: Credentials | None = None
    api_keys: WatchedFiles[tuple[str, ...]] | None = None
    allowed_origins: Sequence[str] = ()
    retry: RetryPolicy = RETRY
    tool_calls: ToolCallFormat | None = None


@dataclass
class Job:
    """A request with what it needs from the rollout server.

    Attributes:
        parser: finds the calls of tools in its answers; None without tools.
        call: its place in a session; None without one.
    """

    request: CompletionRequest | ChatRequest
    answer: Answer
    prompts: list[list[int]]
    choices: list[Choice]
    submitted: list[Prompt]
    logprobs: bool
    num_top: int
    echo: bool
    parser: ToolCalls | None = None
    call: Call | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer that tell its place in the session."""
        if self.call is None:
            return {}
        one = self.call.trajectory
        return {TRAJECTORY_KEY: str(one.index), TURN_KEY: str(one.turns + 1)}

    @property
    def comes_whole(self) -> bool:
        """Whether a stream has each choice in one chunk."""
        return self.logprobs or self.parser is not None

    def text(self, choice: Choice, text: str) -> str:
        """Returns a whole choice's text as the answer shows it."""
        return (prompt_text(choice)[0] if self.echo else "") + text


def application(settings: Settings) -> Starlette:
    """Returns the ASGI application.

    Its `state.stop()` gives running answers a last STOP_SECONDS; may be called in a signal handler.
    """
    server = _Server(settings)

    def keyed(endpoint: Endpoint) -> Endpoint:
        async def run(request: Request) -> Response:
            _check_key(request, settings.api_keys)
            return await endpoint(request)

        return guarded(run)

    routes = [
        Route("/health", guarded(server.health)),
        Route("/v1/models", keyed(server.models)),
        Route("/v1/models/{name:path}", keyed(server.one_model)),
        Route("/v1/completions", keyed(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", keyed(server.chat), methods=["POST"]),
        *session_routes(server.session_pages, keyed),
    ]
    origins = list(settings.allowed_origins)
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_KEY, "retry-after", TRAJECTORY_KEY, TURN_KEY],
    )
    app = Starlette(
        routes=routes,
        lifespan=server.lifespan,
        exception_handlers=HANDLERS,
        middleware=[cross_origin] if origins else [],
    )
    app.state.stop = server.stop
    return app


def _check_key(request: Request, keys: WatchedFiles[tuple[str, ...]] | None) -> None:
    """Raises RequestError unless the request shows one of the keys."""
    if keys is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    check_key(shown if scheme.lower() == "bearer" else "", keys)


class _Stream(StreamingResponse):
    """Server-sent events, with what has to be closed after them, however they end."""

    def __init__(
        self, events: AsyncIterator[str], held: AsyncExitStack, headers: Mapping[str, str]
    ) -> None:
        headers = {"cache-control": "no-cache", **headers}
        super().__init__(events, 200, headers, "text/event-stream")
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(limits.SEND_SECONDS):
                await send(message)

        async with self._held:
            # A client that does not read is cut off.
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)


class _Server:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = int(time.time())
        self._source = Source(settings.codec, settings.model, settings.tandem, settings.speculative)
        self._admission = Admission()
        self._sessions = Sessions()
        self.session_pages = SessionPages(self._sessions, self._admission)
        self._client: AsyncRolloutClient
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Future[None]

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Holds the channels while the application runs."""
        self._loop = loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        self._client = AsyncRolloutClient(
            self._settings.address,
            timeout_seconds=self._settings.timeout_seconds,
            credentials=self._settings.credentials,
            retry=self._settings.retry,
        )
        async with self._client:
            yield

    def stop(self) -> None:
        """Ends answers that still run in STOP_SECONDS, with an error that says so."""

        def end() -> None:
            if not self._stopped.done():
                self._stopped.set_result(None)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, limits.STOP_SECONDS, end)

    async def health(self, request: Request) -> Response:
        """Says whether the rollout server serves."""
        health = await self._client.check_health()
        serving = health.status == "SERVING"
        status = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
        return Json({"status": health.status, "reason": health.reason}, status)

    async def models(self, request: Request) -> Response:
        """Lists the one model."""
        served = await self._source.served(self._client)
        return Json({"object": "list", "data": [self._model(served)]})

    async def one_model(self, request: Request) -> Response:
        """Describes the one model."""
        served = await self._source.served(self._client)
        _check_model(served, request.path_params["name"])
        return Json(self._model(served))

    async def completions(self, request: Request) -> Response:
        """Continues texts."""
        return await self._answer(request, CompletionRequest, self._completion)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._answer(request, ChatRequest, self._chat)

    async def _answer(
        self,
        request: Request,
        kind: type[Kind],
        job_of: Callable[[Kind, Served, str | None, AsyncExitStack], Awaitable[Job]],
    ) -> Response:
        """Answers a request within the server's bounds."""
        async with AsyncExitStack() as held:
            held.enter_context(self._admission.request())
            receiving = held.enter_async_context(self._admission.body(request))
            body = await self._until_stopped(receiving)
            asked = await asyncio.to_thread(parse_json, kind, body)
            del body  # What was made of it is larger; the bound counts it once.
            session = session_id(request, asked)
            served = await self._source.served(self._client)
            _check_model(served, asked.model)
            job = await job_of(asked, served, session, held)
            headers = job.headers
            if not asked.stream:
                work = self._until_stopped(self._whole(job))
                whole: Response = await _while_connected(request, work)
                whole.headers.update(headers)
                return whole
            chunks = await held.enter_async_context(aclosing(self._chunks(job)))
            # A request that is refused gets its status: the first chunk is there before the stream.
            first = await _while_connected(request, self._until_stopped(anext(chunks)))
            if isinstance(first, Response):
                return first
            return _Stream(self._events(first, chunks), held.pop_all(), headers)

    async def _until_stopped(self, work: Awaitable[Result]) -> Result:
        """Returns the result of `work`; raises RequestError if the server stops before."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise RequestError(
                "the server is stopping",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="server_stops",
                retry_after_seconds=limits.RETRY_SECONDS,
            )
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _completion(
        self,
        asked: CompletionRequest,
        served: Served,
        session: str | None,
        held: AsyncExitStack,
    ) -> Job:
        prompts = await self._encode(asked, served)
        count = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        job = self._job(asked, served, CompletionAnswer, prompts, [count] * len(prompts))
        job.echo = bool(asked.echo)
        job.logprobs = asked.logprobs is not None
        job.num_top = asked.logprobs or 0
        return job

    async def _chat(
        self, asked: ChatRequest, served: Served, session: str | None, held: AsyncExitStack
    ) -> Job:
        _check_choices(1, asked, served)
        codec = served.codec
        messages = [message.record() for message in asked.messages]
        read = [messages, asked.template_variables]
        size = sum(len(text.encode()) for _, text in texts(read))
        _check_text(size, "messages", served)
        shows = any(not isinstance(message["content"], str) for message in messages)
        parser = None
        if tools := asked.offered_tools:
            parser = ToolCalls.of(codec, self._settings.tool_calls, tools)
        async with self._turn(size, shows):
            try:
                if session is not None:
                    return await self._session_job(asked, served, session, held, parser)
                prompt, images = await asyncio.to_thread(
                    codec.chat_with_images,
                    messages,
                    template_kwargs=asked.template_variables,
                    longest=served.max_model_len,
                )
            except ConfigError as error:
                raise RequestError(error.message, "messages") from None
        return self._chat_job(asked, served, prompt, images, parser)

    def _chat_job(
        self,
        asked: ChatRequest,
        served: Served,
        prompt: list[int],
        images: Sequence[VisionInput],
        parser: ToolCalls | None,
    ) -> Job:
        room = max(1, served.max_model_len - len(prompt))
        count = asked.max_completion_tokens or asked.max_tokens or room
        job = self._job(asked, served, ChatAnswer, [prompt], [count], images)
        job.logprobs, job.num_top = bool(asked.logprobs), asked.top_logprobs or 0
        job.parser = parser
        return job

    async def _session_job(
        self,
        asked: ChatRequest,
        served: Served,
        session: str,
        held: AsyncExitStack,
        parser: ToolCalls | None,
    ) -> Job:
        """Returns the job of a call that continues a trajectory of its session, or begins one.

        Raises ConfigError for messages that the chat template does not render.
        """
        codec = served.codec
        messages = [message.record() for message in asked.messages]
        _check_session(asked, messages)
        stops = codec.stops(asked.stop_texts, "stop")
        settings = digest_of_settings(asked, served)
        seed = prompt_seed(
            secrets.randbits(63) if asked.seed is None else asked.seed, 0, 0, "generate"
        )
        talk = Conversation(messages)
        call = held.enter_context(self._sessions.call(session, settings, seed, talk))
        turns = await asyncio.to_thread(turns_of, codec, asked.template_variables)
        if call.begun is None and not await asyncio.to_thread(continued, call, turns):
            self._sessions.begin_instead(call, settings, seed)
        one = call.trajectory
        if call.begun is not None:
            one.prompt = await asyncio.to_thread(codec.chat, messages, asked.template_variables)
        so_far = call.so_far()
        prompt = [*one.prompt, *so_far.token_ids]
        if len(prompt) >= served.max_model_len:
            raise RequestError(
                f"messages: have {len(prompt):,} tokens; max_model_len is "
                f"{served.max_model_len:,}, and an answer has at least one",
                "messages",
                code="context_length_exceeded",
            )
        job = self._chat_job(asked, served, prompt, (), parser)
        job.call = call
        [choice], [submitted] = job.choices, job.submitted
        choice.whole = True
        ends = {*stops["stop_token_ids"], *([] if turns is None else [turns.end_id])}
        job.submitted = [
            dataclasses.replace(
                submitted,
                token_ids=one.prompt,
                response=so_far,
                seed=one.seed,
                first_sample_index=one.index,
                # The trainer's objective may ask for them.
                return_other_logprobs=True,
                sampling={
                    **submitted.sampling,
                    "stop": stops["stop"],
                    "stop_token_ids": sorted(ends),
                },
            )
        ]
        return job

    def _model(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.model,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "max_model_len": served.max_model_len,
        }

    async def _encode(self, asked: CompletionRequest, served: Served) -> list[list[int]]:
        """Returns the ids of every prompt of /v1/completions."""
        prompt = asked.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise RequestError("prompt: is empty", "prompt")
        _check_choices(len(prompt), asked, served)
        sizes = [len(one.encode()) if isinstance(one, str) else 0 for one in prompt]
        _check_text(max(sizes), "prompt", served)
        ids: list[list[int]] = []
        tokens = 0
        for one, size in zip(prompt, sizes, strict=True):
            if isinstance(one, str):
                async with self._turn(size, shows_images=False):
                    try:
                        one = await asyncio.to_thread(served.codec.encode, one)
                    except ConfigError as error:
                        raise RequestError(error.message, "prompt") from None
            if not one:
                raise RequestError("prompt: a prompt must have at least one token", "prompt")
            tokens += len(one) * (asked.n or 1)
            if tokens > limits.MAX_PROMPT_TOKENS:
                raise RequestError(
                    f"prompt: the prompts, times n, have more than {limits.MAX_PROMPT_TOKENS:,} "
                    "tokens",
                    "prompt",
                )
            _check_length(len(one), "prompt", served)
            ids.append(list(one))
        return ids

    @asynccontextmanager
    async def _turn(self, text_bytes: int, shows_images: bool) -> AsyncIterator[None]:
        """Waits for others that turn long texts or images into tokens, if this one does, too."""
        if text_bytes < _LONG_TEXT_BYTES and not shows_images:
            yield
            return
        async with self._admission.heavy:
            yield

    def _job(
        self,
        asked: CompletionRequest | ChatRequest,
        served: Served,
        kind: type[Answer],
        prompts: list[list[int]],
        max_tokens: Sequence[int],
        images: Sequence[VisionInput] = (),
    ) -> Job:
        codec = served.codec
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
        answer = kind(served.model, served.fingerprint)
        return Job(asked, answer, prompts, choices, submitted, False, False, False)

    async def _grow(self, job: Job) -> AsyncIterator[Choice]:
        """Yields every choice whenever it has grown."""
        if getattr(job.request, "max_tokens", None) == 0:
            for choice in job.choices:
                choice.finish_reason = "length"
                yield choice
            return
        retry = self._settings.retry
        async with (
            self._admission.streams,
            aclosing(generate(self._client, job.submitted, job.choices, retry)) as growing,
        ):
            async for choice in growing:
                if choice.finish_reason and job.parser is not None:
                    job.parser.find(choice)
                yield choice

    def _join(self, job: Job, choice: Choice) -> None:
        """Tells the session of a finished choice, which nothing keeps from its client any more."""
        if job.call is not None and choice.trajectory is not None:
            self._sessions.wrote(job.call, choice.trajectory, digests_of_answer(choice))

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
        async with self._admission.scores:
            scores = await score(self._client, sequences, job.num_top)
        return {
            choice.index: job.answer.logprobs(choice, scores[choice.index], job.echo)
            for choice in choices
        }

    async def _whole(self, job: Job) -> Response:
        async with aclosing(self._grow(job)) as growing:
            async for _ in growing:
                pass
        logprobs = await self._logprobs(job, job.choices)
        for choice in job.choices:
            self._join(job, choice)
        choices = [
            job.answer.whole_choice(choice, job.text(choice, choice.text), logprobs[choice.index])
            for choice in job.choices
        ]
        tokens = usage(job.prompts, job.choices)
        return Json(job.answer.object(job.answer.whole, choices, usage=tokens))

    async def _chunks(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of a stream. With logprobs a choice comes whole, in one chunk."""
        answer, begun = job.answer, set()
        options = job.request.stream_options
        counts = bool(options and options.include_usage)
        rest = {"usage": None} if counts else {}
        async with aclosing(self._grow(job)) as growing:
            async for choice in growing:
                if job.comes_whole and not choice.finish_reason:
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
                if choice.finish_reason:
                    self._join(job, choice)
                part = answer.chunk_choice(choice, text, logprobs.get(choice.index))
                yield answer.object(answer.chunk, [part], **rest)
        if counts:
            tokens = usage(job.prompts, job.choices)
            yield answer.object(answer.chunk, [], usage=tokens)

    async def _events(
        self, first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[str]:
        """Yields server-sent events; a failure in the middle is the last one, without [DONE]."""
        chunk: dict[str, Any] | None = first
        try:
            while chunk is not None:
                yield _event(chunk)
                chunk = await self._until_stopped(anext(chunks, None))
        except TandemError as error:
            yield _event(error_object(error))
            return
        yield "data: [DONE]\n\n"


def _check_model(served: Served, name: str) -> None:
    if name != served.model:
        raise RequestError(
            f"model: {name!r} is not served, {served.model!r} is",
            "model",
            status=HTTPStatus.NOT_FOUND,
            code="model_not_found",
        )


def _check_choices(prompts: int, asked: CompletionRequest | ChatRequest, served: Served) -> None:
    """Checks the number of choices before they are made."""
    most = min(limits.MAX_CHOICES, served.max_samples)
    if (choices := prompts * (asked.n or 1)) > most:
        raise RequestError(
            f"n: {prompts} prompts times {asked.n or 1} are {choices:,} choices; at most {most:,}",
            "n",
        )


def _check_text(size: int, field: str, served: Served) -> None:
    """Checks the bytes of a text before its tokens are looked for."""
    most = served.max_model_len * limits.MAX_TEXT_BYTES_PER_TOKEN
    if size > most:
        raise RequestError(
            f"{field}: has {size:,} bytes of text; a prompt of {served.max_model_len:,} tokens "
            f"(max_model_len) may have {most:,}",
            field,
            code="context_length_exceeded",
        )


def _check_length(tokens: int, field: str, served: Served) -> None:
    if tokens > served.max_model_len:
        raise RequestError(
            f"{field}: has {tokens:,} tokens; max_model_len is {served.max_model_len:,}",
            field,
            code="context_length_exceeded",
        )


def _check_session(asked: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError for what a call of a session cannot have."""
    if (asked.n or 1) > 1:
        raise RequestError(
            "n: a call of a session has one choice", "n", code="unsupported_parameter"
        )
    if any(not isinstance(message["content"], str) for message in messages):
        raise RequestError(
            "messages: images are not supported in a session",
            "messages",
            code="unsupported_parameter",
        )


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


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
