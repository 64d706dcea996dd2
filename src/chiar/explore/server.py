"""The page's server: a few files, and a JSON interface to the models. Everything it sends is of this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from chiar import web
from chiar.explore.steering import KINDS, Steering
from chiar.explore.view import LoadedModel, open_models, route_text
from chiar.generation.writer import Sampling
from chiar.web import Field, Refused

STATIC = Path(__file__).parent / "static"
DEMO = ("runs/demo/v3", "runs/demo/baseline")
# Of a text as UTF-8, and of a request: JSON may spell a byte in six.
MOST_BYTES, MOST_BODY = 20_000, 122_000
TOO_LONG = f"the text is longer than {MOST_BYTES:,} bytes, the most here: shorten it."
Made = TypeVar("Made")


def is_steering(value: Any) -> bool:
    known = isinstance(value, dict) and set(value) == {"kind", "value"} and value["kind"] in KINDS
    return known and web.is_number(value["value"], -1e300, 1e300)


FIELDS = {
    "model": Field(0, web.is_whole, "a whole number"),
    "text": Field(None, lambda value: isinstance(value, str), "a string"),
    "steer": Field(None, is_steering, f"an object with a kind ({' or '.join(KINDS)}) and a number as its value"),
    "tokens": web.whole(40, 1, 256),
    "temperature": Field(0.7, lambda value: web.is_number(value, 0, 5), "a number from 0 to 5"),
    "seed": web.whole(0, 0, 2**63 - 1),
}


def demo_runs() -> list[str]:
    """What `make demo` left below the current folder."""
    return [name for name in DEMO if (Path(name) / "best" / "config.json").is_file()]


class Room:
    """One pass of a model at a time, in a thread of its own; a few requests wait, the rest are told to come back."""

    def __init__(self, seats: int = 16, streams: int = 4) -> None:
        self.seats, self.streams = seats, streams
        self.waiting = self.streaming = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def stream(self, change: int) -> None:
        if change > 0 and self.streaming >= self.streams:
            raise Refused(429, f"{self.streaming} texts are being continued: try again in a while.", retry_after=3)
        self.streaming += change

    async def run(self, work: Callable[[], Made]) -> Made:
        """In the model's thread. Whoever stops waiting takes the work back, unless it has begun."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def answer(self, request: Request, work: Callable[[], Made]) -> Made:
        """The same from a seat, and only while the client is there."""
        if self.waiting >= self.seats:
            raise Refused(429, f"{self.waiting} requests are waiting already: try again in a second.", retry_after=1)
        self.waiting += 1
        try:
            return await web.while_there(request, self.run(work))
        finally:
            self.waiting -= 1


class Explorer(web.Site):
    """The models, and how they are asked."""

    greeting = "the page is at {}/ (Ctrl-C ends it)"

    def __init__(self, models: list[LoadedModel], most_tokens: int, host: str = "127.0.0.1") -> None:
        routes = [
            Route("/api/models", self.describe),
            Route("/api/health", self.health),
            Route("/api/demo", self.open_demo, methods=["POST"]),
            Route("/api/route", self.route, methods=["POST"]),
            Route("/api/continue", self.carry_on, methods=["POST"]),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ]
        super().__init__(host, routes)
        self.models, self.most_tokens, self.room = models, most_tokens, Room()

    async def describe(self, request: Request) -> Response:
        """What the page begins with: models, or the demo runs where there are none."""
        record: dict[str, Any] = {"models": [loaded.about for loaded in self.models]}
        record |= {"most_tokens": self.most_tokens, "demo": [] if self.models else demo_runs()}
        return web.json_response(record)

    async def health(self, request: Request) -> Response:
        return web.json_response({"waiting": self.room.waiting, "streaming": self.room.streaming})

    async def open_demo(self, request: Request) -> Response:
        """Only on demand: nothing is loaded that nobody asked for."""
        await web.read_json(request, MOST_BODY, TOO_LONG)
        names = demo_runs()
        if self.models or not names:
            raise Refused(409, "there is no demo run to open here.")
        # In the model's thread, so that of two who ask at once the second finds what the first opened.
        self.models = await self.room.answer(request, lambda: self.models or open_models(names))
        return await self.describe(request)

    async def asked(self, request: Request, continues: bool) -> Iterator[dict[str, Any]]:
        asked = web.check_fields(await web.read_json(request, MOST_BODY, TOO_LONG), FIELDS)
        if asked["text"] is None:
            raise Refused(400, "text is missing: send some to route.", "text")
        if len(asked["text"].encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise Refused(413, TOO_LONG, "text")
        if not 0 <= asked["model"] < len(self.models):
            raise Refused(400, f"there is no such model: there are {len(self.models)}, counted from 0.", "model")
        steering = None if asked["steer"] is None else Steering(**asked["steer"])
        sampling = Sampling(asked["tokens"], asked["temperature"], seed=asked["seed"]) if continues else None
        return route_text(self.models[asked["model"]], asked["text"], steering, self.most_tokens, sampling)

    async def route(self, request: Request) -> Response:
        return web.json_response(await self.room.answer(request, partial(next, await self.asked(request, False))))

    async def carry_on(self, request: Request) -> Response:
        """Lines of JSON: the text's view, then a token each, then the end."""
        passes = await self.asked(request, True)
        self.room.stream(1)
        try:
            first = await self.room.answer(request, partial(next, passes))
        except BaseException:
            self.room.stream(-1)
            raise
        return web.Stream(self.lines(passes, first), "application/x-ndjson", partial(self.room.stream, -1))

    async def lines(self, passes: Iterator[dict[str, Any]], first: dict[str, Any]) -> AsyncIterator[bytes]:
        record: dict[str, Any] | None = {"view": first}
        while record is not None:
            yield web.to_json(record) + b"\n"
            record = await self.room.run(partial(next, passes, None))
        yield web.to_json({"end": True}) + b"\n"
