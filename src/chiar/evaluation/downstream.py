"""Tasks of lm-evaluation-harness on a model, through the harness's own class for transformers. Needs lm_eval."""

from contextlib import chdir, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from rich.table import Table
from transformers import AutoTokenizer

from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens import TextCodec
from chiar.errors import InputError, first_line
from chiar.evaluation.harness import Reading, checked_length
from chiar.evaluation.report import finite, shown, side_by_side
from chiar.model.load import choose_device, describe_device, load_model, resolve_model

FORMAT = "chiar-downstream/1"
SEED = 1234  # the harness's own, for the choice of examples
BOOTSTRAPS = 1000  # samples for the standard error of figures that have no formula


class ChiarLM(HFLM):
    """HFLM within `length` tokens: `cut` counts contexts that lost their beginning, `short` texts that have less room
    than their task allows them, and `asked` says whether any task got as far as asking the model."""

    def __init__(self, model: Any, codec: TextCodec, reading: Reading) -> None:
        self.cut, self.short, self.asked = 0, 0, False
        config = model.config
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        if end is None:
            raise InputError("the model has no end of text, which lm-evaluation-harness puts before every document.")
        pooled = config.meta_router and config.gate_pool != "causal"
        if pooled:
            config.gate_generation = "prefill"
        super().__init__(
            model,
            backend="causal",
            tokenizer=harness_tokenizer(codec, end),
            max_length=reading.length,
            # HFLM pads likelihoods without a mask, which only a causal gate does not see.
            batch_size=1 if pooled else reading.batch_size,
            add_bos_token=False,
            prefix_token_id=end,
            softmax_dtype="float32",
            mixed_precision_dtype="bfloat16" if reading.precision == "bf16" else None,
        )

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self.asked = True
        for _, context, continuation in requests:
            size, most = len(continuation), self.max_length
            if size > most:
                raise InputError(
                    f"a continuation has {size} tokens and the model reads {most} at once: raise --length."
                )
            self.cut += len(context) + size > most + 1
        found = iter(super()._loglikelihood_tokens([one for one in requests if one[2]], *args, **kwargs))
        return [next(found) if one[2] else (0.0, True) for one in requests]  # HFLM takes no empty continuation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """HFLM makes room for all a task may take, and fails where the length is no more than that. Here a prompt comes
        first: behind it is written what it leaves of the length, but up to a quarter of the length in any case."""
        self.asked = True
        if self.max_length < 2:
            raise InputError("a task writes text, and a --length of 1 leaves no room behind a prompt: raise it.")
        fitted = []
        for request in requests:
            context, options = request.args
            size = len(self.tok_encode(context))
            wanted = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            new = min(wanted, max(self.max_length - max(size, 1), self.max_length // 4, 1))
            self.cut += size > self.max_length - new
            self.short += new < wanted
            fitted.append(replace(request, arguments=(context, {**options, "max_gen_toks": new})))
        return super().generate_until(fitted, disable_tqdm)

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """An empty prompt is the end of text, which padding is too."""
        ids_BT, mask_BT = super().tok_batch_encode(strings, *args, **kwargs)
        if not ids_BT.numel():
            ids_BT = torch.full((len(strings), 1), self.prefix_token_id)
            mask_BT = torch.ones_like(ids_BT)
        mask_BT[:, -1] = 1
        return ids_BT, mask_BT


def harness_tokenizer(codec: TextCodec, end: int) -> Any:
    """The model's own, or one of bytes; what ends and pads a row is the model's end of text."""
    tokenizer = codec.tokenizer
    if tokenizer is None:
        with TemporaryDirectory() as folder:
            Tokenizer.of_bytes().save(Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


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
) -> dict[str, Any]:
    """A report. `folder` has task files (YAML) of one's own, whose data files are named from there; then only those are
    known. `few_shot` None: as each task says."""
    manager, target = open_tasks(tasks, folder), choose_device(device)
    resolved, run = resolve_model(model)
    loaded, found = load_model(resolved)
    config, length = loaded.config, checked_length(loaded.config, length)
    reading = Reading(length, None, rows, batch_size, precision)
    lm = ChiarLM(loaded.to(target), TextCodec.open(config, found), reading)
    try:
        with chdir(folder) if folder is not None else nullcontext():
            known = manager.load(tasks)
            fixed = set_examples(known["tasks"], few_shot)
            torch.manual_seed(SEED)
            results = evaluator.evaluate(lm, known, limit=rows, bootstrap_iters=BOOTSTRAPS, log_samples=False)
    except Exception as error:
        if lm.asked:
            raise
        # Until then only task files ran: templates, fields of documents, numbers of examples.
        said = f"a task cannot be put together: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, OSError):
            said = (
                f"a task's data cannot be read: {first_line(error)} Give --harness-path with tasks whose data is here, "
            )
            said += "or --harness-download to let tasks fetch theirs."
        raise InputError(said) from error
    pool = config.gate_pool if config.meta_router else "causal"
    seen = f"gate_pool {pool!r}: g is a mean over the whole row, later tokens included"
    remarks = {
        f"{seen}, so likelihoods are not those of a causal model.": pool != "causal",
        f"{lm.cut} contexts were longer than the room left of {length} tokens and lost their beginning.": lm.cut,
        f"{lm.short} texts had less room of {length} tokens than their task allows them to take.": lm.short,
        f"only the first {rows} documents of each task were read.": rows,
    }
    settings = {"few_shot": few_shot, "rows": rows, "length": length, "precision": precision}
    return {
        **{"format": FORMAT, "model": resolved, "run": run, "tasks": tasks, "harness": version("lm_eval"), **settings},
        "device": describe_device(target),
        "scores": read_scores(results),
        "remarks": [*fixed, *(remark for remark, holds in remarks.items() if holds)],
    }


def open_tasks(tasks: list[str], folder: Path | None) -> TaskManager:
    """The harness's task files, each name known."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}.")
    try:
        manager = TaskManager(include_path=folder and str(folder.resolve()), include_defaults=folder is None)
    except Exception as error:  # a task file may be broken in any way
        raise InputError(f"the task files in {folder} cannot be read: {first_line(error)}") from error
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        near = get_close_matches(unknown[0], manager.all_tasks, n=1, cutoff=0.5)  # of thousands
        raise InputError(f"unknown task {unknown[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    return manager


def set_examples(tasks: dict[str, Any], few_shot: int | None) -> list[str]:
    """How many examples each task shows; one that says none keeps to it, as the harness has it."""
    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if own is None or (few_shot is not None and own):
            task.set_config(key="num_fewshot", value=few_shot or 0)
        task.set_fewshot_seed(seed=SEED)
    fixed = [name for name, task in tasks.items() if few_shot and not task.get_config("num_fewshot")]
    return [f"{name} shows no examples, whatever --few-shot says." for name in fixed]


def read_scores(results: Any) -> list[dict[str, Any]]:
    """The harness names figures 'metric,filter', and their errors 'metric_stderr,filter'."""
    scores = []
    for task, figures in results["results"].items():
        documents = (results.get("n-samples", {}).get(task) or {}).get("effective")
        numbers = {key: finite(float(value)) for key, value in figures.items() if isinstance(value, int | float)}
        for key, value in numbers.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr"):
                error = numbers.get(f"{metric}_stderr,{chosen}")
                score = {"task": task, "metric": metric, "filter": chosen, "value": value, "error": error}
                scores.append({**score, "documents": documents})
    return scores


def downstream_tables(reports: list[dict[str, Any]]) -> list[Table | str]:
    """Models side by side, each figure with its standard error."""
    columns: dict[str, dict[str, str]] = {}
    for report in reports:
        for score in report["scores"]:
            line = f"{score['task']} {score['metric']} ({score['filter']}, {shown(score['documents'], ',')} documents)"
            cell = f"{shown(score['value'], ',.4f')} ± {shown(score['error'], '.4f')}"
            columns.setdefault(report["model"], {})[line] = cell
    first = reports[0]
    title = f"lm-evaluation-harness {first['harness']}, {first['precision']} on {first['device']}"
    notes = dict.fromkeys(f"note: {remark}" for report in reports for remark in report["remarks"])
    return [side_by_side(title, columns), *notes]
