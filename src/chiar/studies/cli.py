"""`chiar study`. Heavy imports happen inside."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

study_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
    help="Train a declared grid of models on equal tokens; one table and one picture of loss against cost.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A declared study (chiar study list), or a .toml file.")]
Data = Annotated[str, typer.Option(metavar="CORPUS", help="Prepared language corpus.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Runs and tables; given again, the rest is done.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Only variants whose name matches; may be given several times.")
]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Seeds, instead of the declared ones.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Training tokens a run, instead of what the study says.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Training setting or configuration field all runs share."),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a study.")]


@study_app.command("list")
def list_studies() -> None:
    """List the declared studies."""
    from rich.table import Table

    from chiar.cli import show as show_table
    from chiar.studies.catalog import DECLARED, find

    table = Table("study", "controls", "candidates", "trains on", "what it compares", box=None)
    for name in DECLARED:
        study = find(name)
        controls = sum(variant.role == "control" for variant in study.variants)
        length = f"{study.epochs:g} epoch(s)" if study.tokens is None else f"{study.tokens:,} tokens"
        table.add_row(name, str(controls), str(len(study.variants) - controls), length, study.title)
    show_table(table)


@study_app.command()
def show(
    name: Name,
    data: Annotated[str | None, typer.Option(metavar="CORPUS", help="Count with its vocabulary and length.")] = None,
    only: Only = None,
    tokens: Tokens = None,
    setting: Set = None,
) -> None:
    """Show the grid: parameters and counted FLOPs of every variant at the f it aims at, before any run."""
    from chiar.studies.catalog import find
    from chiar.studies.plan import changed, chosen, make_plan
    from chiar.studies.table import grid

    study, changes = find(name), parsed(setting)
    if data is None:
        study = changed(study, tokens, changes)
        parts = grid(study, chosen(study, only), None, None)
    else:
        plan = make_plan(study, data, only=only, tokens=tokens, changes=changes)
        parts = grid(plan.study, chosen(plan.study, only), plan.corpus.vocab_size, plan.steps)
    print_parts(parts)


@study_app.command()
def run(
    name: Name,
    data: Data,
    out: Out,
    only: Only = None,
    seeds: Seeds = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time on the same device; speeds then do not count.")] = 1,
    limit_minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no run that would probably not end within so many minutes.")
    ] = None,
    tokens: Tokens = None,
    setting: Set = None,
    device: Device = "auto",
) -> None:
    """Run what is left of a study: each run a process and a run folder of its own, resumed where it stopped."""
    from chiar.evaluation.harness import choose_device
    from chiar.studies.catalog import find
    from chiar.studies.folder import StudyFolder
    from chiar.studies.plan import make_plan
    from chiar.studies.runner import run_study
    from chiar.studies.table import to_rich, write_tables

    choose_device(device)
    plan = make_plan(find(name), data, only=only, seeds=seed_list(seeds), tokens=tokens, changes=parsed(setting))
    results: dict[str, Any] = {}

    def finished() -> None:
        results.update(write_tables(StudyFolder(out)))

    try:
        outcome = run_study(
            plan, out, jobs=jobs, device=device, limit_minutes=limit_minutes, say=typer.echo, finished=finished
        )
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from the last checkpoints.", err=True)
        sys.exit(130)
    if results:
        print_parts(to_rich(results))
        typer.echo(f"wrote {out / 'table.md'}, table.csv, results.json and pareto.svg")
    if outcome.left:
        typer.echo(f"left, for the same command: {', '.join(outcome.left)}")
    if outcome.failed:
        typer.echo(f"failed, tried again by the same command: {', '.join(outcome.failed)}", err=True)
        sys.exit(1)


@study_app.command()
def table(folder: Folder) -> None:
    """Write table.md, table.csv, results.json and pareto.svg from the runs finished so far, and show the table."""
    from chiar.studies.folder import StudyFolder
    from chiar.studies.table import to_rich, write_tables

    print_parts(to_rich(write_tables(StudyFolder(folder))))
    typer.echo(f"wrote {folder / 'table.md'}, table.csv, results.json and pareto.svg")


@study_app.command()
def add(
    folder: Folder,
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="results.json files of the same study from elsewhere.")
    ],
) -> None:
    """Take over runs that were done in another folder or on another machine: they count as done here."""
    from chiar.studies.adding import add_results
    from chiar.studies.folder import StudyFolder
    from chiar.studies.table import to_rich, write_tables

    for path in results:
        add_results(StudyFolder(folder), path, typer.echo)
    print_parts(to_rich(write_tables(StudyFolder(folder))))


@study_app.command("time")
def time_command(
    name: Name,
    data: Data,
    out: Out,
    only: Only = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant; the median counts.")] = 20,
    tokens: Tokens = None,
    setting: Set = None,
    device: Device = "auto",
) -> None:
    """Measure the training step of every variant, one after another in one process, for the table and the picture."""
    from chiar.evaluation.harness import choose_device
    from chiar.studies.catalog import find
    from chiar.studies.folder import StudyFolder
    from chiar.studies.plan import make_plan
    from chiar.studies.table import write_tables
    from chiar.studies.timing import time_study

    choose_device(device)
    plan = make_plan(find(name), data, only=only, tokens=tokens, changes=parsed(setting))
    folder = StudyFolder(out)
    folder.check_free()
    with folder.held():
        folder.open(plan)
        time_study(plan, folder, steps, device, typer.echo)
        if folder.finished_runs() or folder.added():
            write_tables(folder)
            typer.echo(f"wrote {out / 'table.md'}, table.csv, results.json and pareto.svg")


def parsed(setting: list[str] | None) -> dict[str, Any]:
    from chiar.reproduce.plan import parse_changes

    return parse_changes(setting or [])


def seed_list(seeds: str | None) -> list[int] | None:
    from chiar.errors import InputError

    if seeds is None:
        return None
    try:
        return [int(part) for part in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers separated by commas, got {seeds!r}.") from None


def print_parts(parts: list[Any]) -> None:
    from chiar.cli import show as show_table

    for part in parts:
        typer.echo(part) if isinstance(part, str) else show_table(part)
