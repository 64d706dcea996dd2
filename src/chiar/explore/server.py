"""The page's server: a few files, and a JSON interface to the models. Everything it sends is of this machine."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from chiar.errors import InputError
from chiar.explore.asked import asked_model, asked_steering, asked_text, asked_wish
from chiar.explore.continuing import Continuation
from chiar.explore.limits import MOST_BYTES, Refused, WaitingRoom, check_origin, read_json
from chiar.explore.loaded import LoadedModel, open_models
from chiar.explore.start import demo_runs, what_to_do
from chiar.explore.view import TooLong, route_view

STATIC = Path(__file__).parent / "static"
FILES = {"/": "index.html", **{f"/{name}": name for name in ("style.css", "theme.js", "marks.js", "view.js", "app.js")}}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Explorer:
    """The models, and how they are asked."""

    def __init__(self, models: list[LoadedModel], most_tokens: int, host: str = "127.0.0.1") -> None:
        self.models, self.most_tokens, self.host = models, most_tokens, host
        self.room = WaitingRoom()

    async def describe(self, request: Request) -> Response:
        """What the page begins with: models, or what to do where there are none."""
        record: dict[str, Any] = {"models": [loaded.about for loaded in self.models]}
        record |= {"most_tokens": self.most_tokens, "most_bytes": MOST_BYTES}
        if not self.models:
            record |= {"advice": what_to_do(), "demo": demo_runs()}
        return answer(record)

    async def health(self, request: Request) -> Response:
        return answer({"waiting": self.room.waiting, "streaming": self.room.streaming})

    async def open_demo(self, request: Request) -> Response:
        """Only on demand: nothing is loaded that nobody asked for."""
        await read_json(request)
        names = demo_runs()
        if self.models or not names:
            raise Refused(409, "there is no demo run to open here.")
        # In the model's thread, so that of two who ask at once the second finds what the first opened.
        self.models = await self.room.answer(request, lambda: self.models or open_models(names))
        return await self.describe(request)

    async def route(self, request: Request) -> Response:
        asked = await read_json(request)
        loaded, text, steering = asked_model(asked, self.models), asked_text(asked), asked_steering(asked)
        return answer(await self.room.answer(request, partial(route_view, loaded, text, steering, self.most_tokens)))

    async def carry_on(self, request: Request) -> Response:
        """Lines of JSON: the text's view, then a token each, then the end."""
        asked = await read_json(request)
        loaded, text, steering = asked_model(asked, self.models), asked_text(asked), asked_steering(asked)
        make = partial(Continuation, loaded, text, asked_wish(asked), steering, self.most_tokens)
        self.room.take_stream()
        try:
            continuation, first = await self.room.answer(request, partial(begin, make))
        except BaseException:
            self.room.give_stream()
            raise
        return Lines(self.lines(request, continuation, first), self.room.give_stream)

    async def lines(self, request: Request, continuation: Continuation, first: dict) -> AsyncIterator[str]:
        yield line({"view": first})
        while not await request.is_disconnected():
            said = await self.room.run(continuation.step)
            if said is None:
                yield line({"end": True})
                return
            yield line(said)


def begin(make: Callable[[], Continuation]) -> tuple[Continuation, dict[str, Any]]:
    continuation = make()
    return continuation, continuation.begin()


class Lines(StreamingResponse):
    """A stream that says when it is over, also where its client left before the first line."""

    def __init__(self, content: AsyncIterator[str], over: Callable[[], None]) -> None:
        super().__init__(content, media_type="application/x-ndjson")
        self.over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.over()


def line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def answer(record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(record, allow_nan=False), status, headers, "application/json")


def file_response(name: str) -> Callable[[Request], Awaitable[Response]]:
    content, kind = (STATIC / name).read_bytes(), TYPES[Path(name).suffix]

    async def send_file(request: Request) -> Response:
        return Response(content, media_type=kind)

    return send_file


def refusal(request: Request, error: Exception) -> Response:
    """Every refusal is one sentence."""
    if isinstance(error, Refused):
        wait = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return answer({"error": error.sentence}, error.status, wait)
    return answer({"error": str(error)}, 413 if isinstance(error, TooLong) else 400)


def unknown(request: Request, error: Exception) -> Response:
    """No such address, or another way of asking for it."""
    assert isinstance(error, HTTPException)
    return answer({"error": f"{request.method} {request.url.path}: {error.detail}."}, error.status_code)


def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


class Guarded:
    """Checks who asks, and puts the headers on everything."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        app = self.app
        try:
            check_origin(Request(scope), self.host)
        except Refused as error:
            app = refusal(Request(scope), error)
        await app(scope, receive, send_with_headers)


def make_app(explorer: Explorer) -> ASGIApp:
    routes = [Route(path, file_response(name)) for path, name in FILES.items()]
    routes += [
        Route("/api/models", explorer.describe),
        Route("/api/health", explorer.health),
        Route("/api/demo", explorer.open_demo, methods=["POST"]),
        Route("/api/route", explorer.route, methods=["POST"]),
        Route("/api/continue", explorer.carry_on, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {Refused: refusal, InputError: refusal, ClientDisconnect: gone, HTTPException: unknown}
    return Guarded(Starlette(routes=routes, exception_handlers=handlers), explorer.host)
