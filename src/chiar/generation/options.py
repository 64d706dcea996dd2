"""Options of the commands that write: `chiar generate` and `chiar serve`."""

from pathlib import Path
from typing import Annotated

import typer

Gate = Annotated[
    str,
    typer.Option(metavar="prefill|refuse", help="A gate that sees the future: freeze it at the prompt, or stop."),
]
Fast = Annotated[
    bool | None,
    typer.Option("--fast/--no-fast", help="Decode by a fixed step, on a GPU a captured one. Default: on a GPU."),
]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")]
