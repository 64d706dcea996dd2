"""Tasks of lm-evaluation-harness: chosen, run on a model, written up. Needs the package lm_eval."""

import json
import math
import os
import sys
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from chiar.data.optional import optional_module
from chiar.errors import InputError, first_line, unknown_name
from chiar.evaluation.report import shown

FORMAT = "chiar-downstream/1"
SEED = 1234
"""The harness's own, for the choice of examples."""
BOOTSTRAPS = 1000
"""Samples for the standard error of figures that have no formula."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


@dataclass(frozen=True)
class TaskScore:
    task: str
    metric: str
    filter: str
    value: float | None
    """None: not finite."""
    error: float | None
    """Standard error, where the harness has one."""
    documents: int | None


@dataclass(frozen=True)
class DownstreamReport:
    model: str
    run: str | None
    tasks: list[str]
    harness: str
    """Version of lm_eval."""
    few_shot: int | None
    """None: as each task says."""
    rows: int | None
    length: int
    precision: str
    device: str
    scores: list[TaskScore]
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False, ensure_ascii=False)


def stay_offline() -> None:
    """Tasks then read what is on this machine, or fail. Modules read the environment when they are imported, and a
    plugin may have imported them already."""
    os.environ |= dict.fromkeys(OFFLINE, "1")
    for module in map(sys.modules.get, ("huggingface_hub.constants", "datasets.config", "evaluate.config")):
        for name in OFFLINE:
            if hasattr(module, name):
                setattr(module, name, True)


def run_tasks(
    model: str,
    tasks: list[str],
    *,
    folder: Path | None = None,
    few_shot: int | None = None,
    rows: int | None = None,
    length: int | None = None,
    batch_size: int = 16,
    precision: str = "fp32",
    device: str = "auto",
    tokenizer: Path | None = None,
) -> DownstreamReport:
    """`folder` has task files (YAML) of one's own, whose data files are named from there; then only those are known."""
    optional_module("lm_eval", "harness", "chiar eval --harness")
    import torch
    from lm_eval import evaluator as harness

    from chiar.data.tokens import TextCodec
    from chiar.evaluation.harness import PRECISIONS, choose_device, describe_device
    from chiar.evaluation.lm_eval_model import ChiarLM
    from chiar.model.load import load_model, resolve_model

    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    manager = open_tasks(tasks, folder)
    target = choose_device(device)
    resolved, run = resolve_model(model)
    loaded, found = load_model(resolved)
    loaded.to(target)
    config = loaded.config
    trained = config.max_position_embeddings
    length = length or trained
    if length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions, so --length can be {trained} at most: {length}.")
    if config.meta_router and config.gate_pool != "causal":
        config.gate_generation = "prefill"
    adapter = ChiarLM(loaded, TextCodec.open(config, found, tokenizer), length, batch_size, precision)
    try:
        with chdir(folder) if folder is not None else nullcontext():
            loaded_tasks = manager.load(tasks)
            fixed = set_examples(loaded_tasks["tasks"], few_shot)
            torch.manual_seed(SEED)
            results = harness.evaluate(
                adapter, loaded_tasks, limit=rows, bootstrap_iters=BOOTSTRAPS, log_samples=False, verbosity=None
            )
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"a task's data cannot be read: {first_line(error)} Give --harness-path with tasks whose data is here, or "
            "--harness-download to let tasks fetch theirs."
        ) from error
    except Exception as error:
        if adapter.asked:
            raise
        # Until then only task files ran: templates, fields of documents, numbers of examples.
        raise InputError(f"a task cannot be put together: {type(error).__name__}: {first_line(error)}") from error
    scores = read_scores(results)
    return DownstreamReport(
        model=resolved,
        run=run,
        tasks=tasks,
        harness=version("lm_eval"),
        few_shot=few_shot,
        rows=rows,
        length=length,
        precision=precision,
        device=describe_device(target),
        scores=scores,
        remarks=[*fixed, *explain(config, adapter.cut, adapter.short, length, rows)],
    )


def set_examples(tasks: dict[str, Any], few_shot: int | None) -> list[str]:
    """How many examples each task shows; one that says none keeps to it, as the harness has it."""
    fixed = []
    for name, task in tasks.items():
        own = task.get_config("num_fewshot")
        if few_shot is not None and own == 0 and few_shot:
            fixed.append(f"{name} shows no examples, whatever --few-shot says.")
        elif few_shot is not None or own is None:
            task.set_config(key="num_fewshot", value=few_shot or 0)
        task.set_fewshot_seed(seed=SEED)
    return fixed


def open_tasks(tasks: list[str], folder: Path | None) -> Any:
    """The harness's task files, each name known."""
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}.")
    try:
        manager = TaskManager(include_path=folder and str(folder.resolve()), include_defaults=folder is None)
    except Exception as error:  # a task file may be broken in any way
        raise InputError(f"the task files in {folder} cannot be read: {first_line(error)}") from error
    for task in tasks:
        if task not in manager.all_tasks:
            raise unknown_name("task", task, manager.all_tasks) if folder else unknown_task(task, manager.all_tasks)
    return manager


def unknown_task(task: str, known: list[str]) -> InputError:
    """There are thousands: the nearest only."""
    from difflib import get_close_matches

    near = get_close_matches(task, known, n=3, cutoff=0.5)
    return InputError(f"unknown task {task!r}." + (f" Near it: {', '.join(near)}." if near else ""))


def read_scores(results: Any) -> list[TaskScore]:
    """The harness names figures 'metric,filter', and their errors 'metric_stderr,filter'."""
    scores = []
    for task, figures in results["results"].items():
        documents = (results.get("n-samples", {}).get(task) or {}).get("effective")
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or not chosen or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{chosen}")
            scores.append(TaskScore(task, metric, chosen, finite(value), finite(error), documents))
    return scores


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def explain(config: Any, cut: int, short: int, length: int, rows: int | None) -> list[str]:
    remarks = []
    pool = config.gate_pool if config.meta_router else "causal"
    if pool != "causal":
        remarks.append(
            f"gate_pool {pool!r}: g is a mean over the whole row, later tokens included, so likelihoods are not those "
            "of a causal model."
        )
    if cut:
        remarks.append(f"{cut} contexts were longer than the room left of {length} tokens and lost their beginning.")
    if short:
        remarks.append(f"{short} texts had less room of {length} tokens than their task allows them to take.")
    if rows is not None:
        remarks.append(f"only the first {rows} documents of each task were read.")
    return remarks


def downstream_tables(report: DownstreamReport) -> list[Table | str]:
    title = f"{report.model}, lm-evaluation-harness {report.harness}, {report.precision} on {report.device}"
    table = Table("task", "metric", "filter", "value", "± standard error", "documents", box=None, title=title)
    table.title_justify = "left"
    for score in report.scores:
        figures = [shown(score.value, ",.4f"), shown(score.error, ".4f"), shown(score.documents, ",")]
        table.add_row(score.task, score.metric, score.filter, *figures)
    return [table, *(f"note: {remark}" for remark in report.remarks)]
