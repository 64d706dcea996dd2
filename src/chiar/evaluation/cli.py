"""`chiar eval`. Heavy imports happen inside the command."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from chiar.console import Overwrite, SplitName
from chiar.errors import InputError, require

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def evaluate(
    models: Annotated[list[str], Argument(metavar="MODEL|RUN|REPORT...", help="Models, runs, or reports of --json.")],
    data: Annotated[Path | None, Option(metavar="CORPUS", help="Prepared corpus to measure on.")] = None,
    split: SplitName = "valid",
    length: Annotated[int | None, Option(min=1, help="Tokens per row. [default: the trained length]")] = None,
    stride: Annotated[int | None, Option(help="New tokens per sliding window. [default: --length]")] = None,
    rows: Annotated[int | None, Option(min=1, help="Maximum blocks or documents to read. [default: all]")] = None,
    batch: Annotated[int, Option(min=1, help="Rows per batch.")] = 16,
    precision: Annotated[str, Option(metavar="fp32|bf16", help="Precision of matrix products.")] = "fp32",
    device: Annotated[str, Option(metavar="auto|cpu|cuda", help="Device; auto uses a GPU if there is one.")] = "auto",
    json: Annotated[Path | None, Option(metavar="FILE", help="Also write the report as JSON; - prints it.")] = None,
    overwrite: Overwrite = False,
    anyway: Annotated[bool, Option("--anyway", help="Compare what was measured differently, marked.")] = False,
    harness: Annotated[str | None, Option(metavar="TASK,…", help="Run tasks of lm-evaluation-harness instead.")] = None,
    harness_path: Annotated[Path | None, Option(metavar="DIR", help="Find tasks in this folder only.")] = None,
    harness_download: Annotated[bool, Option("--harness-download", help="Allow tasks to download data.")] = False,
    few_shot: Annotated[int | None, Option(min=0, help="Few-shot examples per question. [default: the task's]")] = None,
) -> None:
    """Measure loss or accuracy, routed fractions and FLOPs. The text is a prepared corpus, or tasks of
    lm-evaluation-harness. Several models or reports are compared; the first is the baseline. A run stands for its best
    model; without --data, its evaluation.json and training metrics are shown."""
    from json import dumps

    from chiar.console import show, write_json
    from chiar.errors import optional_module
    from chiar.files import check_new

    require(data is None or harness is None, "say what to measure on: --data CORPUS or --harness TASKS, not both.")
    if harness is None and (harness_path or harness_download or few_shot is not None):
        raise InputError("--harness-path, --harness-download and --few-shot are for --harness: leave them out.")
    require(harness is None or stride is None, "--stride is for --data: tasks read their texts in their own way.")
    if json is not None and str(json) != "-":
        check_new(json, overwrite)
    reading: dict[str, Any] = {"length": length, "rows": rows, "batch_size": batch, "precision": precision}
    if harness is not None:
        prepare_harness(harness_download)
        optional_module("lm_eval.models.huggingface", "harness", "chiar eval --harness")
        from chiar.evaluation.downstream import downstream_tables, run_tasks

        tasks = [name.strip() for name in harness.split(",")]
        reports = [run_tasks(model, tasks, harness_path, few_shot, device, **reading) for model in models]
        parts = downstream_tables(reports)
    else:
        from chiar.evaluation.harness import evaluate as measure
        from chiar.evaluation.report import compare, is_report, read_entry, short_names

        reading |= {"device": device, "stride": stride}
        entries, paths = [], [Path(model) for model in models]
        for path, name, model in zip(paths, short_names(paths), models, strict=True):
            fresh = None if data is None or is_report(path) else measure(model, data, split, **reading)
            entries.append(read_entry(path, name, fresh))
        parts = compare(entries, anyway)
        reports = [entry.report.to_dict() for entry in entries if entry.report is not None]
    if str(json) != "-":
        for part in parts:
            typer.echo(part) if isinstance(part, str) else show(part)
    if json is not None:
        record = reports[0] if len(models) == len(reports) == 1 else reports
        write_json(json, dumps(record, indent=1, allow_nan=False, ensure_ascii=False), overwrite)


def prepare_harness(download: bool) -> None:
    """Make the harness quiet and, without `download`, offline: tasks then read what is on this machine, or fail. The
    modules read the environment on import, and a plugin may have imported them already."""
    if not download:
        os.environ |= dict.fromkeys(OFFLINE, "1")
        for module in map(sys.modules.get, ("huggingface_hub.constants", "datasets.config", "evaluate.config")):
            for name in OFFLINE:
                if hasattr(module, name):
                    setattr(module, name, True)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
