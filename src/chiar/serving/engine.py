"""What owns the model: lets waiting requests in, in their order, and writes all texts token by token."""

import asyncio
import contextlib
import math
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.generation.writer import Piece, Row, Writer, score_prompt
from chiar.model.modeling import ChiarForCausalLM
from chiar.serving.protocol import CompletionRequest, Limits
from chiar.web import Refused

COMPLETIONS = "/v1/completions"
# Seconds of writing before the loop sends what was written: going to and fro for each token takes time too.
QUICK = 0.01
COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were answered.",
    "completion_tokens": "Tokens written.",
    "generation_seconds": "Seconds the model was at work.",
    "request_seconds": "Seconds from the first byte of a request to the last of its answer, all requests added up.",
    "clients_gone": "Requests whose client left before the end.",
}


def stopping() -> Refused:
    sentence = "the server is stopping: ask another one, or this one later."
    return Refused(503, sentence, kind="server_error", retry_after=5)


class Job:
    """One request on its way. What the model's thread writes is unsent until its step is over."""

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.rows: list[Row] = []
        self.unsent: list[tuple[int, Piece] | Refused] = []
        self.queue: asyncio.Queue[tuple[int, Piece] | Refused] = asyncio.Queue()
        # Choices that are not finished. Cancelled: nobody reads any more; the writer drops it before its next step.
        self.left, self.failed, self.cancelled = request.rows, False, False

    @property
    def is_over(self) -> bool:
        return self.failed or self.cancelled or not self.left

    @property
    def written(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def put(self, choice: int, piece: Piece) -> None:
        self.left -= piece.finish is not None
        self.unsent.append((choice, piece))

    def fail(self, error: Refused) -> None:
        if not self.is_over:
            self.failed = True
            self.unsent.append(error)

    def send(self) -> None:
        unsent, self.unsent = self.unsent, []
        for item in unsent:
            self.queue.put_nowait(item)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """With the number of their choice, until every choice has ended."""
        open_choices = self.request.rows
        while open_choices:
            item = await self.queue.get()
            if isinstance(item, Refused):
                raise item
            open_choices -= item[1].finish is not None
            yield item


class JobRow(Row):
    """One choice of a request."""

    def __init__(self, job: Job, choice: int, codec: TextCodec, device: Any) -> None:
        super().__init__(codec, job.request.sampling_of(choice), device, partial(job.put, choice))
        self.job = job
        job.rows.append(self)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.job.is_over


class Metrics:
    """Counts and seconds, as text that Prometheus reads."""

    def __init__(self, operators: list[str]) -> None:
        self.sums = dict.fromkeys(COUNTERS, 0.0)
        self.statuses: Counter[int] = Counter()
        self.routed = Counter(dict.fromkeys(operators, 0))
        self.seconds: deque[float] = deque(maxlen=1000)  # that completions took

    def count_request(self, path: str, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.sums["request_seconds"] += seconds
        if (path, status) == (COMPLETIONS, 200):
            self.seconds.append(seconds)

    def count_routes(self, routes: Any) -> None:
        """Which operators the routed layers sent the tokens of a prompt to."""
        for route in routes:
            counts = route.choice_BT.flatten().bincount(minlength=len(self.routed)).tolist()
            self.routed.update(dict(zip(self.routed, counts, strict=True)))

    def typical_seconds(self) -> int:
        """What a completion takes on average, for clients that are sent away: from one second to a minute."""
        return min(60, max(1, math.ceil(sum(self.seconds) / max(1, len(self.seconds)))))

    def text(self, gauges: Mapping[str, tuple[float, str]]) -> str:
        """`gauges`: what is now, with its meaning."""
        lines: list[str] = []

        def family(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> None:
            lines.extend((f"# HELP chiar_{name} {meaning}", f"# TYPE chiar_{name} {kind}"))
            lines.extend(f"chiar_{name}{labels} {value:.10g}" for labels, value in values.items())

        statuses = {f'{{status="{code}"}}': n for code, n in sorted(self.statuses.items())}
        family("requests_total", "counter", "Requests to /v1 by the status of their answer.", statuses)
        for name, meaning in COUNTERS.items():
            family(f"{name}_total", "counter", meaning, {"": self.sums[name]})
        if total := self.routed.total():
            operators = {f'{{operator="{name}"}}': n for name, n in self.routed.items()}
            family("routed_tokens_total", "counter", "Prompt tokens sent to each operator, by layer.", operators)
            meaning = "f: the share of these that went to attention."
            gauges = {**gauges, "attention_fraction": (self.routed["attention"] / total, meaning)}
        for name, (value, meaning) in gauges.items():
            family(name, "gauge", meaning, {"": value})
        return "\n".join(lines) + "\n"


class Engine(Writer):
    """All but the passes of the model happens on the server's loop; those run in a thread, one at a time."""

    def __init__(self, model: ChiarForCausalLM, codec: TextCodec, limits: Limits, metrics: Metrics) -> None:
        super().__init__(model)
        self.codec, self.limits, self.metrics = codec, limits, metrics
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        # Prompts of running requests that were not read yet.
        self.unread: deque[tuple[Job, int]] = deque()
        # Closed: takes nothing new; what waits and runs goes on.
        self.closed, self.something = False, asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "chiar-engine")
        self.task: asyncio.Task[None] | None = None

    def submit(self, job: Job) -> None:
        """Refused where there is no room or no time left."""
        if self.closed:
            raise stopping()
        if self.count(self.waiting) >= self.limits.waiting:
            sentence = f"{self.limits.waiting} requests are waiting already: come back later."
            after = self.metrics.typical_seconds()
            raise Refused(429, sentence, None, "rate_limit_exceeded", "rate_limit_error", after)
        self.waiting.append(job)
        self.something.set()
        self.task = self.task or asyncio.create_task(self.work())

    def count(self, jobs: Any) -> int:
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
                if not (self.unread or self.rows):
                    self.something.clear()
                    await self.something.wait()
                    continue
                began = time.monotonic()
                await asyncio.get_running_loop().run_in_executor(self.thread, self.advance)
                self.metrics.sums["generation_seconds"] += time.monotonic() - began
                for job in self.running:
                    job.send()
        finally:  # whatever ended it, nobody waits for it
            self.closed = True
            for job in [*self.waiting, *self.running]:
                job.fail(stopping())
                job.send()

    def admit(self) -> None:
        """Let in who fits."""
        self.running = [job for job in self.running if not job.is_over]
        self.unread = deque((job, number) for job, number in self.unread if not job.is_over)
        taken = sum(job.left for job in self.running)
        while self.waiting and (self.waiting[0].is_over or taken + self.waiting[0].left <= self.limits.rows):
            job = self.waiting.popleft()
            if not job.is_over:
                taken += job.left
                self.running.append(job)
                self.unread.extend((job, number) for number in range(len(job.request.prompts)))

    def advance(self) -> None:
        """Read one prompt, so that long ones do not hold up those who write, then add a token to every text; quick
        models do so several times."""
        began = time.monotonic()
        while (self.unread or self.rows) and time.monotonic() - began < QUICK:
            if self.unread:
                job, number = self.unread.popleft()
                try:
                    self.begin_prompt(job, number)
                except Exception as error:
                    self.give_up([job], error)
            try:
                self.step()
            except Exception as error:
                self.fail(self.clear(), error)

    def begin_prompt(self, job: Job, number: int) -> None:
        """Read prompt `number` of a request and write the first token of its choices."""
        request, prompt = job.request, job.request.prompts[number]
        read = self.read_prompt(prompt.ids)
        self.metrics.count_routes(read.routes)
        choices = range(number * request.n, (number + 1) * request.n)
        rows: list[Row] = [JobRow(job, choice, self.codec, self.model.device) for choice in choices]
        if request.echo:
            count = request.sampling.logprobs
            scores = [] if count is None else score_prompt(self.model, prompt.ids, read, count)
            for choice in choices:
                job.put(choice, Piece(prompt.text, scores))
        if request.sampling.max_new_tokens:
            self.begin(read, rows)
        else:
            for row in rows:
                row.finish("length")

    def fail(self, rows: list[Any], error: Exception) -> None:
        self.give_up([row.job for row in rows], error)

    def give_up(self, jobs: list[Job], error: Exception) -> None:
        """A fault of ours, or no memory: these requests fail, the server goes on."""
        traceback.print_exception(error, file=sys.stderr)
        for job in jobs:
            job.fail(Refused(500, "the model failed on this request; the server's log says why.", kind="server_error"))
