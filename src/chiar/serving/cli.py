"""`chiar serve`. Heavy imports happen inside the command."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chiar.generation.cli import Device, Fast, Gate, Model, Tokenizer, note


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Model name for clients. [default: the folder's name]")] = None,
    api_key: Annotated[str, typer.Option(envvar="CHIAR_API_KEY", help="API key that clients must send.")] = "",
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens, prompt included. [default: the trained length]")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Maximum sequences decoded at once, and per request.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Maximum queued requests; more get 429.")] = 64,
    max_body: Annotated[int, typer.Option(min=1024, help="Maximum bytes of a request; more get 413.")] = 1 << 20,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for requests to finish at shutdown.")] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log one line per request to stderr.")] = False,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Serve a model through OpenAI's completions API. With streaming, limits, /health and /metrics."""
    from chiar.errors import InputError, optional_module

    for package in ("starlette", "uvicorn"):
        optional_module(package, "serve", "chiar serve")
    from chiar.generation.writer import open_writer
    from chiar.serving.app import Engine, Limits, Service

    opened, codec, _ = open_writer(model, gate, fast, tokenizer, device, note)
    trained = opened.config.max_position_embeddings
    if max_length is not None and max_length > trained:
        if opened.config.positions == "learned":
            raise InputError(f"the model has {trained} learned positions: --max-length can be {trained} at most.")
        note(f"texts of up to {max_length} tokens are longer than the {trained} the model was trained on.")
    local = not api_key and re.fullmatch(r"localhost|::1|127\.[\d.]+", host) is not None
    if host and not api_key and not local:
        note(f"anybody who reaches {host} can use the model: set --api-key.")
    engine = Engine(opened, codec, Limits(max_length or trained, rows, waiting, max_body, grace))
    service = Service(name or Path(model).resolve().name, engine, api_key, host, local)
    service.log = partial(typer.echo, err=True) if access_log else None
    service.listen(port, typer.echo)
