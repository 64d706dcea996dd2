"""`chiar explore`. Heavy imports happen inside the command."""

from pathlib import Path
from typing import Annotated

import typer

from chiar.console import Overwrite
from chiar.generation.cli import Tokenizer


def explore(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model folder, run or preset.")] = None,
    beside: Annotated[str | None, typer.Option(metavar="MODEL2", help="Second model to show side by side.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8327,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    most_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a text.")] = 1024,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of serving, write the view of each --prompt to .html.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text for --out; repeatable.")] = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option(metavar="REPORT", help="Report of chiar eval for --out; repeatable.")
    ] = None,
    overwrite: Overwrite = False,
    tokenizer: Tokenizer = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a preset's random weights.")] = 0,
) -> None:
    """Serve a local page that shows live how typed text is routed. Without MODEL, the page says how to get one."""
    from chiar.errors import InputError, optional_module

    if model is None and (beside is not None or out is not None):
        option = "--out" if beside is None else "--beside"
        raise InputError(f"{option} needs a first model: chiar explore MODEL {option} …")
    if (out is None) != (not prompt) or (evaluation and out is None):
        raise InputError("--out FILE.html and --prompt TEXT go together: what is written is the view of a prompt.")
    names = [name for name in (model, beside) if name]
    if out is not None:
        from chiar.explore.report import write_report

        write_report(names, prompt or [], out, evaluation or [], overwrite, tokenizer=tokenizer, seed=seed)
        typer.echo(f"wrote {out}")
        return visit(out.resolve().as_uri()) if open_page else None
    for package in ("starlette", "uvicorn"):
        optional_module(package, "page", "the page")
    from chiar.explore.server import Explorer, open_models

    Explorer(open_models(names, tokenizer, seed), most_tokens, host).listen(
        port, typer.echo, visit if open_page else None
    )


def visit(address: str) -> None:
    """Opens the user's browser, in a thread because some browsers block until they are closed."""
    import threading
    import webbrowser

    def show() -> None:
        if not webbrowser.open(address):
            typer.echo(f"note: no browser was found here: open {address} in yours.", err=True)

    threading.Thread(target=show).start()
