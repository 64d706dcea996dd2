"""`chiar eval` and `chiar compare`. Heavy imports happen inside the verbs."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a training run (its best model).")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="A prepared corpus.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the corpus; test, or valid where there is none.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens a row; the model's trained length.")] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Slide a window by so many tokens, instead of blocks side by side.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Read at most so many blocks, windows or documents.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 16,
    precision: Annotated[str, typer.Option(metavar="fp32|bf16", help="Of the matrix products.")] = "fp32",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")] = "auto",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the report as JSON to a new file, - to print only it."),
    ] = None,
    harness: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Tasks of lm-evaluation-harness instead, separated by commas.")
    ] = None,
    harness_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Task files of your own, with their data: only these are known.")
    ] = None,
    harness_download: Annotated[
        bool, typer.Option("--harness-download", help="Let tasks fetch their data; else nothing is downloaded.")
    ] = False,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of a task; as the task says by default.")
    ] = None,
) -> None:
    """Measure perplexity or accuracy, routed fractions and counted FLOPs of a model on a prepared corpus, or its scores
    on tasks of lm-evaluation-harness."""
    from chiar.evaluation.downstream_cli import check_choice, evaluate_downstream

    check_choice(data, harness, harness_path, harness_download, few_shot, split, stride)
    if harness is not None:
        evaluate_downstream(
            model, harness, harness_path, harness_download, few_shot, rows, length, batch_size, precision, device, json
        )
        return
    assert data is not None
    from rich.console import Console
    from rich.progress import Progress

    from chiar.evaluation.harness import evaluate as run_evaluation
    from chiar.evaluation.report import report_tables
    from chiar.files import check_new

    if json is not None and str(json) != "-":
        check_new(json)
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("evaluating", total=None)
        report = run_evaluation(
            model,
            data,
            split,
            length=length,
            stride=stride,
            rows=rows,
            batch_size=batch_size,
            precision=precision,
            device=device,
            progress=lambda done, total: bar.update(task, advance=done, total=total),
        )
    publish(report, report_tables(report), json)


def publish(report: Any, tables: list[Any], json: Path | None) -> None:
    """On the screen, and as JSON where that is asked for; alone where it is printed."""
    from chiar.cli import show, write_json

    if json is None or str(json) != "-":
        if report.run is not None:
            typer.echo(f"{report.run} is a training run: its best model is evaluated.")
        for table in tables:
            typer.echo(table) if isinstance(table, str) else show(table)
    if json is not None:
        write_json(json, report.to_json())


def compare(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT|RUN...", help="Reports of chiar eval --json, or training runs."),
    ],
    baseline: Annotated[str | None, typer.Option(metavar="NAME", help="What gaps refer to; the first one.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Show what was measured on other corpora or lengths too, marked.")
    ] = False,
) -> None:
    """Put evaluations and training runs side by side: perplexity, gap to a baseline, FLOPs, routing, speed."""
    from chiar.cli import show
    from chiar.evaluation.compare import compare as put_side_by_side

    for table in put_side_by_side(reports, baseline, anyway):
        typer.echo(table) if isinstance(table, str) else show(table)
