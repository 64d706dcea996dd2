"""The page's server: static files and a JSON interface to the models. Everything it sends comes from this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from chiar import web
from chiar.explore.steering import FAR, KINDS, Steering
from chiar.explore.view import STATIC, LoadedModel, open_models, route_text
from chiar.generation.writer import Sampling
from chiar.web import TEXT, Field, Refused, Result, Site, require

CONTINUE = "/api/continue"
DEMO = ("runs/demo/v5", "runs/demo/dense")
MOST_BYTES, MOST_BODY = 20_000, 122_000  # of a text in UTF-8, and of a request: JSON may escape a byte as six
TOO_LONG = f"the text is longer than {MOST_BYTES:,} bytes, the most allowed here: shorten it."
# Limits of concurrent requests, and of texts continued at once; each with the Retry-After of further ones, in seconds.
SEATS, STREAMS = (16, 1), (4, 3)
NUMBER = web.between(*FAR, None, int | float)


def is_steering(value: Any) -> bool:
    known = isinstance(value, dict) and set(value) == {"kind", "value"} and value["kind"] in KINDS
    return known and NUMBER[1](value["value"])


FIELDS: dict[str, Field] = {
    "model": web.between(0, 2**31, 0),
    "text": TEXT,
    "steer": (None, is_steering, f"an object with a kind ({' or '.join(KINDS)}) and a number as its value"),
    "tokens": web.between(1, 256, 40),
    "temperature": web.between(0, 5, 0.7, int | float),
    "seed": web.between(0, 2**63 - 1, 0),
}


def demo_runs() -> list[str]:
    return [name for name in DEMO if (Path(name) / "best" / "config.json").is_file()]


class Explorer(Site):
    """Serves the page and the models, which run one pass at a time in a thread of their own."""

    greeting = "the page is at {}/ (Ctrl-C ends it)"

    def __init__(self, models: list[LoadedModel], most_tokens: int, host: str = "127.0.0.1") -> None:
        posts = {"/api/demo": self.open_demo, "/api/route": self.route, CONTINUE: self.route}
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        files = Mount("/", StaticFiles(directory=STATIC, html=True))
        super().__init__(host, True, [Route("/api/models", self.describe), *routes, files], 2, SEATS[0])
        self.models, self.most_tokens = models, most_tokens
        self.seated: set[Request] = set()
        self.streaming: set[Request] = set()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def admit(self, request: Request, active: set[Request], most: int, seconds: int) -> None:
        """Adds the request to `active` until its response is over, or refuses it if there are `most` already."""
        if len(active) >= most:
            raise Refused(429, f"{most} requests are running already: try again in {seconds} s.", retry_after=seconds)
        active.add(request)
        request.scope["over"].callback(active.discard, request)

    async def work(self, one_pass: Callable[[], Result]) -> Result:
        """Run in the models' thread. Cancelling this cancels the pass, unless it has begun."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, one_pass)

    async def describe(self, request: Request) -> Response:
        """What the page starts with: the models, or the demo runs if no model is open."""
        demo, models = [] if self.models else demo_runs(), [loaded.about for loaded in self.models]
        return web.json_response({"models": models, "most_tokens": self.most_tokens, "demo": demo})

    async def open_demo(self, request: Request) -> Response:
        """Loads the demo runs, which the page does on request only."""
        await web.read_json(request, MOST_BODY, TOO_LONG)
        names = demo_runs()
        require(bool(names) and not self.models, 409, "there is no demo run to open here.")
        # In the models' thread, so that the second of two simultaneous requests gets the models of the first.
        self.models = await self.work(lambda: self.models or open_models(names))
        return await self.describe(request)

    async def route(self, request: Request) -> Response:
        """The view of a text. To continue it: a stream of JSON lines with the view, each token, and the end."""
        fields, count = web.check_fields(await web.read_json(request, MOST_BODY, TOO_LONG), FIELDS), len(self.models)
        require(len(fields["text"].encode()) <= MOST_BYTES, 413, TOO_LONG, "text")
        require(fields["model"] < count, 400, f"there is no such model: there are {count}, counted from 0.", "model")
        self.admit(request, self.seated, *SEATS)
        steering, sampling = None if fields["steer"] is None else Steering(**fields["steer"]), None
        if request.url.path == CONTINUE:
            self.admit(request, self.streaming, *STREAMS)
            sampling = Sampling(fields["tokens"], fields["temperature"], seed=fields["seed"])
        passes = route_text(self.models[fields["model"]], fields["text"], steering, self.most_tokens, sampling)
        view = await web.while_connected(request, self.work(partial(next, passes)))
        if sampling is None:
            return web.json_response(view)
        return StreamingResponse(self.lines(passes, {"view": view}), media_type="application/x-ndjson")

    async def lines(self, passes: Iterator[dict[str, Any]], record: dict[str, Any] | None) -> AsyncIterator[bytes]:
        while record is not None:
            yield web.to_json(record) + b"\n"
            record = await self.work(partial(next, passes, None))
        yield web.to_json({"end": True}) + b"\n"
