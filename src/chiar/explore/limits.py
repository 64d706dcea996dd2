"""What a client may ask of a small server: how long a text, how many at once, by which name."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from chiar.hosts import is_called_rightly

MOST_BYTES = 20_000
"""Of a text, as UTF-8."""
MOST_BODY = 6 * MOST_BYTES + 2_000
"""JSON may spell a byte in six."""
MOST_READ = 16_000_000
"""A body that is too long is still read up to here, so that the client hears the answer."""

Made = TypeVar("Made")


@dataclass
class Refused(Exception):
    """An answer other than 200, with a sentence."""

    status: int
    sentence: str
    retry_after: int | None = None


class WaitingRoom:
    """One pass of a model at a time, in a thread of its own; a few requests wait, the rest are told to come back."""

    def __init__(self, seats: int = 16, streams: int = 4) -> None:
        self.seats, self.streams = seats, streams
        self.waiting = self.streaming = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    @contextmanager
    def seat(self) -> Iterator[None]:
        if self.waiting >= self.seats:
            raise Refused(429, f"{self.waiting} requests are waiting already: try again in a second.", retry_after=1)
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def take_stream(self) -> None:
        if self.streaming >= self.streams:
            raise Refused(429, f"{self.streaming} texts are being continued: try again in a few seconds.", 3)
        self.streaming += 1

    def give_stream(self) -> None:
        self.streaming -= 1

    async def run(self, work: Callable[[], Made]) -> Made:
        """In the model's thread. Whoever stops waiting takes the work back, unless it has begun."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def answer(self, request: Request, work: Callable[[], Made]) -> Made:
        """The same from a seat, and only while the client is there."""
        with self.seat():
            job = asyncio.ensure_future(self.run(work))
            gone = asyncio.ensure_future(until_gone(request))
            try:
                await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not job.done():
                    raise ClientDisconnect
                return job.result()
            finally:
                job.cancel()
                gone.cancel()


async def until_gone(request: Request) -> None:
    """Ends when the client closes its connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object, or Refused: too long, or not JSON."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise Refused(415, "send the request as application/json.")
    too_long = Refused(413, f"the text is longer than {MOST_BYTES:,} bytes, the most here: shorten it.")
    body, read = bytearray(), 0
    async for part in request.stream():
        read += len(part)
        if read <= MOST_BODY:
            body += part
        elif read > MOST_READ:
            raise too_long
    if read > MOST_BODY:
        raise too_long
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON.") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the request must be a JSON object.")
    return asked


def check_origin(request: Request, name: str) -> None:
    """Refuse pages of other sites. `name` is what the server was told to listen on."""
    host = request.headers.get("host", "")
    if not is_called_rightly(host, name):
        raise Refused(421, "this server answers to localhost and to IP addresses only.")
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{host}":
        raise Refused(403, "another site's page may not ask this server.")
