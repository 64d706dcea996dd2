"""`chiar eval`. Heavy imports happen inside."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from chiar.errors import InputError

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
Measured = tuple[list[dict[str, Any]], list[Any]]
"""Reports, and what to show of them."""


def evaluate(
    models: Annotated[list[str], Argument(metavar="MODEL|RUN|REPORT...", help="Also reports written by --json.")],
    data: Annotated[Path | None, Option(metavar="DIR", help="A prepared corpus.")] = None,
    split: Annotated[str | None, Option(help="Split of the corpus; test, or valid where there is none.")] = None,
    length: Annotated[int | None, Option(min=1, help="Tokens a row; the model's trained length.")] = None,
    stride: Annotated[int | None, Option(min=1, help="Slide a window by so many tokens; else blocks.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Read at most so many blocks, windows or documents.")] = None,
    batch: Annotated[int, Option(min=1, help="Rows at a time.")] = 16,
    precision: Annotated[str, Option(metavar="fp32|bf16", help="Of the matrix products.")] = "fp32",
    device: Annotated[str, Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.")] = "auto",
    json: Annotated[Path | None, Option(metavar="FILE", help="Also write the report as JSON, - to print.")] = None,
    baseline: Annotated[str | None, Option(metavar="NAME", help="What gaps refer to; the first one.")] = None,
    anyway: Annotated[bool, Option("--anyway", help="Show what was measured otherwise too, marked.")] = False,
    harness: Annotated[str | None, Option(metavar="TASK,…", help="Tasks of lm-evaluation-harness instead.")] = None,
    harness_path: Annotated[Path | None, Option(metavar="DIR", help="Your own task files, only these.")] = None,
    harness_download: Annotated[bool, Option("--harness-download", help="Let tasks download their data.")] = False,
    few_shot: Annotated[int | None, Option(min=0, help="Examples before each question; as the task says.")] = None,
) -> None:
    """Measure perplexity or accuracy, routed fractions and counted FLOPs on a prepared corpus, or scores on tasks of
    lm-evaluation-harness. Several models and reports are put side by side. Of a run the best model is measured; without
    --data it shows what was measured in training and saved as its evaluation.json."""
    from json import dumps

    from chiar.console import show, write_json
    from chiar.files import check_new

    if data is not None and harness is not None:
        raise InputError("say what to measure on: --data CORPUS, or --harness TASKS.")
    of_data = {"split": split, "stride": stride}
    of_harness = {"few_shot": few_shot, "harness_path": harness_path, "harness_download": harness_download or None}
    for owner, given, options in (("data", data, of_data), ("harness", harness, of_harness)):
        for name, value in options.items():
            if given is None and value is not None:
                raise InputError(f"--{name.replace('_', '-')} is for --{owner}: leave it out.")
    if json is not None and str(json) != "-":
        check_new(json)
    settings: dict[str, Any] = {"length": length, "rows": rows, "batch_size": batch}
    settings |= {"precision": precision, "device": device}
    if harness is not None:
        settings |= {"few_shot": few_shot, "folder": harness_path}
        reports, parts = measure_tasks(models, harness, harness_download, settings)
    else:
        reports, parts = measure_corpus(models, data, settings | of_data, baseline, anyway)
    if str(json) != "-":
        runs = [report["run"] for report in reports if report["run"] and (data or harness)]
        for part in [*(f"{run} is a training run: its best model is evaluated." for run in runs), *parts]:
            typer.echo(part) if isinstance(part, str) else show(part)
    if json is not None:
        record = reports[0] if len(models) == len(reports) == 1 else reports
        write_json(json, dumps(record, indent=1, allow_nan=False, ensure_ascii=False))


def measure_corpus(
    models: list[str], data: Path | None, settings: dict[str, Any], baseline: str | None, anyway: bool
) -> Measured:
    from rich.console import Console
    from rich.progress import Progress

    from chiar.evaluation.compare import compare, entry_of, is_report, read_entry, short_names
    from chiar.evaluation.harness import evaluate as measure
    from chiar.evaluation.report import report_tables

    entries, paths = [], [Path(model) for model in models]
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(bar.task_ids[-1], advance=done, total=total)

        for path, name, model in zip(paths, short_names(paths), models, strict=True):
            if data is None or is_report(path):
                entries.append(read_entry(path, name))
            else:
                bar.add_task(name, total=None)
                entries.append(entry_of(name, measure(model, data, progress=advance, **settings)))
    reports = [entry.report for entry in entries if entry.report is not None]
    alone = len(models) == 1 and data is not None and not is_report(paths[0])
    tables = report_tables(reports[0]) if alone else compare(entries, baseline, anyway)
    return [report.to_dict() for report in reports], tables


def measure_tasks(models: list[str], tasks: str, download: bool, settings: dict[str, Any]) -> Measured:
    import logging

    from chiar.errors import optional_module

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError("--harness takes the names of tasks, separated by commas.")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    if not download:
        stay_offline()
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    optional_module("lm_eval.models.huggingface", "harness", "chiar eval --harness")
    from chiar.evaluation.downstream import downstream_tables, run_tasks

    reports = [run_tasks(model, names, **settings) for model in models]
    return reports, downstream_tables(reports)


def stay_offline() -> None:
    """Tasks then read what is on this machine, or fail. Modules read the environment when they are imported, and a
    plugin may have imported them already."""
    os.environ |= dict.fromkeys(OFFLINE, "1")
    for module in map(sys.modules.get, ("huggingface_hub.constants", "datasets.config", "evaluate.config")):
        for name in OFFLINE:
            if hasattr(module, name):
                setattr(module, name, True)
