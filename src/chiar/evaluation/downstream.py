"""Tasks of lm-evaluation-harness, through the harness's own class for transformers models. Needs lm_eval."""

import math
from contextlib import chdir, nullcontext
from dataclasses import asdict, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from rich.table import Table
from transformers import AutoTokenizer

from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens import TextCodec
from chiar.errors import InputError, first_line, require
from chiar.evaluation.harness import Reading
from chiar.evaluation.report import shown, side_by_side
from chiar.model.load import choose_device, describe_device, load_model, resolve_model

FORMAT = "chiar-downstream/1"
BOOTSTRAPS = 1000  # samples for standard errors that have no formula


class ChiarLM(HFLM):
    """HFLM within `length` tokens. `cut` counts requests that did not fit; `called`: whether any reached the model."""

    def __init__(self, model: Any, codec: TextCodec, reading: Reading) -> None:
        self.cut, self.called, config, tokenizer = 0, False, model.config, codec.tokenizer
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        if end is None:
            raise InputError("the model has no end of text, which lm-evaluation-harness puts before every document.")
        pooled = config.meta_router and config.gate_pool != "causal"
        if pooled:
            config.gate_generation = "prefill"
        if tokenizer is None:
            with TemporaryDirectory() as folder:
                Tokenizer.of_bytes().save(Path(folder))
                tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
        tokenizer.clean_up_tokenization_spaces = False
        # HFLM pads likelihood requests without a mask, and gates that are not causal would see the padding.
        how: dict[str, Any] = {"backend": "causal", "prefix_token_id": end, "softmax_dtype": "float32"}
        how |= {"batch_size": 1 if pooled else reading.batch_size, "max_length": reading.length, "add_bos_token": False}
        dtype = "bfloat16" if reading.precision == "bf16" else None
        super().__init__(model, tokenizer=tokenizer, mixed_precision_dtype=dtype, **how)

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        self.called, most = True, self.max_length
        for _, context, continuation in requests:
            if (size := len(continuation)) > most:
                raise InputError(f"a continuation has {size} tokens, the model reads {most} at once: raise --length.")
            self.cut += len(context) + size > most + 1
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """HFLM reserves all the tokens a task may generate, and fails if the length is no more than that. Here the
        prompt comes first: new tokens get what it leaves of the length, but always up to a quarter of the length."""
        self.called, fitted, most = True, [], self.max_length
        require(most > 1, "a task generates text, and a --length of 1 leaves no room after a prompt: raise it.")
        for request in requests:
            context, options = request.args
            size = len(self.tok_encode(context))
            wanted = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            new = min(wanted, max(most - max(size, 1), most // 4, 1))
            self.cut += size > most - new or new < wanted
            fitted.append(replace(request, arguments=(context, {**options, "max_gen_toks": new})))
        return super().generate_until(fitted, disable_tqdm)


def run_tasks(
    model: str, tasks: list[str], folder: Path | None, few_shot: int | None, device: str, **how: Any
) -> dict[str, Any]:
    """Run tasks and return a report. `folder` has your own task files (YAML), which are then the only ones; their data
    files are relative to it. `few_shot` None: as each task says; `how` has fields of `Reading`."""
    require(folder is None or folder.is_dir(), f"there is no folder {folder}.")
    manager = TaskManager(include_path=folder and str(folder.resolve()), include_defaults=folder is None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        near = get_close_matches(unknown[0], manager.all_tasks, n=1, cutoff=0.5)  # among thousands
        raise InputError(f"unknown task {unknown[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    target, (resolved, run) = choose_device(device), resolve_model(model)
    loaded, model_folder = load_model(resolved)
    config, reading = loaded.config, Reading.of(loaded.config, **how)
    lm = ChiarLM(loaded.to(target), TextCodec.open(config, model_folder), reading)
    options = {"num_fewshot": few_shot, "limit": reading.rows, "bootstrap_iters": BOOTSTRAPS, "log_samples": False}
    try:
        with chdir(folder) if folder is not None else nullcontext():
            results = simple_evaluate(lm, tasks=tasks, task_manager=manager, **options)
    except Exception as error:
        if lm.called:
            raise
        # Before that only task files ran: templates, fields of documents, numbers of examples.
        sentence = f"a task cannot be built: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, OSError):
            sentence = f"a task's data cannot be read: {first_line(error)} --harness-download lets tasks fetch theirs."
        raise InputError(sentence) from error
    scores = []
    for task, figures in results["results"].items():
        documents = (results.get("n-samples", {}).get(task) or {}).get("effective")
        values = {k: float(x) if math.isfinite(x) else None for k, x in figures.items() if isinstance(x, int | float)}
        for key, value in values.items():  # 'metric,filter', and standard errors as 'metric_stderr,filter'
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr"):
                score = {"task": task, "metric": metric, "filter": chosen, "value": value, "documents": documents}
                scores.append({**score, "error": values.get(f"{metric}_stderr,{chosen}")})
    pool = config.gate_pool if config.meta_router else "causal"
    remarks = {
        f"gate_pool {pool!r}: g is a mean over the whole row, later tokens too: not causal.": pool != "causal",
        f"{lm.cut} requests did not fit {reading.length} tokens: contexts or new texts were shortened.": lm.cut,
        f"only the first {reading.rows} documents of each task were read.": reading.rows,
    }
    head: dict[str, Any] = {"format": FORMAT, "model": resolved, "run": run, "tasks": tasks}
    head |= {"harness": version("lm_eval"), "few_shot": few_shot, **asdict(reading), "device": describe_device(target)}
    return head | {"scores": scores, "remarks": [remark for remark, holds in remarks.items() if holds]}


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
