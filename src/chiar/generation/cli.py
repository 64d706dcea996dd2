"""`chiar generate`. Heavy imports happen inside the verb."""

from typing import Annotated

import typer

from chiar.generation.options import Device, Fast, Gate, Tokenizer


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature instead of taking the likeliest token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that make up this share.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    routes: Annotated[bool, typer.Option("--routes", help="Show how light or dark each token was routed.")] = False,
    gate: Gate = "prefill",
    fast: Fast = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text, shown as it is produced. Greedy unless a sampling option is given."""
    from chiar.generation.stream import Sampling, stream_text

    stream_text(
        model,
        prompt,
        Sampling(max_new_tokens, temperature, top_k, top_p, seed),
        routes=routes,
        gate=gate,
        fast=fast,
        tokenizer=tokenizer,
        device=device,
        note=lambda text: typer.echo(f"note: {text}", err=True),
    )
