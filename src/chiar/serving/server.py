"""A model loaded, and the process that serves it until it is told to stop. Needs starlette and uvicorn."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.stream import open_writer
from chiar.hosts import is_loopback
from chiar.serving.app import Service, make_app
from chiar.serving.engine import Engine
from chiar.serving.limits import Limits
from chiar.serving.metrics import Metrics

FAREWELL = 3.0
"""Seconds for last answers to be read, and for the engine's last step."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""


class Server(uvicorn.Server):
    """Told to stop, it takes nothing new (503), lets what it has finish within the grace time, and goes. Told twice, it
    goes after the token it is at."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining or not self.started:
            super().handle_exit(sig, frame)
            self.force_exit = self.draining  # wait for no client
        self.draining = True
        self.service.engine.closed = True  # one word: a signal may come while the lock is held

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second."""
        if self.draining and not self.should_exit:
            await self.drain()
        return await super().on_tick(counter)

    async def drain(self) -> None:
        engine, deadline = self.service.engine, time.monotonic() + self.service.limits.grace
        while not engine.is_idle and time.monotonic() < deadline and not self.should_exit:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.end, FAREWELL)
        self.should_exit = True


def serve(
    name: str,
    address: Address,
    limits: Limits,
    *,
    max_length: int | None = None,
    served_name: str | None = None,
    api_key: str | None = None,
    gate: str = "prefill",
    fast: bool | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
    note: Note = lambda text: None,
    ready: Note = lambda text: None,
) -> None:
    """Blocks. `note` is told what an operator should know, `ready` the address."""
    service = load_service(name, limits, max_length, served_name, api_key, gate, fast, tokenizer, device, note)
    if api_key is None and is_loopback(address.host):
        service.host = address.host
    elif api_key is None:
        note(f"anybody who reaches {address.host} can use the model: set --api-key.")
    with bind(address) as listener:
        host = f"[{address.host}]" if ":" in address.host else address.host
        config = uvicorn.Config(
            make_app(service),
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=int(FAREWELL),
        )
        service.engine.start()
        ready(f"serving {service.name} on http://{host}:{listener.getsockname()[1]}/v1, until Ctrl-C")
        try:
            Server(config, service).run(sockets=[listener])
        finally:
            service.engine.end(FAREWELL)
            service.reader.shutdown(wait=False, cancel_futures=True)


def load_service(
    name: str,
    limits: Limits,
    max_length: int | None,
    served_name: str | None,
    api_key: str | None,
    gate: str,
    fast: bool | None,
    tokenizer: Path | None,
    device: str,
    note: Note,
) -> Service:
    model, found = open_writer(name, gate, fast, device, note)
    config = model.config
    if config.meta_router and config.gate_pool != "causal":
        config.gate_generation = gate
        model.model.check_gate_can_generate()
        note(f"the gate pools over the {config.gate_pool}, later tokens included: it stays as each prompt set it.")
    trained = config.max_position_embeddings
    length = max_length or trained
    if length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions: --max-length can be {trained} at most.")
    if length > trained:
        note(f"texts of up to {length} tokens are longer than the {trained} the model was trained on.")
    limits = replace(limits, length=length)
    codec, metrics = TextCodec.open(config, found, tokenizer), Metrics(list(config.operators or []))
    engine = Engine(model, codec, limits, metrics)
    return Service(served_name or Path(name).resolve().name, codec, config.vocab_size, limits, engine, metrics, api_key)


def bind(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {address.host}, port {address.port} ({reason}): choose others with --host and --port."
        ) from None
