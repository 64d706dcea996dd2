"""What `chiar serve` and `chiar explore` are built on: limits, refusals, checks of who asks, start and stop.

Needs starlette and uvicorn.
"""

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from chiar.errors import InputError

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# How many times the allowed size is read of a body before the line is cut, and the seconds a client has to send it.
READ_ON, BODY_SECONDS = 64, 30.0
Made = TypeVar("Made")


@dataclass(eq=False)
class Refused(Exception):
    """An answer other than 200: a sentence in OpenAI's shape. `param` is the field that was wrong, `code` a name
    programs can look for, `retry_after` the seconds after which to ask again."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = "invalid_request_error"
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return json_response(self.body(), self.status, headers)


async def refuse(request: Request, error: Exception) -> Response:
    """Every refusal is one sentence; of a fault of ours the log has the rest."""
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    elif isinstance(error, ClientDisconnect):
        error = Refused(499, "the client left before its request was complete.")
    elif isinstance(error, InputError):
        error = Refused(getattr(error, "status", 400), str(error))
    elif not isinstance(error, Refused):
        error = Refused(500, "the server failed on this request.", kind="server_error")
    return error.response()


def json_response(record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(record), status, headers, "application/json")


def to_json(record: Mapping[str, Any]) -> bytes:
    """In ASCII: what a client sent may come back in an error, half surrogate pairs among it."""
    return json.dumps(record, allow_nan=False).encode("ascii")


async def read_json(request: Request, most: int, too_long: str) -> dict[str, Any]:
    """The body as an object. No more of it is kept than `most` bytes, whatever its length says; what is too long is
    read to its end all the same, or the client would not see why it is refused. A web page of another origin cannot
    send this content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, with content-type: application/json.")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
                elif size > READ_ON * most:
                    break
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} seconds.") from None
    if size > most:
        raise Refused(413, too_long)
    try:
        asked = json.loads(bytes(body), parse_constant=int)  # int("NaN") raises: it is no JSON
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be a JSON object.")
    return asked


@dataclass(frozen=True)
class Field:
    """What a request may say: the value where it says nothing or null, a check, and what the check wants."""

    default: Any
    fits: Callable[[Any], bool]
    meaning: str
    code: str | None = None


def check_fields(asked: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """A value for every field; Refused names the one that is wrong."""
    for name, value in asked.items():
        if name not in fields:
            sentence = f"there is no parameter {name[:100]!r} here: leave it out."
            raise Refused(400, sentence, name, "unsupported_parameter")
        if value is not None and not fields[name].fits(value):
            raise Refused(400, f"{name} must be {fields[name].meaning}.", name, fields[name].code)
    return {name: field.default if asked.get(name) is None else asked[name] for name, field in fields.items()}


def whole(default: int | None, least: int, most: int) -> Field:
    return Field(default, lambda v: is_whole(v) and least <= v <= most, f"a whole number from {least} to {most}")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any, least: float, most: float) -> bool:
    """NaN lies between nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def read_number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    number = read_number(host)
    return host == "localhost" if number is None else number.is_loopback


def is_called_rightly(header: str, name: str) -> bool:
    """Whether a Host header leads here by localhost, by `name` or by number. Any other name may be a stranger's who let
    it point here, so that his page could read the answers (DNS rebinding); a number cannot be."""
    try:
        called = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        called = ""
    return called in ("localhost", name) or read_number(called) is not None


class Site:
    """An application with a check of who asks before every endpoint, and headers behind it. `host` is what it listens
    on, where it answers to no other name; None: it answers to any. `greeting` tells the address."""

    greeting = "listening on {}"

    def __init__(self, host: str | None, routes: list[Any]) -> None:
        kinds = (Refused, InputError, ClientDisconnect, HTTPException, Exception)
        self.host, self.app = host, Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, refuse))

    def check(self, request: Request) -> None:
        """Refuse who may not ask."""
        if self.host is None:
            return
        called, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_called_rightly(called, self.host):
            raise Refused(421, "this server answers to localhost and to IP addresses only.", code="wrong_host")
        if origin is not None and origin != f"{request.url.scheme}://{called}":
            raise Refused(403, "another site's page may not ask this server.", code="wrong_origin")

    def answered(self, path: str, status: int, seconds: float) -> None:
        """For those who count."""

    def close(self) -> None:
        """Take nothing new. Called by a signal, in the middle of anything."""

    async def drain(self, server: "Server") -> None:
        """Let what runs finish."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began = 500, time.monotonic()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            self.check(Request(scope))
            await self.app(scope, receive, send_on)
        except Refused as error:
            await error.response()(scope, receive, send_on)
        finally:
            self.answered(scope["path"], status, time.monotonic() - began)


async def while_there(request: Request, work: Awaitable[Made]) -> Made:
    """What `work` gives, or ClientDisconnect where the client goes first: the work is then cancelled. The body must
    have been read."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        job.cancel()
        gone.cancel()


class Stream(StreamingResponse):
    """`over` is called however it ends, also where its client left before the first chunk."""

    def __init__(self, chunks: AsyncIterator[bytes], media_type: str, over: Callable[[], None]) -> None:
        super().__init__(chunks, media_type=media_type)
        self.over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.over()


class Server(uvicorn.Server):
    """Told to stop, it takes nothing new, lets the site drain, and goes. Told twice, it waits for no client."""

    def __init__(self, site: Site, farewell: int = 2, connections: int | None = None) -> None:
        """`farewell`: seconds for last answers to be read."""
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        bounds: dict[str, Any] = {"limit_concurrency": connections, "timeout_graceful_shutdown": farewell}
        super().__init__(uvicorn.Config(site, ws="none", lifespan="off", **quiet, **bounds))
        self.site, self.draining = site, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining or not self.started:
            super().handle_exit(sig, frame)
            self.force_exit = self.draining
        self.draining = True
        self.site.close()

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second."""
        if self.draining and not self.should_exit:
            await self.site.drain(self)
            self.should_exit = True
        return await super().on_tick(counter)

    def listen(self, host: str, port: int, say: Callable[[str], None]) -> None:
        """Answer until told to stop; `say` is told the address."""
        with bind(host, port) as listener:
            number = listener.getsockname()[1]
            say(self.site.greeting.format(f"http://{f'[{host}]' if ':' in host else host}:{number}"))
            self.run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """Port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host}, port {port} ({reason}): choose others with --host and --port (--port 0: any)."
        ) from None
