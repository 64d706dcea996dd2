"""The endpoints. Needs starlette."""

import asyncio
import hmac
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chiar.data.tokens import TextCodec
from chiar.hosts import is_called_rightly
from chiar.serving.answers import Answer, event, to_json
from chiar.serving.engine import Engine
from chiar.serving.job import Job
from chiar.serving.limits import Limits
from chiar.serving.metrics import COMPLETIONS, Metrics
from chiar.serving.problems import ApiError, stopping
from chiar.serving.requests import parse_request, read_json

READ_ON = 64
"""How many times the allowed size is read of a body before the line is cut."""


@dataclass
class Service:
    """What the endpoints share."""

    name: str
    codec: TextCodec
    vocabulary: int
    limits: Limits
    engine: Engine
    metrics: Metrics
    api_key: str | None = None
    host: str | None = None
    """What it listens on, where it answers to no other name; None: it answers to any."""
    created: int = field(default_factory=lambda: int(time.time()))
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """Long texts are encoded aside, so that the others' streams go on."""


def make_app(service: Service) -> Starlette:
    app = Starlette(
        routes=[
            Route(COMPLETIONS, complete, methods=["POST"]),
            Route("/v1/chat/completions", refuse_chat, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", show_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={ApiError: show_problem, HTTPException: show_http_problem, Exception: show_fault},
    )
    app.state.service = service
    app.add_middleware(Front, service=service)
    return app


class Front:
    """Before every endpoint: the name it was called by; before those under /v1 also the key, then the count of what was
    answered."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self.find_problem(scope) if scope["type"] == "http" else None
        answer = self.app if problem is None else problem_response(problem)
        if scope["type"] != "http" or not scope["path"].startswith("/v1"):
            await answer(scope, receive, send)
            return
        status, began = 500, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await answer(scope, receive, watched)
        finally:
            self.service.metrics.count_request(scope["path"], status, time.monotonic() - began)

    def find_problem(self, scope: Scope) -> ApiError | None:
        host, key, headers = self.service.host, self.service.api_key, dict(scope["headers"])
        if host is not None and not is_called_rightly(headers.get(b"host", b"").decode("latin-1"), host):
            return wrong_host()
        if key is None or not scope["path"].startswith("/v1"):
            return None
        given = headers.get(b"authorization", b"")
        return None if hmac.compare_digest(given, b"Bearer " + key.encode()) else wrong_key()


def wrong_host() -> ApiError:
    return ApiError(421, "without a key this server answers to localhost and to IP addresses only.", code="wrong_host")


def wrong_key() -> ApiError:
    return ApiError(
        401, "the API key is missing or wrong: send it as Authorization: Bearer KEY.", code="invalid_api_key"
    )


async def complete(request: Request) -> Response:
    service: Service = request.app.state.service
    if service.engine.closed:
        raise stopping()
    fields = read_json(await read_body(request, service.limits))
    asked = await asyncio.get_running_loop().run_in_executor(
        service.reader, parse_request, fields, service.name, service.codec, service.vocabulary, service.limits
    )
    job = Job(asked)
    service.engine.submit(job)
    answer = Answer(job, service.name, service.codec)
    if asked.stream:
        return EventStream(job, answer, service.metrics)
    async with Watch(request.receive, job, service.metrics):
        pieces = [piece async for piece in job.pieces()]
    if job.cancelled:
        return Response(status_code=499)  # nobody is there to read it
    return json_response(answer.whole(pieces))


async def read_body(request: Request, limits: Limits) -> bytes:
    """No more is kept than is allowed, whatever its length says; what is too long is read to its end all the same, or
    the client would not see why it is refused. A web page of another origin cannot send this content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with content-type: application/json.")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size <= limits.body:
                    body += part
                elif size > READ_ON * limits.body:
                    break
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {limits.body_seconds:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its request was complete.") from None
    if size > limits.body:
        raise ApiError(413, f"the request is longer than {limits.body} bytes: shorten it.")
    return bytes(body)


class Watch:
    """While a request is answered: cancels it when its client goes, and counts its tokens at the end."""

    def __init__(self, receive: Receive, job: Job, metrics: Metrics) -> None:
        self.receive, self.job, self.metrics = receive, job, metrics

    async def __aenter__(self) -> None:
        self.task = asyncio.create_task(self.wait())

    async def wait(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.job.cancel()

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        if self.job.left and not self.job.failed:
            self.job.cancelled = True
            self.metrics.add("clients_gone")
        self.metrics.add("prompt_tokens", sum(len(prompt.ids) for prompt in self.job.request.prompts))
        self.metrics.add("completion_tokens", self.job.completion_tokens)


class EventStream(Response):
    """Server-sent events, as OpenAI's: a chunk for every piece of text, then [DONE]; a failure is an event too."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, answer: Answer, metrics: Metrics) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self.job, self.answer, self.metrics = job, answer, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with Watch(receive, self.job, self.metrics):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for piece in self.job.pieces():
                    await write(self.answer.chunk(piece))
                last = self.answer.end()
            except ApiError as error:
                last = event(error.body())
            if not self.job.cancelled:
                await write(last, more=False)


async def refuse_chat(request: Request) -> Response:
    raise ApiError(
        400, "this is a base language model without a chat template: use /v1/completions.", code="unsupported_endpoint"
    )


def model_entry(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "chiar"}


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [model_entry(request.app.state.service)]})


async def show_model(request: Request) -> Response:
    service: Service = request.app.state.service
    if request.path_params["name"] != service.name:
        raise ApiError(404, f"the only model here is {service.name!r}.", param="model", code="model_not_found")
    return json_response(model_entry(service))


async def health(request: Request) -> Response:
    """503 while stopping and after the engine died, so that nobody is sent here any more."""
    engine = request.app.state.service.engine
    alive = engine.thread.is_alive()
    well = alive and not engine.closed
    state = "ok" if well else "stopping" if alive else "failed"
    return json_response({"status": state}, 200 if well else 503)


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    engine = service.engine
    now = {
        "requests_waiting": (engine.count_waiting(), "Requests that wait for their turn."),
        "requests_running": (engine.count_running(), "Requests whose text is being written."),
        "rows_running": (engine.batch.live, "Texts that are being written."),
    }
    return PlainTextResponse(service.metrics.text(now), media_type="text/plain; version=0.0.4")


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


def problem_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


async def show_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return problem_response(error)


async def show_fault(request: Request, error: Exception) -> Response:
    """The log has the rest."""
    return problem_response(ApiError(500, "the server failed on this request.", kind="server_error"))


async def show_http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence, path = str(error.detail), request.url.path
    if error.status_code == 404:
        sentence = f"there is no {path} here: /v1/completions, /v1/models, /health or /metrics."
    elif error.status_code == 405:
        sentence = f"{path} does not take {request.method}."
    response = problem_response(ApiError(error.status_code, sentence))
    response.headers.update(error.headers or {})
    return response
