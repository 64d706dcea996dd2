"""A run from beginning to end: check, open the folder, resume or start, step, measure, save."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.data import Corpus
from chiar.data.tokenizers import check_tokenizer
from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Sampling, write_text
from chiar.training import checkpoint
from chiar.training.batches import open_rows
from chiar.training.compiling import computes_bf16
from chiar.training.distributed import Processes, start
from chiar.training.reporting import Display, Events, Utilisation, require_tensorboard
from chiar.training.run_folder import RUN, Metrics, RunFolder, describe, told
from chiar.training.settings import TrainSettings
from chiar.training.tasks import whole
from chiar.training.trainer import Trainer


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says how to go on."""


def train(
    config: ChiarConfig,
    settings: TrainSettings,
    out: Path,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Train to `settings.steps`, writing to the run folder `out`. Returns the last record."""
    settings.validate()
    logging.disable_progress_bar()  # ours is enough
    folder = RunFolder(out)
    try:
        with closing(start(device)) as processes:
            return train_among(processes, config, settings, folder, resume, quiet)
    except KeyboardInterrupt:
        raise Interrupted(how_to_resume(folder)) from None
    except torch.OutOfMemoryError as error:
        raise InputError(f"the GPU's memory does not suffice: {what_to_reduce(settings)}, with a new --out.") from error


def how_to_resume(folder: RunFolder) -> str:
    saved = checkpoint.steps(folder.checkpoints)
    if saved:
        return f"the same command with --resume goes on after {saved[0].name}."
    if (folder.path / RUN).is_file():
        return "no checkpoint was saved yet: the same command with --resume starts again."
    return "nothing was written yet."


def what_to_reduce(settings: TrainSettings) -> str:
    smaller = f"make --micro-batch smaller than {settings.micro_batch} (the batch stays, accumulated)"
    ways = [smaller] if settings.micro_batch > 1 else []
    ways += [] if settings.gradient_checkpointing else ["add --set gradient_checkpointing=true"]
    return ", or ".join([*ways, f"make --length smaller than {settings.length}"])


def check_run(config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus]) -> list[str]:
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
    notes += check_tokenizer(settings.initial, config, corpora[0]) if settings.initial else []
    if (warmup := settings.warmup) >= settings.steps and (rate := settings.learning_rate):
        notes.append(f"all {settings.steps} steps are warm-up (warmup={warmup}): the rate never gets to {rate:g}.")
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


def settle(settings: TrainSettings, processes: Processes, resumed: RunFolder | None) -> TrainSettings:
    """Precision `auto` as what it means on the main process's device, or as what a resumed run was begun with."""
    if settings.precision != "auto":
        return settings
    if resumed is not None:
        precision = processes.from_main(lambda: told(resumed.read(), "settings", resumed.path.name)["precision"])
    else:
        precision = processes.from_main(lambda: "bf16" if computes_bf16(processes.device) else "fp32")
    return replace(settings, precision=precision)


def train_among(
    processes: Processes, config: ChiarConfig, settings: TrainSettings, folder: RunFolder, resume: bool, quiet: bool
) -> dict[str, Any] | None:
    corpora = [Corpus.open(Path(path)) for path in settings.data]
    if config.positions == "rope":
        config = deepcopy(config)
        config.max_position_embeddings = settings.length  # the trained length, which evaluation takes as its own
    notes = check_run(config, settings, corpora)
    for corpus in corpora:
        open_rows(corpus, "valid", settings.length)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    resume = processes.from_main(lambda: folder.goes_on(resume))
    settings = settle(settings, processes, folder if resume else None)
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    trainer = Trainer(config, settings, corpora, processes)  # what cannot be built leaves no folder
    record = describe(config, settings, corpora, processes.count)
    found = processes.from_main(lambda: folder.open(record, resume))
    begun = found.state["step"] if found else 0
    with closing(Display(settings.steps, begun, quiet or not processes.main)) as display:
        for note in notes:
            display.say(f"note: {note}")
        if found is not None:
            trainer.restore(found)
            for complaint in found.complaints:
                display.say(f"warning: {complaint}")
            left = "" if begun < settings.steps else ": nothing is left to train"
            display.say(f"resuming after step {begun} of {settings.steps}{left}")
        if settings.compile and begun < settings.steps:
            display.say("compiling: the first step takes a minute or two (--no-compile starts at once)")
        if not processes.main:
            return Run(trainer, folder, None, display).go()
        events = Events(folder.path / "tensorboard", begun, config) if settings.tensorboard else None
        kept = found.state["metrics_bytes"] if found else 0
        with closing(Metrics(folder.metrics_path, kept, events)) as metrics:
            return Run(trainer, folder, metrics, display).go()


@contextmanager
def stopping(what: str, kept: str) -> Iterator[None]:
    try:
        yield
    except checkpoint.NotWrittenError as error:
        raise TrainingStopped(f"{what} could not be written ({error}): {kept} are kept.") from error


def is_better(now: dict[str, float], best: dict[str, float]) -> bool:
    """A classifier by its accuracy, which is what it is judged by, and by its loss where that is equal; a language
    model by its loss."""
    return (now.get("accuracy", 0.0), -now["loss"]) > (best.get("accuracy", 0.0), -best["loss"])


class Run:
    """The loop around the steps."""

    def __init__(self, trainer: Trainer, folder: RunFolder, metrics: Metrics | None, display: Display) -> None:
        self.trainer, self.folder, self.metrics, self.display = trainer, folder, metrics, display
        self.settings = trainer.settings
        self.utilisation = Utilisation(trainer.config, trainer.settings, trainer.corpora, trainer.processes)
        self.warnings: set[str] = set()
        self.compiled = metrics.last.get("compiled") if metrics is not None else None
        """Whether the steps before were compiled; None before the first."""

    def go(self) -> dict[str, Any] | None:
        trainer, settings, record = self.trainer, self.settings, None
        self.marked_step, self.marked_time = trainer.step, time.perf_counter()
        while trainer.step < settings.steps:
            measured = trainer.train_step()
            self.tell_compiling()
            step, last = trainer.step, trainer.step == settings.steps
            self.display.advance(step)
            evaluates = step % settings.evaluate_every == 0 or last
            if step % settings.log_every == 0 or evaluates or step == 1:
                record = self.measure(measured)
                if evaluates:
                    self.evaluate(record)
                if self.metrics is not None:
                    self.metrics.write(record)
                    self.display.record(record)
            if settings.recalibrate_every and step % settings.recalibrate_every == 0:
                self.display.say(f"thresholds set to {trainer.recalibrate()}")
            if step % settings.save_every == 0 or last:
                self.save()
        self.export(self.folder.final)  # here, so that a run killed after its last step is completed when resumed
        return record

    def tell_compiling(self) -> None:
        """Say where compiling failed, and where steps are computed otherwise than those before them."""
        forward, graphs = self.trainer.forward, self.trainer.graphs
        if forward.failure:
            self.warn(f"torch.compile failed, so the run goes on without it: {forward.failure}")
        if graphs is not None and graphs.failure:
            self.warn(f"passes cannot be recorded as CUDA graphs and run plainly: {graphs.failure}")
        if self.compiled is not None and self.compiled != forward.compiled:
            before, now = ("", "not ") if self.compiled else ("not ", "")
            self.warn(f"the steps before were {before}compiled, from here on they are {now}compiled.")
        self.compiled = forward.compiled

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.add(text)
            self.display.say(f"warning: {text}")

    def measure(self, measured: dict[str, Any]) -> dict[str, Any]:
        record = self.trainer.summary(measured)
        bad = int(self.trainer.first_bad_step)
        if bad >= 0 or not math.isfinite(record["loss"]):
            self.stop_at(bad if bad >= 0 else self.trainer.step - 1)
        now = time.perf_counter()
        tokens, self.trainer.tokens = self.trainer.processes.all(self.trainer.tokens), 0
        record["tokens_per_second"] = round(sum(tokens) / (now - self.marked_time), 1)
        self.marked_step, self.marked_time = self.trainer.step, now
        if (mfu := self.utilisation.of(record["tokens_per_second"], record["use"])) is not None:
            record["mfu"] = mfu
        record["compiled"] = self.compiled
        if self.trainer.processes.device.type == "cuda":
            record["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        return record

    def evaluate(self, record: dict[str, Any]) -> None:
        trainer = self.trainer
        found = trainer.evaluate()
        record |= found
        first = trainer.names[0]
        now = {"step": trainer.step, "loss": found["validation"][first]}
        if first in found.get("accuracy", {}):
            now["accuracy"] = found["accuracy"][first]
        if trainer.best is None or is_better(now, trainer.best):
            trainer.best = now
            self.export(self.folder.best)
        if self.settings.sample:
            record["sample"] = self.sample()
        self.marked_step, self.marked_time = trainer.step, time.perf_counter()

    def save(self) -> None:
        trainer = self.trainer
        if int(trainer.first_bad_step) >= 0:
            self.stop_at(int(trainer.first_bad_step))
        target = self.folder.checkpoints / checkpoint.step_name(trainer.step)
        written = self.metrics.bytes if self.metrics is not None else 0
        with stopping(f"the checkpoint of step {trainer.step}", "earlier ones"):
            checkpoint.save(target, trainer.tensors(), trainer.state(written), trainer.processes)
        if trainer.processes.main:
            checkpoint.point(self.folder.checkpoints / "latest", target)
            best = int(trainer.best["step"]) if trainer.best else None
            checkpoint.retain(self.folder.checkpoints, self.settings.keep, best)

    def export(self, link: Path) -> None:
        """All processes take part; the main one gets the model in one piece, averaged where an average is kept."""
        trainer = self.trainer
        with trainer.averaged():
            model = whole(trainer.model, wanted=trainer.processes.main)
        what = f"the {link.name} model, of step {trainer.step},"
        with stopping(what, "checkpoints"), checkpoint.agreed(trainer.processes):
            if model is not None:
                self.folder.export(model, trainer.corpora[0], link, trainer.step)

    def sample(self, new_tokens: int = 48) -> str:
        """The prompt continued greedily. A gate that sees the future is frozen at the prompt for this."""
        with self.trainer.language() as language:
            codec = TextCodec.open(language.config, self.trainer.corpora[0].folder / "tokenizer")
            return self.settings.sample + write_text(language, codec, self.settings.sample, Sampling(new_tokens))

    def stop_at(self, step: int) -> None:
        """The loss or gradient of `step` was not finite: keep its batches, say so, stop."""
        trainer = self.trainer
        path = self.folder.path / f"not-finite-{checkpoint.step_name(step + 1)}.safetensors"
        kept = f"its batches are in {path.name}"
        try:
            with checkpoint.agreed(trainer.processes):
                if trainer.processes.main:
                    save_file(trainer.batch_tensors(step), path)
        except checkpoint.NotWrittenError as error:
            kept = f"its batches could not be written ({error})"
        saved = checkpoint.steps(self.folder.checkpoints)
        last = f"{saved[0].name} is the last good checkpoint" if saved else "no checkpoint was saved before"
        raise TrainingStopped(f"the gradient of step {step + 1} is not finite: {kept}, and {last}.")
