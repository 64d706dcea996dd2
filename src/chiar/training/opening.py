"""Before the first step: is the run possible, is its folder free or the same run's, where does it go on."""

import json
import os
import shutil
from typing import Any

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.model.load import check_tokenizer
from chiar.training import checkpoint
from chiar.training.distributed import Processes, attempt
from chiar.training.events import require_tensorboard
from chiar.training.run_folder import RUN, RunFolder, command_line, commit, versions
from chiar.training.settings import TrainSettings
from chiar.training.trainer import open_rows

# What may differ when a run is resumed: how long it is, how it is spread, and how it is shown.
MAY_CHANGE = (
    *("steps", "compile", "cuda_graphs", "parallel", "execution", "keep", "log_every", "tensorboard", "peak_tflops"),
    *("compile_layers", "transformers_version"),
)


def check_run(config: ChiarConfig, settings: TrainSettings, corpora: list[Any]) -> list[str]:
    """InputError where the run cannot be; otherwise what a reader of its figures must know."""
    texts = [corpus.name for corpus in corpora if corpus.kind == "language"]
    if texts and corpora[0].kind != "language":
        raise InputError(f"{texts[0]} is a language corpus: name it first, before {corpora[0].name}.")
    if not texts and settings.sample:
        raise InputError("sample continues a text, and the run has no language corpus: leave it out.")
    for corpus in corpora:
        for split in ("train", "valid"):
            if split not in corpus.splits:
                raise InputError(
                    f"{corpus.folder} has no {split} split (only {', '.join(corpus.splits)}): prepare it with one."
                )
    for corpus in corpora[1:]:
        corpora[0].require_same_tokenizer(corpus)
    names = [corpus.name for corpus in corpora]
    if len(set(names)) < len(names):
        raise InputError(
            f"two corpora have the same name ({', '.join(names)}): their metrics could not be told apart; "
            "chiar data prepare --name gives one another."
        )
    notes = [remark for corpus in corpora for remark in corpus.remarks]
    if settings.initial:
        notes += check_tokenizer(settings.initial, config, corpora[0])
    if settings.warmup >= settings.steps and settings.learning_rate:
        notes.append(
            f"all {settings.steps} steps are warm-up (warmup={settings.warmup}): the rate never gets to "
            f"{settings.learning_rate:g}."
        )
    needed = corpora[0].vocab_size
    if needed > config.vocab_size:
        raise InputError(f"the corpus has {needed} token ids, the model only {config.vocab_size}: set vocab_size.")
    if settings.recalibrate_every and (config.router != "entropy" or not config.routed_layers):
        raise InputError("recalibrate_every needs routed layers with the entropy router.")
    if settings.recalibrate_every and config.target_fraction is not None:
        raise InputError("target_fraction already moves the thresholds in training: leave recalibrate_every at 0.")
    if settings.tensorboard:
        require_tensorboard()
    if config.positions == "learned" and settings.length > config.max_position_embeddings:
        raise InputError(f"length {settings.length} exceeds the {config.max_position_embeddings} learned positions.")
    return notes


def check_rows(settings: TrainSettings, corpora: list[Any], processes: Processes) -> None:
    """InputError now, before anything is written, where the batch does not divide or a split is missing or small."""
    settings.accumulation(processes.count)
    for corpus in corpora:
        for split in ("train", "valid"):
            open_rows(corpus, split, settings.length)


def launch() -> str | None:
    """What all attempts of one torchrun have in common; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name}-{os.getppid()}" if name else None


def goes_on(folder: RunFolder, resume: bool) -> bool:
    """Whether a run in the folder is continued: asked for, or torchrun started this very run again. The main process
    decides for all."""
    if not resume and attempt() > 0 and (folder.path / RUN).is_file():
        resume = folder.read().get("launch") == launch()
    if not resume:
        folder.check_free()
    return resume


def describe(config: ChiarConfig, settings: TrainSettings, corpora: list[Any], processes: Processes) -> dict[str, Any]:
    """What run.json says."""
    return {
        "command": command_line(),
        "launch": launch(),
        "config": config.to_dict(),
        "settings": settings.to_dict(),
        "versions": versions(),
        "commit": commit(),
        "data": {corpus.name: corpus.fingerprint for corpus in corpora},
        "remarks": {corpus.name: corpus.remarks for corpus in corpora},
        "processes": processes.count,
    }


def open_run(folder: RunFolder, record: dict[str, Any], resume: bool) -> checkpoint.Found | None:
    """Create the folder, or check that it is the same run and find its newest sound checkpoint."""
    if not resume:
        folder.create(record)
        return None
    stored, record = folder.read(), json.loads(json.dumps(record))
    # A run may be older than a field: it was started with what the field is by default.
    defaults = {"config": ChiarConfig().to_dict(), "settings": TrainSettings().to_dict()}
    for part in ("config", "settings", "data"):
        was = {**json.loads(json.dumps(defaults.get(part, {}))), **stored[part]}
        for key in sorted(set(stored[part]) | set(record[part])):
            if key not in MAY_CHANGE and was.get(key) != record[part].get(key):
                raise InputError(
                    f"{folder.path} was started with {part} {key} = {was.get(key)!r}, "
                    f"not {record[part].get(key)!r}: resume it with the same."
                )
    for leftover in checkpoint.partials(folder.checkpoints):
        shutil.rmtree(leftover)
    found = checkpoint.find(folder.checkpoints)
    now = {part: record[part] for part in ("command", "launch", "versions", "commit", "processes")}
    now["settings"] = {key: value for key, value in record["settings"].items() if key in MAY_CHANGE}
    resumed = {"step": found.state["step"] if found else 0, **now}
    folder.write({**stored, "launch": record["launch"], "resumed": [*stored.get("resumed", []), resumed]})
    return found
