"""The endpoints of `chiar serve`. Needs starlette and uvicorn."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chiar.data.tokens import TextCodec
from chiar.model.modeling import ChiarForCausalLM
from chiar.serving.engine import COMPLETIONS, Engine, Job, Metrics, stopping
from chiar.serving.protocol import Answer, Limits, event, parse_request
from chiar.web import Refused, Server, Site, Stream, json_response, read_json, while_there


class Service(Site):
    def __init__(
        self, name: str, model: ChiarForCausalLM, codec: TextCodec, limits: Limits, key: str | None, host: str | None
    ) -> None:
        routes = [
            Route(COMPLETIONS, self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.refuse_chat, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        super().__init__(host, routes)
        self.name, self.codec, self.limits, self.key = name, codec, limits, key
        self.greeting = f"serving {name} on {{}}/v1, until Ctrl-C"
        self.metrics = Metrics(list(model.config.operators or []))
        self.engine = Engine(model, codec, limits, self.metrics)
        self.entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "chiar"}
        # Long texts are encoded aside, so that the others' streams go on.
        self.reader = ThreadPoolExecutor(1)

    def check(self, request: Request) -> None:
        """/health and /metrics need no key: they are for those who look after the process."""
        super().check(request)
        if self.key is not None and request.url.path.startswith("/v1"):
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                sentence = "the API key is missing or wrong: send it as Authorization: Bearer KEY."
                raise Refused(401, sentence, code="invalid_api_key")

    def answered(self, path: str, status: int, seconds: float) -> None:
        if path.startswith("/v1"):
            self.metrics.count_request(path, status, seconds)

    def close(self) -> None:
        self.engine.closed = True

    async def drain(self, server: Server) -> None:
        """Let what runs finish within the grace time."""
        engine, deadline = self.engine, time.monotonic() + self.limits.grace
        while engine.count([*engine.waiting, *engine.running]) and not server.should_exit:
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.05)
        await engine.end()

    async def complete(self, request: Request) -> Response:
        if self.engine.closed:
            raise stopping()
        limits = self.limits
        fields = await read_json(request, limits.body, f"the request is longer than {limits.body} bytes: shorten it.")
        given = fields, self.name, self.codec, self.engine.model.config.vocab_size, limits
        asked = await asyncio.get_running_loop().run_in_executor(self.reader, parse_request, *given)
        job, answer = Job(asked), Answer(asked, self.name, self.codec)
        self.engine.submit(job)
        if asked.stream:
            return Stream(events(job, answer), "text/event-stream", lambda: self.settle(job))
        try:
            return json_response(await while_there(request, collect(job, answer)))
        finally:
            self.settle(job)

    def settle(self, job: Job) -> None:
        """Nobody reads this answer any more: what is not finished was left."""
        sums = self.metrics.sums
        if job.left and not job.failed:
            job.cancelled = True
            sums["clients_gone"] += 1
        sums["prompt_tokens"] += sum(len(prompt.ids) for prompt in job.request.prompts)
        sums["completion_tokens"] += job.written

    async def refuse_chat(self, request: Request) -> Response:
        sentence = "this is a base language model without a chat template: use /v1/completions."
        raise Refused(400, sentence, code="unsupported_endpoint")

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self.entry]})

    async def show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise Refused(404, f"the only model here is {self.name!r}.", "model", "model_not_found")
        return json_response(self.entry)

    async def health(self, request: Request) -> Response:
        """503 while stopping and after the engine died, so that nobody is sent here any more."""
        failed = self.engine.task is not None and self.engine.task.done()
        state = "failed" if failed else "stopping" if self.engine.closed else "ok"
        return json_response({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        engine = self.engine
        now = {
            "requests_waiting": (engine.count(engine.waiting), "Requests that wait for their turn."),
            "requests_running": (engine.count(engine.running), "Requests whose text is being written."),
            "rows_running": (engine.live, "Texts that are being written."),
        }
        return PlainTextResponse(self.metrics.text(now), media_type="text/plain; version=0.0.4")


async def collect(job: Job, answer: Answer) -> dict[str, Any]:
    pieces = [piece async for piece in job.pieces()]
    return answer.whole(pieces, job.written)


async def events(job: Job, answer: Answer) -> AsyncIterator[bytes]:
    """Server-sent events, as OpenAI's: a chunk for every piece of text, then [DONE]; a failure is an event too."""
    try:
        async for choice, piece in job.pieces():
            yield answer.chunk(choice, piece)
        yield answer.end(job.written)
    except Refused as error:
        yield event(error.body())
