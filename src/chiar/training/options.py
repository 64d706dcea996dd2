"""The options `chiar train` and `chiar finetune` share."""

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[list[str], typer.Option(metavar="CORPUS", help="Prepared corpus; several mix.")]
Out = Annotated[Path, typer.Option(metavar="RUN", help="Run folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in RUN.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any training setting or configuration field."),
]
Steps = Annotated[int | None, typer.Option(help="Optimiser steps.")]
Rows = Annotated[int | None, typer.Option(help="Rows a step.")]
MicroRows = Annotated[int | None, typer.Option(help="Rows of one forward pass.")]
Length = Annotated[int | None, typer.Option(help="Tokens a row.")]
Rate = Annotated[float | None, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order and dropout.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile the model.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Bit-exact resume on a GPU too.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")]
