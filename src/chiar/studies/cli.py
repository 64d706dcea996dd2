"""`chiar study`. Slow imports are inside the functions."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from chiar.console import Overwrite
from chiar.files import check_new

HELP = "Train a grid of models on equal tokens and compare them. Loss against cost, in a table and a picture."
study_app = typer.Typer(no_args_is_help=True, context_settings={"max_content_width": 120}, help=HELP)
Name = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A study in ./research/studies, or a .toml file.")]
Data = Annotated[list[str], typer.Option(metavar="CORPUS", help="Prepared language corpus; repeat for mixed training.")]
Vocabulary = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="CORPUS", help="Corpus that sets vocabulary and steps. [default: the preset's vocabulary]"
    ),
]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for runs and tables; an unfinished study continues.")]
Only = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Variants to include; repeatable. [default: all]")]
Seeds = Annotated[str, typer.Option(metavar="0,1,2", help="Seeds to run. [default: those of the study]")]
Jobs = Annotated[int, typer.Option(min=1, help="Concurrent runs on the device; above 1, speeds do not count.")]
Limit = Annotated[float | None, typer.Option(min=0, help="Start no run expected to end after so many minutes.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps to time per variant; the median is reported.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device; auto uses a GPU if there is one.")]
Record = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a study, or of recorded results.")]
Grown = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a study; a new one is created.")]
Target = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder to write to. [default: the study's own; none for recorded results]"),
]
Results = Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="results.json files to add.")]


@study_app.command()
def show(name: Name = "", data: Vocabulary = None, only: Only = None) -> None:
    """Show parameters, and FLOPs at the target f, of a study before any run. Without a name, list the studies."""
    from chiar.studies.results import show_grid
    from chiar.studies.study import declared, find, make_plan

    if name:
        return show_grid(make_plan(find(name), data or [], only))
    for path in declared():
        study = find(str(path))
        typer.echo(f"{path.stem:18} {len(study.variants):2} variants, {study.duration}: {study.title}")


@study_app.command()
def run(
    name: Name, data: Data, out: Out, only: Only = None, seeds: Seeds = "", jobs: Jobs = 1,
    limit_minutes: Limit = None, device: Device = "auto",
) -> None:  # fmt: skip
    """Run what is left of a study. Each run is a process with its own run folder; unfinished runs are resumed."""
    from chiar.studies.results import read_results, write_tables
    from chiar.studies.runner import locked_study, run_study
    from chiar.studies.study import find, make_plan

    plan, limit = make_plan(find(name), data, only, seeds), limit_minutes
    try:
        with locked_study(out, plan, device) as folder:
            failed, left = run_study(plan, folder, jobs, device, limit, lambda: write_tables(read_results(out), out))
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from the last checkpoints.", err=True)
        os._exit(130)  # without waiting for the runs: they exit when their stdin closes
    if folder.record["added"] or any(map(folder.finished, folder.runs)):
        table(out)
    if left:
        typer.echo(f"left, for the same command: {', '.join(left)}")
    if failed:
        typer.echo(f"failed, tried again by the same command: {', '.join(failed)}", err=True)
        sys.exit(1)


@study_app.command()
def table(folder: Record, out: Target = None, overwrite: Overwrite = False) -> None:
    """Show the table of finished runs, and write table.md, results.json and pareto.svg."""
    from chiar.studies.results import read_results, show_rows, write_tables
    from chiar.studies.runner import STUDY

    results = read_results(folder)
    show_rows(results["title"], results["variants"], results["notes"])
    if out is not None and out != folder:
        for name in ("table.md", "results.json", "pareto.svg"):
            check_new(out / name, overwrite)
    if target := out or (folder if (folder / STUDY).is_file() else None):
        write_tables(results, target)
        typer.echo(f"wrote {target / 'table.md'}, results.json and pareto.svg")


@study_app.command()
def add(folder: Grown, results: Results) -> None:
    """Add finished runs of the same study from another folder or machine. They count as done here."""
    from chiar.studies.results import add_results

    for path in results:
        add_results(folder, path)
    table(folder)


@study_app.command("time")
def measure(name: Name, data: Data, out: Out, only: Only = None, steps: Steps = 100, device: Device = "auto") -> None:
    """Time the training step of every variant, for table and picture. Variants run one after another in one process."""
    from chiar.studies.runner import locked_study, time_study
    from chiar.studies.study import find, make_plan

    plan = make_plan(find(name), data, only)
    with locked_study(out, plan, device) as folder:
        time_study(plan, folder, steps, device)
    if folder.record["added"] or any(map(folder.finished, folder.runs)):
        table(out)
