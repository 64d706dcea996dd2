"""`chiar study`. Heavy imports happen inside."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chiar.errors import InputError

if TYPE_CHECKING:
    from chiar.studies.study import Plan, Study

study_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
    help="Train a declared grid of models on equal tokens; one table and one picture of loss against cost.",
)

WHERE = "A study of ./research/studies, or a .toml file."
CHANGES = "tokens, test_rows, size (tiny, 16m, 400m, 1b), or a training setting or configuration field all runs share."
Name = Annotated[str, typer.Argument(metavar="NAME|FILE", help=WHERE)]
Data = Annotated[list[str] | None, typer.Option(metavar="CORPUS", help="Language corpus; then what is mixed into it.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Runs and tables; given again, the rest is done.")]
Only = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only variants so named; may be given again.")]
Limit = Annotated[float | None, typer.Option(min=0, help="Begin no run that would probably not end within so many.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=CHANGES)]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")]
Record = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a study, or of recorded results.")]


@study_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help=f"{WHERE} Without one: list them.")] = "",
    data: Data = None,
    only: Only = None,
    setting: Set = None,
) -> None:
    """Show the grid: parameters and counted FLOPs of every variant at the f it aims at, before any run."""
    from chiar.studies.results import grid, table_of
    from chiar.studies.study import chosen, find, make_plan, study_names

    if not name:
        studies = [find(name) for name in study_names()]
        rows = [[study.name, str(len(study.variants)), study.duration, study.title] for study in studies]
        return print_table("studies in ./research/studies", ["study", "variants", "trains on", "compares"], rows, [])
    study = asked(name, setting)
    plan = make_plan(study, data, only) if data else None
    print_table(study.title, *table_of(*grid(study, chosen(study, only), plan)))


@study_app.command()
def run(
    name: Name,
    out: Out,
    data: Data = None,
    only: Only = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Seeds, instead of the declared ones.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time on the same device; speeds then do not count.")] = 1,
    limit_minutes: Limit = None,
    setting: Set = None,
    device: Device = "auto",
) -> None:
    """Run what is left of a study: each run a process and a run folder of its own, resumed where it stopped."""
    from chiar.studies.results import RESULTS, update_tables
    from chiar.studies.runner import Runner, StudyFolder

    plan, folder = planned(name, setting, data, only, device, seeds), StudyFolder(out)
    runner = Runner(plan, folder, jobs, device, limit_minutes, typer.echo, lambda: update_tables(folder))
    try:
        with folder.held():
            folder.open(plan)
            runner.go()
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from the last checkpoints.", err=True)
        sys.exit(130)
    if (out / RESULTS).is_file():
        table(out)
    if runner.left:
        typer.echo(f"left, for the same command: {', '.join(runner.left)}")
    if runner.failed:
        typer.echo(f"failed, tried again by the same command: {', '.join(runner.failed)}", err=True)
        sys.exit(1)


@study_app.command()
def table(
    folder: Record,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the tables there.")] = None,
) -> None:
    """Show the table of what is finished, and write table.md, table.csv, pareto.svg (a study's: in its folder)."""
    from chiar.studies.results import read_results, table_of, update_tables, write_tables
    from chiar.studies.runner import STUDY, StudyFolder

    begun = (folder / STUDY).is_file()
    results = update_tables(StudyFolder(folder)) if begun else read_results(folder)
    if out is not None:
        write_tables(results, out)
    print_table(results["title"], *table_of(results["variants"], results["notes"]))
    if begun or out is not None:
        typer.echo(f"wrote {(out or folder) / 'table.md'}, table.csv and pareto.svg")


@study_app.command()
def add(
    folder: Record,
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="results.json files from elsewhere.")],
) -> None:
    """Take over runs of the same study from another folder or machine: they count as done here."""
    from chiar.studies.results import add_results
    from chiar.studies.runner import StudyFolder

    for path in results:
        add_results(StudyFolder(folder), path, typer.echo)
    table(folder)


@study_app.command("time")
def time_command(
    name: Name,
    out: Out,
    data: Data = None,
    only: Only = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant; the median counts.")] = 20,
    setting: Set = None,
    device: Device = "auto",
) -> None:
    """Measure the training step of every variant, one after another in one process, for the table and the picture."""
    from chiar.studies.runner import StudyFolder
    from chiar.studies.timing import time_study

    plan, folder = planned(name, setting, data, only, device), StudyFolder(out)
    with folder.held():
        folder.open(plan)
        time_study(plan, folder, steps, device, typer.echo)
    if folder.told_runs(finished=True) or folder.added():
        table(out)


def asked(name: str, setting: list[str] | None) -> "Study":
    from chiar.studies.study import changed, find
    from chiar.training.cli import parse

    return changed(find(name), dict(parse(item) for item in setting or []))


def planned(
    name: str, setting: list[str] | None, data: list[str] | None, only: list[str] | None, device: str, seeds: str = ""
) -> "Plan":
    from chiar.evaluation.harness import choose_device
    from chiar.studies.study import make_plan

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("chiar study starts its own processes: start it without torchrun.")
    choose_device(device)
    try:
        numbers = [int(part) for part in seeds.split(",")] if seeds else None
    except ValueError:
        raise InputError(f"--seeds takes whole numbers separated by commas, got {seeds!r}.") from None
    return make_plan(asked(name, setting), data or [], only, numbers)


def print_table(title: str, headings: list[str], rows: list[list[str]], notes: list[str]) -> None:
    from rich.table import Table

    from chiar.console import show as show_table

    drawn = Table(*headings, box=None, title=title, title_justify="left")
    for row in rows:
        drawn.add_row(*row)
    show_table(drawn)
    for note in notes:
        typer.echo(f"note: {note}")
