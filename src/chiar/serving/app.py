"""`chiar serve`: an engine that owns the model and writes all texts token by token, and the endpoints before it."""

import asyncio
import contextlib
import hmac
import math
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from chiar.data.tokens import TextCodec
from chiar.generation.writer import Piece, Row, Writer, score_prompt
from chiar.model.modeling import ChiarForCausalLM
from chiar.serving.protocol import Job, Limits, parse_request
from chiar.web import Refused, Site, json_response, read_json, while_there

COMPLETIONS = "/v1/completions"
# Seconds of writing before the loop sends what was written (going to and fro for each token takes time too), seconds
# for last answers to be read when the server is told to stop, and connections beyond the requests that run or wait.
QUICK, FAREWELL, SPARE = 0.01, 3, 64
# What /metrics tells: type and help. The first five have no labels and begin at 0.
METRICS = {
    **{"prompt_tokens_total": ("counter", "Tokens read."), "completion_tokens_total": ("counter", "Tokens written.")},
    **{f"{what}_seconds_total": ("counter", f"Seconds spent on {what}s.") for what in ("generation", "request")},
    **{"clients_gone_total": ("counter", "Clients who left."), "rows_running": ("gauge", "Texts being written.")},
    **{f"requests_{state}": ("gauge", f"Requests that are {state}.") for state in ("waiting", "running")},
    **{"requests_total": ("counter", "By status."), "attention_fraction": ("gauge", "Routed tokens to attention.")},
    "routed_tokens_total": ("counter", "Prompt tokens by operator, of all routed layers."),
}


def stopping() -> Refused:
    return Refused(503, "the server is stopping: ask another one, or later.", kind="server_error", retry_after=5)


class Engine(Writer):
    """Requests wait in their order until there are rows for them. One thread has the model, prompts are read there one
    at a time."""

    def __init__(self, model: ChiarForCausalLM, codec: TextCodec, limits: Limits) -> None:
        super().__init__(model)
        self.codec, self.limits = codec, limits
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        # Closed: takes nothing new; what waits and runs goes on.
        self.closed, self.something = False, asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "chiar-engine")
        self.task: asyncio.Task[None] | None = None
        # By Prometheus's name with its labels; and the seconds that completions took.
        self.counts: dict[str, float] = defaultdict(float, dict.fromkeys(list(METRICS)[:5], 0.0))
        self.seconds: deque[float] = deque(maxlen=1000)

    def submit(self, job: Job) -> None:
        """Refused where there is no room or no time left."""
        if self.closed:
            raise stopping()
        if self.count(self.waiting) >= self.limits.waiting:
            sentence = f"{self.limits.waiting} requests are waiting already: come back later."
            typical = math.ceil(sum(self.seconds) / max(1, len(self.seconds)))
            after = min(60, max(1, typical))
            raise Refused(429, sentence, None, "rate_limit_exceeded", "rate_limit_error", after)
        self.waiting.append(job)
        self.something.set()
        self.task = self.task or asyncio.create_task(self.work())

    def count(self, jobs: Iterable[Job]) -> int:
        return sum(not job.is_over for job in jobs)

    async def end(self) -> None:
        """Tell those still there that it is over."""
        self.closed = True
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

    async def work(self) -> None:
        try:
            while True:
                self.admit()
                if not (self.running or self.rows):
                    self.something.clear()
                    await self.something.wait()
                    continue
                began = time.monotonic()
                await asyncio.get_running_loop().run_in_executor(self.thread, self.advance)
                self.counts["generation_seconds_total"] += time.monotonic() - began
                for job in self.running:
                    job.news.set()
        finally:  # whatever ended it, nobody waits for it
            self.closed = True
            for job in [*self.waiting, *self.running]:
                job.fail(stopping())
                job.news.set()

    def admit(self) -> None:
        """Let in who fits."""
        self.running = [job for job in self.running if not job.is_over]
        taken = sum(job.left for job in self.running)
        while self.waiting and (self.waiting[0].is_over or taken + self.waiting[0].left <= self.limits.rows):
            job = self.waiting.popleft()
            if not job.is_over:
                taken += job.left
                self.running.append(job)

    def advance(self) -> None:
        """Read one prompt, so that long ones do not hold up those who write, then add a token to every text; quick
        models do so several times."""
        began = time.monotonic()
        while time.monotonic() - began < QUICK:
            unread = [job for job in self.running if job.begun < len(job.prompts) and not job.is_over]
            if not (unread or self.rows):
                return
            try:
                if unread:
                    self.begin_prompt(unread[0])
            except Exception as error:
                self.fail(unread[:1], error)
            try:
                self.step()
            except Exception as error:
                self.fail(self.clear(), error)

    def begin_prompt(self, job: Job) -> None:
        """Read a request's next prompt and write the first token of its choices, i of them with the seed + i."""
        number, sampling, rows = job.begun, job.sampling, []
        job.begun, (ids, text) = number + 1, job.prompts[number]
        read, operators = self.read_prompt(ids), self.model.config.operators or []
        for route in read.routes or ():
            counts = route.choice_BT.flatten().bincount(minlength=len(operators)).tolist()
            for operator, count in zip(operators, counts, strict=True):
                self.counts[f'routed_tokens_total{{operator="{operator}"}}'] += count
        scored = job.echo and sampling.logprobs is not None
        scores = score_prompt(self.model, ids, read, sampling.logprobs or 0) if scored else []
        for i in range(job.n):
            seed, send = None if sampling.seed is None else sampling.seed + i, partial(job.put, number * job.n + i)
            rows.append(Row(self.codec, replace(sampling, seed=seed), self.model.device, send, job))
            if job.echo:
                send(Piece(text, scores))
        job.rows += rows
        if sampling.max_new_tokens:
            return self.begin(read, rows)
        for row in rows:
            row.finish("length")

    def fail(self, owners: list[Job], error: Exception) -> None:
        """A fault of ours, or no memory: these requests fail, the server goes on."""
        traceback.print_exception(error, file=sys.stderr)
        for job in owners:
            job.fail(Refused(500, "the model failed on this request; the server's log says why.", kind="server_error"))


class Service(Site):
    def __init__(self, name: str, engine: Engine, key: str = "", host: str = "127.0.0.1", named: bool = True) -> None:
        posts = {COMPLETIONS: self.complete, "/v1/chat/completions": self.refuse_chat}
        gets = {"/v1/models": self.models, "/v1/models/{name:path}": self.models, "/health": self.health}
        gets["/metrics"] = self.show_metrics
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(path, endpoint) for path, endpoint in gets.items()]
        super().__init__(host, named, routes, FAREWELL, engine.limits.rows + engine.limits.waiting + SPARE)
        self.name, self.engine, self.key = name, engine, key
        self.greeting = f"serving {name} on {{}}/v1, until Ctrl-C"
        self.entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "chiar"}
        # Long texts are encoded aside, so that the others' streams go on.
        self.reader = ThreadPoolExecutor(1)

    def check(self, request: Request) -> None:
        """/health and /metrics need no key: they are for those who look after the process."""
        super().check(request)
        given, needed = request.headers.get("authorization", "").encode("latin-1"), b"Bearer " + self.key.encode()
        if self.key and request.url.path.startswith("/v1") and not hmac.compare_digest(given, needed):
            raise Refused(401, "send the API key as Authorization: Bearer KEY.", code="invalid_api_key")

    def answered(self, path: str, status: int, seconds: float) -> None:
        if path.startswith("/v1"):
            self.engine.counts[f'requests_total{{status="{status}"}}'] += 1
            self.engine.counts["request_seconds_total"] += seconds
        if (path, status) == (COMPLETIONS, 200):
            self.engine.seconds.append(seconds)

    async def drain(self) -> None:
        """Let what runs finish within the grace time."""
        engine, deadline = self.engine, time.monotonic() + self.engine.limits.grace
        engine.closed = True
        while engine.count([*engine.waiting, *engine.running]) and not self.should_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await engine.end()

    async def complete(self, request: Request) -> Response:
        engine, limits = self.engine, self.engine.limits
        fields = await read_json(request, limits.body, f"the request is longer than {limits.body} bytes: shorten it.")
        given = fields, self.name, engine.codec, engine.model.config.vocab_size, limits
        job = await asyncio.get_running_loop().run_in_executor(self.reader, parse_request, *given)
        engine.closed |= self.draining
        engine.submit(job)
        request.scope["over"].callback(self.settle, job)
        if job.stream:
            return StreamingResponse(job.events(), media_type="text/event-stream")
        return json_response(await while_there(request, job.whole()))

    def settle(self, job: Job) -> None:
        """Nobody reads this answer any more: what is not finished was left."""
        if job.left and not job.failed:
            job.cancelled = True
            self.engine.counts["clients_gone_total"] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            self.engine.counts[f"{name}_total"] += job.usage()[name]

    async def refuse_chat(self, request: Request) -> Response:
        sentence = "this is a base language model without a chat template: use /v1/completions."
        raise Refused(400, sentence, code="unsupported_endpoint")

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name not in (None, self.name):
            raise Refused(404, f"the only model here is {self.name!r}.", "model", "model_not_found")
        return json_response({"object": "list", "data": [self.entry]} if name is None else self.entry)

    async def health(self, request: Request) -> Response:
        """503 while stopping and after the engine died, so that nobody is sent here any more."""
        failed = self.engine.task is not None and self.engine.task.done()
        state = "failed" if failed else "stopping" if self.draining or self.engine.closed else "ok"
        return json_response({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """As Prometheus reads it."""
        engine, lines = self.engine, []
        routed = {name: count for name, count in engine.counts.items() if name.startswith("routed")}
        now: dict[str, float] = {"rows_running": sum(not row.is_over for row in engine.rows)}
        now |= {f"requests_{name}": engine.count(getattr(engine, name)) for name in ("waiting", "running")}
        if routed:
            now["attention_fraction"] = routed['routed_tokens_total{operator="attention"}'] / sum(routed.values())
        for name, samples in groupby(sorted({**engine.counts, **now}.items()), lambda sample: sample[0].split("{")[0]):
            lines += [
                f"# {word} chiar_{name} {told}" for word, told in zip(("TYPE", "HELP"), METRICS[name], strict=True)
            ]
            lines += [f"chiar_{sample} {value:.10g}" for sample, value in samples]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")
