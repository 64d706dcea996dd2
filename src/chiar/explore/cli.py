"""`chiar explore` and `chiar report`. Heavy imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A training run (its best model), a model folder, or a preset.")
]
Beside = Annotated[str | None, typer.Option(metavar="RUN2", help="A second model, shown side by side.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a preset's random weights.")]


def explore(
    run: Model = None,
    beside: Beside = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8327,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    most_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 1024,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
) -> None:
    """Serve a local page that routes what you type, live. Without RUN the page says how to get one."""
    from chiar.errors import InputError
    from chiar.explore.start import serve

    if run is None and beside is not None:
        raise InputError("--beside needs a first model: chiar explore RUN --beside RUN2.")
    serve([name for name in (run, beside) if name], host, port, most_tokens, tokenizer, seed, typer.echo)


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A training run, a model folder, or a preset.")],
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to route; give it several times for more.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .html file.")],
    beside: Beside = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A report of chiar eval --json to put in; repeatable.")
    ] = None,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
) -> None:
    """Write the page's view of chosen prompts, with curves and tables, as one HTML file that asks for nothing."""
    from chiar.explore.report import write_report

    write_report([name for name in (run, beside) if name], prompt, out, evaluation or [], tokenizer, seed)
    typer.echo(f"wrote {out}")
