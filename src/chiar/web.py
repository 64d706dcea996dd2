"""The HTTP base of `chiar serve` and `chiar explore`: limits, error responses, request checks, startup and shutdown."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from chiar.errors import InputError
from chiar.visible import SURROGATES, visible

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin", "cache-control": "no-store",
}  # fmt: skip
# Accepted Host headers: IP addresses and our own names. Others may be a foreign page's, by DNS rebinding.
OWN_NAME = r"(localhost|[\d.]+|\[[\da-f:.]+\]|{})(:\d+)?"
# At most this multiple of the allowed size is read of a body; and seconds a client has to send it.
READ_ON, BODY_SECONDS = 64, 30.0
# Connections allowed beyond the requests in progress, and seconds a connection may wait for its client.
SPARE, IDLE_SECONDS = 64, 60.0
Result = TypeVar("Result")


@dataclass(eq=False)
class Refused(Exception):
    """An error response in OpenAI's format: `param` is the wrong field, `code` is for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = "invalid_request_error"
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def require(holds: bool, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
    if not holds:
        raise Refused(status, message, param, code)


async def refuse(request: Request, error: Exception) -> Response:
    """The error as a response of one sentence. The traceback of an internal error is in the log."""
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    elif isinstance(error, InputError):
        error = Refused(getattr(error, "status", 400), str(error))
    elif not isinstance(error, Refused):
        status = 499 if isinstance(error, ClientDisconnect) else 500
        error = Refused(status, "the server failed on this request.", kind="server_error")
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    headers |= {"connection": "close"} if error.status == 503 else {}
    return json_response(error.body(), error.status, headers)


def to_json(record: Mapping[str, Any]) -> bytes:
    """ASCII, because an error may quote what the client sent, lone surrogates included."""
    return json.dumps(record, allow_nan=False).encode("ascii")


def json_response(record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(record), status, headers, "application/json")


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number.")


async def read_json(request: Request, most: int, too_long: str) -> dict[str, Any]:
    """The body as an object. Bytes beyond `most` are read and discarded, so that the client gets to see the error."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    require(content_type == "application/json", 415, "send JSON, with content-type: application/json.")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                body += chunk if size <= most else b""
                if size > READ_ON * most:
                    break
        record = json.loads(bytes(body), parse_constant=refuse_constant) if size <= most else None
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} seconds.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    require(size <= most, 413, too_long)
    if not isinstance(record, dict):
        raise Refused(400, "the body must be a JSON object.")
    return record


# Of a request field: the default (also for null), a check, and what the check allows, in words.
Field = tuple[Any, Callable[[Any], bool], str]
TEXT: Field = ("", lambda text: isinstance(text, str) and not SURROGATES.search(text), "text, without lone surrogates")
UNKNOWN: Field = (None, lambda value: False, "left out: it is not supported")


def between(least: float, most: float, default: float | None, kind: Any = int) -> Field:
    """A number of this kind within bounds; NaN is rejected."""
    meaning = f"a {'whole ' if kind is int else ''}number from {least} to {most}"
    return default, lambda v: isinstance(v, kind) and not isinstance(v, bool) and least <= v <= most, meaning


def check_fields(record: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The record with defaults filled in. Raises Refused, which names the wrong field."""
    for name, value in record.items():
        _, fits, meaning = fields.get(name, UNKNOWN)
        if name not in fields or (value is not None and not fits(value)):
            unsupported = "unsupported_parameter" if meaning == UNKNOWN[2] else None
            raise Refused(400, f"{name[:100]!r} must be {meaning}.", name, unsupported)
    return {name: field[0] if record.get(name) is None else record[name] for name, field in fields.items()}


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects first. The body must have been read."""
    job = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([job], timeout=0.1))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        return job.result()
    finally:
        job.cancel()


class Connection(H11Protocol):
    """If there are too many connections, a new one replaces the one that has waited longest for its client. If none
    waits for its client, the new one gets 503 (Site.check)."""

    config: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        connections: set[Any] = self.connections
        waiting = [connection for connection in connections if connection.waits and connection is not self]
        if waiting and len(connections) > self.config.app.most:
            min(waiting, key=lambda connection: connection.since).drop()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.since = self.loop.time()
        super().pause_writing()

    @property
    def waits(self) -> bool:
        """Whether it waits for its client to send a whole request or to read the response, since `since` or later."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class Listener(socket.socket):
    """A listening socket that accepts nothing while `most` connections are open. asyncio accepts all pending
    connections before it handles any, and would run out of file descriptors."""

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(fileno=listening.detach())
        self.most, self.accepted = most, list[socket.socket]()

    def accept(self) -> tuple[socket.socket, Any]:
        self.accepted = [connection for connection in self.accepted if connection.fileno() >= 0]
        if len(self.accepted) >= self.most:
            raise BlockingIOError
        connection, address = super().accept()
        self.accepted.append(connection)
        return connection, address


class Site(uvicorn.Server):
    """An application and its server. On a first stop signal it drains and exits; on a second it waits for no client.
    Endpoints may push callbacks for the end of their response onto the stack scope["over"]."""

    greeting = "listening on {}"
    log: Callable[[str], None] | None = None  # called with a line for every response

    def __init__(self, host: str, named: bool, routes: list[Any], farewell: int, busy: int) -> None:
        """`named`: accept only Host headers of its own (OWN_NAME). `farewell`: seconds for the last responses to be
        read. `busy`: how many requests may be in progress."""
        kinds = (Refused, InputError, ClientDisconnect, HTTPException, Exception)
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, refuse))
        quiet: Any = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
        settings: Any = {"http": Connection, "ws": "none", "loop": "asyncio", "timeout_graceful_shutdown": farewell}
        super().__init__(uvicorn.Config(self, **quiet, **settings))
        self.host, self.named, self.draining, self.most = host, named, False, busy + SPARE

    def check(self, request: Request) -> None:
        """Refuse requests of foreign pages, and those above the limit of connections."""
        if len(self.server_state.connections) > self.most:
            raise Refused(503, "the server is full: try again later.", kind="server_error", retry_after=1)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.named and not re.fullmatch(OWN_NAME.format(re.escape(self.host)), host, re.IGNORECASE | re.ASCII):
            raise Refused(421, "this server answers to localhost and to IP addresses only.", code="wrong_host")
        if self.named and origin not in (None, f"{request.url.scheme}://{host}"):
            raise Refused(403, "a page of another site may not use this server.", code="wrong_origin")

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Log a response, but neither the request's body nor its query nor its key."""
        if self.log is not None:
            now, client = datetime.now().astimezone().isoformat(timespec="milliseconds"), scope["client"] or ["-"]
            path = visible(scope["path"], keep="")[:200]
            self.log(f"{now} {client[0]} {scope['method']} {path} {status} {seconds:.3f} s")

    async def drain(self) -> None:
        """Let running requests finish."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began = 500, time.monotonic()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        with ExitStack() as scope["over"]:
            scope["over"].callback(lambda: self.answered(scope, status, time.monotonic() - began))
            try:
                self.check(Request(scope))
            except Refused as error:
                return await (await refuse(Request(scope), error))(scope, receive, send_on)
            await self.app(scope, receive, send_on)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining or not self.started:
            super().handle_exit(sig, frame)
            self.force_exit = self.draining
        self.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.draining and not self.should_exit:
            await self.drain()
            self.should_exit = True
        connections: list[Any] = [*self.server_state.connections]
        for connection in connections if counter % 10 == 0 else ():
            if connection.waits and connection.loop.time() - connection.since > IDLE_SECONDS:
                connection.drop()
        return await super().on_tick(counter)

    def listen(self, port: int, say: Callable[[str], None], visit: Callable[[str], None] | None = None) -> None:
        """Serve until stopped. `say` gets the greeting, `visit` the address. Port 0 takes any free one."""
        if not self.host:
            raise InputError("--host is empty, which would let every machine in: leave it out, or say 0.0.0.0.")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, port), family=family, backlog=1024)
        except (OSError, OverflowError) as error:
            where = f"{self.host}, port {port} ({getattr(error, 'strerror', None) or error})"
            raise InputError(f"cannot listen on {where}: choose others with --host and --port 0.") from None
        with suppress(ImportError):  # Windows has no such limit
            import resource

            # A third of the free file descriptors each: connections, connections being dropped, other files.
            free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63 - listener.fileno()  # -1: no limit
            self.most = max(1, min(self.most, free // 3))
        with Listener(listener, 2 * self.most) as listener:
            name = f"[{self.host}]" if ":" in self.host else self.host
            port = listener.getsockname()[1]
            say(self.greeting.format(f"http://{name}:{port}"))
            if visit is not None:
                visit(f"http://{'localhost' if self.host in ('0.0.0.0', '::') else name}:{port}/")
            self.run(sockets=[listener])
