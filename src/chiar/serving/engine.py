"""The thread that owns the model: lets waiting requests in, in their order, and writes all texts token by token."""

import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.serving.batch import Batch
from chiar.serving.job import Job
from chiar.serving.limits import Limits
from chiar.serving.metrics import Metrics
from chiar.serving.problems import ApiError, stopping


class Engine:
    def __init__(self, model: Any, codec: TextCodec, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.batch = Batch(model, codec, metrics.count_routes, self.give_up)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.unread: deque[tuple[Job, int]] = deque()
        """Prompts of running requests that were not read yet."""
        self.closed = self.ended = False
        self.change = threading.Condition()
        self.thread = threading.Thread(target=self.run, name="chiar-engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, job: Job) -> None:
        """An ApiError where there is no room or no time left."""
        with self.change:
            if self.closed:
                raise stopping()
            if self.count_waiting() >= self.limits.waiting:
                raise ApiError(
                    429,
                    f"{self.limits.waiting} requests are waiting already: come back later.",
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=self.metrics.typical_seconds(),
                )
            self.waiting.append(job)
            self.change.notify()

    def count_waiting(self) -> int:
        return sum(not job.is_over for job in list(self.waiting))

    def count_running(self) -> int:
        return sum(not job.is_over for job in list(self.running))

    @property
    def is_idle(self) -> bool:
        with self.change:  # a request is let in under this lock: no look may fall between leaving and coming
            return not self.count_waiting() and not self.count_running()

    def close(self) -> None:
        """Take nothing new; what waits and runs goes on."""
        with self.change:
            self.closed = True

    def end(self, seconds: float) -> None:
        """Tell those still there that it is over, and wait for the thread."""
        self.dismiss()
        if self.thread.is_alive():
            self.thread.join(seconds)

    def dismiss(self) -> None:
        with self.change:
            self.closed = self.ended = True
            for job in [*self.waiting, *self.running]:
                if not job.is_over:
                    job.fail(stopping())
            self.change.notify()

    def run(self) -> None:
        try:
            while self.admit():
                began = time.monotonic()
                self.advance()
                self.metrics.add("generation_seconds", time.monotonic() - began)
        finally:
            self.dismiss()  # whatever ended the thread, nobody waits for it

    def admit(self) -> bool:
        """Wait for something to do and let in who fits; False at the end."""
        with self.change:
            while not (self.ended or self.waiting or self.unread or self.batch.rows):
                self.change.wait()
            self.running = [job for job in self.running if not job.is_over]
            self.unread = deque((job, number) for job, number in self.unread if not job.is_over)
            taken = sum(job.left for job in self.running)
            while self.waiting and (self.waiting[0].is_over or taken + self.waiting[0].left <= self.limits.rows):
                job = self.waiting.popleft()
                if not job.is_over:
                    taken += job.left
                    self.running.append(job)
                    self.unread.extend((job, number) for number in range(len(job.request.prompts)))
            return not self.ended

    def advance(self) -> None:
        """Read one prompt, so that long ones do not hold up those who write, then add a token to every text."""
        if self.unread:
            job, number = self.unread.popleft()
            try:
                self.batch.begin(job, number)
            except Exception as error:
                self.give_up([job], error)
        try:
            self.batch.step()
        except Exception as error:
            self.give_up([row.job for row in self.batch.clear()], error)

    def give_up(self, jobs: list[Job], error: Exception) -> None:
        """A fault of ours, or no memory: these requests fail, the server goes on."""
        traceback.print_exception(error, file=sys.stderr)
        for job in jobs:
            if not job.is_over:
                job.fail(
                    ApiError(500, "the model failed on this request; the server's log says why.", kind="server_error")
                )
