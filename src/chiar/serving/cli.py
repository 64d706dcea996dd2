"""`chiar serve`. Heavy imports happen inside the verb."""

from typing import Annotated

import typer

from chiar.generation.options import Device, Fast, Gate, Tokenizer


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")],
    host: Annotated[str, typer.Option(help="Address to listen on; by default this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its folder's name by default.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="CHIAR_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and continuation; the trained length by default.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Texts written at once, and at most for one request.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 64,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request; more get 413.")] = 1 << 20,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running requests to finish when told to stop.")
    ] = 30.0,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI's completions, with streaming, limits, /health and /metrics."""
    from chiar.errors import optional_module

    for package in ("starlette", "uvicorn"):
        optional_module(package, "serve", "chiar serve")

    from chiar.serving.limits import Limits
    from chiar.serving.server import Address
    from chiar.serving.server import serve as run_server

    def note(text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    run_server(
        model,
        Address(host, port),
        Limits(length=0, rows=rows, waiting=waiting, body=max_body, grace=grace),
        max_length=max_length,
        served_name=name,
        api_key=api_key or None,
        gate=gate,
        fast=fast,
        tokenizer=tokenizer,
        device=device,
        note=note,
        ready=typer.echo,
    )
