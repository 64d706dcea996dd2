"""`chiar reproduce`. Heavy imports happen inside."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="ablation-16m, scaling-400m or mixed.")],
    data: Annotated[
        list[str], typer.Option(metavar="CORPUS", help="Prepared language corpus; for mixed, then what is added to it.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Runs and table; given again, the rest is done.")],
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Training tokens a row; the paper's by default.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="tiny|16m|400m|1b", help="Models of another size than the recipe's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and dropout, for every row.")] = 0,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Training setting or configuration field, for every row."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")] = "auto",
) -> None:
    """Train and evaluate every row of one of the paper's tables alike, with the paper's numbers beside ours."""
    from chiar.cli import show
    from chiar.files import write_whole
    from chiar.reproduce.plan import make_plan, parse_changes
    from chiar.reproduce.procedure import Result
    from chiar.reproduce.procedure import reproduce as run_procedure
    from chiar.reproduce.table import to_json, to_markdown, to_rich
    from chiar.training.loop import Interrupted, TrainingStopped

    plan = make_plan(recipe, list(data), budget=budget, size=size, seed=seed, changes=parse_changes(setting or []))

    def write_tables(results: list[Result]) -> None:
        write_whole(out / "table.json", to_json(plan, results))
        write_whole(out / "table.md", to_markdown(plan, results))

    try:
        results = run_procedure(plan, out, device, say=typer.echo, finished=write_tables)
    except TrainingStopped as stopped:
        typer.echo(f"stopped: {stopped}", err=True)
        sys.exit(1)
    except Interrupted:
        typer.echo("interrupted: the same command goes on from the last checkpoint.", err=True)
        sys.exit(130)
    for part in to_rich(plan, results):
        typer.echo(part) if isinstance(part, str) else show(part)
    typer.echo(f"wrote {out / 'table.md'} and {out / 'table.json'}")
