"""`chiar serve`: OpenAI's completions, where every field is checked and none that would change the text is ignored; the
engine, which owns the model and writes all texts token by token; and the endpoints."""

import asyncio
import hmac
import math
import sys
import time
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope
from torch import Tensor

from chiar import web
from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Piece, Row, Sampling, Writer, score_prompt
from chiar.model.modeling import ChiarForCausalLM
from chiar.web import TEXT, Field, Refused, Site, require

COMPLETIONS = "/v1/completions"
# Seconds of writing between two sends, and seconds for the last responses to be read at shutdown.
QUICK, FAREWELL = 0.01, 3
# Of /metrics: type and help text. The first five have no labels and start at 0.
METRICS = {
    "prompt_tokens_total": ("counter", "Prompt tokens that the model has read."),
    "completion_tokens_total": ("counter", "Tokens that the model has written."),
    "generation_seconds_total": ("counter", "Seconds in which the model read or wrote."),
    "request_seconds_total": ("counter", "Seconds from request to end of response, summed over requests_total."),
    "clients_gone_total": ("counter", "Clients that disconnected before their text was complete."),
    "rows_running": ("gauge", "Texts being written."),
    "requests_waiting": ("gauge", "Requests in the queue."),
    "requests_running": ("gauge", "Requests whose prompts are being read or texts being written."),
    "requests_total": ("counter", "Responses under /v1, by status; 499: the client had disconnected."),
    "attention_fraction": ("gauge", "Share of routed_tokens_total that took attention."),
    "routed_tokens_total": ("counter", "Prompt tokens by operator, summed over routed layers or dark stacks."),
}
stopping = partial(Refused, 503, "the server is stopping: try another, or later.", kind="server_error", retry_after=5)


@dataclass(frozen=True)
class Limits:
    """`length` counts tokens, prompt included; `rows` limits texts at a time, and per request; `waiting` is the length
    of the queue; `body` is in bytes; `grace` is in seconds."""

    length: int
    rows: int = 16
    waiting: int = 64
    body: int = 1 << 20
    grace: float = 30.0


@dataclass
class Job:
    """A request in progress, with `n` choices for each prompt (ids and text), and its response."""

    model: str
    codec: TextCodec
    prompts: list[tuple[list[int], str]]
    sampling: Sampling
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False

    def __post_init__(self) -> None:
        name, now = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.head = {"id": name, "object": "text_completion", "created": now, "model": self.model}
        self.rows: list[Row] = []  # one per choice, of the prompts read so far
        # `left`: unfinished choices. `ended`: the request failed or its client is gone, and is written no further.
        self.left, self.ended = len(self.prompts) * self.n, False
        self.offsets = [0] * self.left  # characters of each choice sent so far
        # The model's thread appends to `unsent`; Engine.work then sets `news`, in the event loop.
        self.unsent: deque[tuple[int, Piece] | Refused] = deque()
        self.news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.ended or not self.left

    def put(self, choice: int, piece: Piece) -> None:
        self.unsent.append((choice, piece))
        self.left -= piece.finish is not None

    def fail(self, error: Refused) -> None:
        if not self.is_over:
            self.ended = True
            self.unsent.append(error)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Each piece with the number of its choice, until every choice is finished."""
        while self.left or self.unsent:
            if not self.unsent:
                self.news.clear()
                await self.news.wait()
                continue
            item = self.unsent.popleft()
            if isinstance(item, Refused):
                raise item
            yield item

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.offsets]
        async for number, piece in self.pieces():
            pieces[number].append(piece)
        choices = []
        for number, own in enumerate(pieces):
            text, tokens = "".join(piece.text for piece in own), [token for piece in own for token in piece.tokens]
            choices.append(self.choice(number, Piece(text, tokens, own[-1].finish)))
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events like OpenAI's: a chunk for every piece of text, then [DONE]. An error is an event too."""
        try:
            async for number, piece in self.pieces():
                yield b"data: %b\n\n" % web.to_json({**self.head, "choices": [self.choice(number, piece)]})
            if self.include_usage:
                yield b"data: %b\n\n" % web.to_json({**self.head, "choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield b"data: %b\n\n" % web.to_json(error.body())

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.sampling.logprobs is not None:
            texts, scores = self.codec.pieces([t.id for t in piece.tokens]), [t.logprob for t in piece.tokens]
            *offsets, self.offsets[number] = accumulate(map(len, texts), initial=self.offsets[number])
            top: list[dict[str, float] | None] = []
            for token in piece.tokens:  # by text, like OpenAI's; of tokens with equal texts the first, the likeliest
                by_text = [*zip(self.codec.pieces(list(token.top)), token.top.values(), strict=True)]
                top.append(None if token.logprob is None else dict(reversed(by_text)))
            logprobs = {"tokens": texts, "token_logprobs": scores, "top_logprobs": top, "text_offset": offsets}
        return {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def usage(self) -> dict[str, int]:
        read, written = sum(len(ids) for ids, _ in self.prompts), sum(len(row.tokens) for row in self.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return isinstance(stops, list) and len(stops) <= 4 and all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)


def is_prompt(value: Any) -> bool:
    def is_one(prompt: Any) -> bool:
        return TEXT[1](prompt) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))

    return is_one(value) or (isinstance(value, list) and all(map(is_one, value)))


def unsupported(neutral: Any) -> Field:
    """A field accepted only with its neutral value, because any other would change the text."""
    return None, lambda value: not isinstance(value, bool) and value == neutral, web.UNKNOWN[2]


FLAG: Field = (False, lambda value: isinstance(value, bool), "true or false")
FIELDS: dict[str, Field] = {
    "model": TEXT,
    "prompt": ("", is_prompt, "text without lone surrogates, token ids, or a list of either"),
    "n": web.between(1, 2**31, 1),
    "max_tokens": web.between(0, 2**31, None),
    "temperature": web.between(0, 2, 1.0, int | float),
    "top_p": web.between(1e-9, 1, 1.0, int | float),
    "stop": ([], is_stop, "text or up to 4 texts, none of them empty or longer than 256 characters"),
    "seed": web.between(-(2**63), 2**63 - 1, None),
    "logprobs": web.between(0, 5, None),
    **dict.fromkeys(("echo", "stream"), FLAG),
    "stream_options": ({}, lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}, "include_usage alone"),
    "user": TEXT,
    "best_of": unsupported(1), "suffix": unsupported(""), "logit_bias": unsupported({}),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), unsupported(0)),
}  # fmt: skip


def parse_request(body: dict[str, Any], model: str, codec: TextCodec, vocabulary: int, limits: Limits) -> Job:
    """Checks the body of a request. Raises Refused, which names the wrong field."""
    fields = web.check_fields(body, FIELDS)
    inputs, n, stop, wanted, echo = (fields[name] for name in ("prompt", "n", "stop", "max_tokens", "echo"))
    require(fields["model"] in ("", model), 404, f"the only model here is {model!r}.", "model", "model_not_found")
    inputs = inputs if isinstance(inputs, list) and inputs and not isinstance(inputs[0], int) else [inputs]
    too_many = f"{len(inputs)} prompts × n = {n} are more than the {limits.rows} texts a request may ask for."
    require(len(inputs) * n <= limits.rows, 400, too_many, "n" if n > limits.rows else "prompt")  # encoding is slow
    known = all(0 <= token < vocabulary for one in inputs if isinstance(one, list) for token in one)
    require(known, 400, f"token ids must lie between 0 and {vocabulary - 1}.", "prompt")
    prompts = [(codec.encode(one), one) if isinstance(one, str) else (one, codec.decode(one)) for one in inputs]
    lengths = [len(ids) for ids, _ in prompts]
    longest = max(lengths)
    room = limits.length - longest
    tokens, stops = min(16, room) if wanted is None else wanted, [stop] if isinstance(stop, str) else stop
    require(min(lengths) > 0, 400, "the prompt is empty: give at least a word to continue.", "prompt")
    too_long = f"the prompt has {longest} tokens; with its continuation at most {limits.length} fit: shorten it."
    require(room > 0, 413, too_long, "prompt", "context_length_exceeded")
    require(tokens > 0 or echo, 400, "max_tokens must be above 0, unless the prompt is echoed.", "max_tokens")
    no_room = f"after {longest} tokens of prompt there is room for {room}: ask for at most {room}."
    require(tokens <= room, 400, no_room, "max_tokens", "context_length_exceeded")
    settings = {name: fields[name] for name in ("temperature", "top_p", "seed", "logprobs")}
    options = web.check_fields(fields["stream_options"], {"include_usage": FLAG})
    sampling = Sampling(tokens, stops=tuple(stops), **settings)
    return Job(model, codec, prompts, sampling, n, echo, fields["stream"], **options)


class Engine(Writer):
    """Queues requests, in order, until there are rows for them. One thread runs the model."""

    def __init__(self, model: ChiarForCausalLM, codec: TextCodec, limits: Limits) -> None:
        super().__init__(model)
        self.codec, self.limits = codec, limits
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.closed, self.submitted = False, asyncio.Event()  # closed: accepts no new requests, but finishes the others
        self.thread = ThreadPoolExecutor(1, "chiar-engine")
        self.task: asyncio.Task[None] | None = None
        self.counts: dict[str, float] = defaultdict(float, dict.fromkeys(list(METRICS)[:5], 0.0))
        self.seconds: deque[float] = deque(maxlen=1000)  # durations of the latest completions

    def submit(self, job: Job) -> None:
        """Raises Refused if the queue is full or the server is stopping."""
        if self.closed:
            raise stopping()
        if self.count(self.waiting) >= self.limits.waiting:
            sentence = f"{self.limits.waiting} requests are waiting already: try again later."
            retry_after = min(60, max(1, math.ceil(sum(self.seconds) / max(1, len(self.seconds)))))
            raise Refused(429, sentence, None, "rate_limit_exceeded", "rate_limit_error", retry_after)
        self.waiting.append(job)
        self.submitted.set()
        self.task = self.task or asyncio.create_task(self.work())

    def count(self, jobs: Iterable[Job]) -> int:
        return sum(not job.is_over for job in jobs)

    async def end(self, seconds: float = 0, hurries: Callable[[], bool] = lambda: False) -> None:
        """Accept no new requests, let the others finish for at most `seconds` or until `hurries()`, and stop."""
        self.closed, deadline = True, time.monotonic() + seconds
        while self.count([*self.waiting, *self.running]) and not hurries() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def work(self) -> None:
        try:
            while True:
                self.running = [job for job in self.running if not job.is_over]
                self.waiting = [job for job in self.waiting if not job.is_over]
                while self.waiting and sum(job.left for job in [*self.running, self.waiting[0]]) <= self.limits.rows:
                    self.running.append(self.waiting.pop(0))
                if not (self.running or self.rows):
                    self.submitted.clear()
                    await self.submitted.wait()
                    continue
                await asyncio.get_running_loop().run_in_executor(self.thread, self.advance)
                for job in self.running:
                    job.news.set()
        finally:  # whatever ended it, no request may wait for it
            self.closed = True
            for job in [*self.waiting, *self.running]:
                job.fail(stopping())
                job.news.set()

    def advance(self) -> None:
        """Read one prompt, then add a token to every text; repeat for QUICK seconds. Reading all waiting prompts at
        once would hold up the texts being written."""
        began = time.monotonic()
        while time.monotonic() - began < QUICK:
            unread = [job for job in self.running if len(job.rows) < len(job.offsets) and not job.is_over]
            if not (unread or self.rows):
                break
            try:
                if unread:
                    self.begin_prompt(unread[0])
            except Exception as error:
                self.fail(unread[:1], error)
            try:
                self.step()
            except Exception as error:
                self.fail(self.clear(), error)
        self.counts["generation_seconds_total"] += time.monotonic() - began

    def choose(self, rows: list[Row], logits_BV: Tensor) -> None:
        before = sum(len(row.tokens) for row in rows)
        super().choose(rows, logits_BV)
        self.counts["completion_tokens_total"] += sum(len(row.tokens) for row in rows) - before

    def begin_prompt(self, job: Job) -> None:
        """Read a request's next prompt and write the first token of its choices. Choice i is drawn with seed + i."""
        first, sampling = len(job.rows), job.sampling
        ids, text = job.prompts[first // job.n]
        read, operators = self.read_prompt(ids), self.model.config.operators or []
        self.counts["prompt_tokens_total"] += len(ids)
        for route in read.routes or ():
            counts = route.choice_BT.flatten().bincount(minlength=len(operators)).tolist()
            for operator, count in zip(operators, counts, strict=True):
                self.counts[f'routed_tokens_total{{operator="{operator}"}}'] += count
        scored = job.echo and sampling.logprobs is not None
        scores = score_prompt(self.model, ids, read, sampling.logprobs or 0) if scored else []
        for i in range(job.n):
            seed, send = None if sampling.seed is None else sampling.seed + i, partial(job.put, first + i)
            job.rows.append(Row(self.codec, replace(sampling, seed=seed), self.model.device, send, job))
            if job.echo:
                send(Piece(text, scores))
        if sampling.max_new_tokens:
            return self.begin(read, job.rows[first:])
        for row in job.rows[first:]:
            row.finish("length")

    def fail(self, owners: list[Job], error: Exception) -> None:
        """An internal error, no memory, or logits that are not finite: these requests fail, the server goes on."""
        sentence = "the model failed on this request; the server's log says why."
        if isinstance(error, InputError):
            sentence = str(error)
            print(f"error: {sentence}", file=sys.stderr)
        else:
            traceback.print_exception(error, file=sys.stderr)
        for job in owners:
            job.fail(Refused(500, sentence, kind="server_error"))


class Service(Site):
    def __init__(self, name: str, engine: Engine, key: str = "", host: str = "127.0.0.1", named: bool = True) -> None:
        posts = {COMPLETIONS: self.complete, "/v1/chat/completions": self.refuse_chat}
        gets = {**dict.fromkeys(("/v1/models", "/v1/models/{name:path}"), self.models), "/health": self.health}
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(path, endpoint) for path, endpoint in {**gets, "/metrics": self.show_metrics}.items()]
        super().__init__(host, named, routes, FAREWELL, engine.limits.rows + engine.limits.waiting)
        self.name, self.engine, self.key = name, engine, key
        self.greeting = f"serving {name} on {{}}/v1, until Ctrl-C"
        self.entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "chiar"}

    def check(self, request: Request) -> None:
        """/health and /metrics need no key: they are for monitoring."""
        super().check(request)
        sent, expected = request.headers.get("authorization", "").encode("latin-1"), b"Bearer " + self.key.encode()
        if self.key and request.url.path.startswith("/v1") and not hmac.compare_digest(sent, expected):
            raise Refused(401, "send the API key as Authorization: Bearer KEY.", code="invalid_api_key")

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        super().answered(scope, status, seconds)
        path = scope["path"]
        if path.startswith("/v1"):
            self.engine.counts[f'requests_total{{status="{status}"}}'] += 1
            self.engine.counts["request_seconds_total"] += seconds
        if (path, status) == (COMPLETIONS, 200):
            self.engine.seconds.append(seconds)

    async def drain(self) -> None:
        await self.engine.end(self.engine.limits.grace, lambda: self.should_exit)

    async def complete(self, request: Request) -> Response:
        engine, limits = self.engine, self.engine.limits
        too_long = f"the request is longer than {limits.body} bytes: shorten it."
        body = await web.read_json(request, limits.body, too_long)
        arguments = body, self.name, engine.codec, engine.model.config.vocab_size, limits
        job = await asyncio.to_thread(parse_request, *arguments)  # encoding a long text must not block other streams
        engine.closed |= self.draining
        engine.submit(job)
        request.scope["over"].callback(self.settle, job)
        if job.stream:
            return StreamingResponse(job.events(), media_type="text/event-stream")
        return web.json_response(await web.while_connected(request, job.whole()))

    def settle(self, job: Job) -> None:
        """The response is over. If the job is not, its client has disconnected."""
        if not job.is_over:
            job.ended = True
            self.engine.counts["clients_gone_total"] += 1

    async def refuse_chat(self, request: Request) -> Response:
        sentence = "this is a base language model without a chat template: use /v1/completions."
        raise Refused(400, sentence, code="unsupported_endpoint")

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        require(name in (None, self.name), 404, f"the only model here is {self.name!r}.", "model", "model_not_found")
        return web.json_response({"object": "list", "data": [self.entry]} if name is None else self.entry)

    async def health(self, request: Request) -> Response:
        """503 while stopping and after the engine died, so that a load balancer sends no more requests."""
        failed = self.engine.task is not None and self.engine.task.done()
        state = "failed" if failed else "stopping" if self.draining or self.engine.closed else "ok"
        return web.json_response({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        engine, lines = self.engine, []
        counts = dict(engine.counts)  # a copy: the model's thread adds to them
        routed = {name: count for name, count in counts.items() if name.startswith("routed")}
        gauges: dict[str, float] = {"rows_running": sum(not row.is_over for row in engine.rows)}
        gauges |= {f"requests_{name}": engine.count(getattr(engine, name)) for name in ("waiting", "running")}
        if routed:
            dark = routed.get('routed_tokens_total{operator="attention"}', 0)
            gauges["attention_fraction"] = dark / sum(routed.values())
        for name, samples in groupby(sorted({**counts, **gauges}.items()), lambda sample: sample[0].split("{")[0]):
            lines += [f"# HELP chiar_{name} {METRICS[name][1]}", f"# TYPE chiar_{name} {METRICS[name][0]}"]
            lines += [f"chiar_{sample} {value:.10g}" for sample, value in samples]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")
