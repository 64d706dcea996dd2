"""`chiar nulltest`. Heavy imports happen inside the verb."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def nulltest(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, a training run (its best model) or a preset.")
    ],
    data: Annotated[Path, typer.Option(metavar="CORPUS", help="A prepared language corpus.")],
    split: Annotated[str | None, typer.Option(help="Split of the corpus; valid, where there is one.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to look at, in rows spread over the split.")] = 8192,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a row; the model's trained length.")] = None,
    flips: Annotated[int, typer.Option(min=0, help="Routes to flip in each routed layer; 0 skips this.")] = 64,
    shuffles: Annotated[int, typer.Option(min=2, help="Shuffles of the labels: the null of information.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of everything drawn at random.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")] = "auto",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON to a new file, - to print only them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for the numbers (nulltest.json) and pictures.")
    ] = None,
) -> None:
    """Ask of every layer whether its routing signal is more than noise, and what a route is worth.

    Spectral entropy against white noise, in the model's basis, the identity and a random one; mutual information of the
    route with token, word class and position; loss changes when a route is flipped; energy compaction of DCT and
    KLT. docs/nulltest.md explains each.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from chiar.console import show, write_json
    from chiar.files import check_new, new_folder
    from chiar.nulltest.pictures import pictures
    from chiar.nulltest.run import nulltest as run_nulltest
    from chiar.nulltest.tables import report_tables

    printed = json is not None and str(json) == "-"
    for new in (out, None if printed else json):
        if new is not None:
            check_new(new)
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bar.add_task(task, total=total)
            bar.advance(tasks[task], done)

        report = run_nulltest(
            model, data, split, tokens=tokens, length=length, flips=flips, shuffles=shuffles, batch_size=batch_size,
            seed=seed, device=device, progress=progress,
        )  # fmt: skip
    if out is not None:
        with new_folder(out) as aside:
            (aside / "nulltest.json").write_text(report.to_json(), encoding="utf-8")
            for name, picture in pictures(report).items():
                (aside / name).write_text(picture, encoding="utf-8")
    if not printed:
        if report.run is not None:
            typer.echo(f"{report.run} is a training run: its best model is tested.")
        for table in report_tables(report):
            typer.echo(table) if isinstance(table, str) else show(table)
    if out is not None:
        typer.echo(f"wrote {out}", err=printed)
    if json is not None:
        write_json(json, report.to_json())
