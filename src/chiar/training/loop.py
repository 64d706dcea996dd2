"""A run from start to end: check, open the folder, start or resume, step, measure, save; in one process or many."""

import math
import os
import shlex
import signal
import threading
import time
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.data.tokenizers import check_tokenizer
from chiar.data.tokens import TextCodec
from chiar.errors import InputError, optional_module, require
from chiar.generation.writer import Sampling, write_text
from chiar.model.load import describe_device
from chiar.training import checkpoint
from chiar.training.compiling import computes_bf16
from chiar.training.distributed import Processes, local_rows, start
from chiar.training.memory import out_of_memory
from chiar.training.reporting import Display, Metrics, utilisation
from chiar.training.run_folder import RUN, RunFolder, describe
from chiar.training.settings import TrainSettings
from chiar.training.tasks import Rows, whole
from chiar.training.trainer import Trainer, learning_rate


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says how to continue."""


class CtrlC:
    """Within it the first Ctrl-C only sets `pressed`, so that the loop can save and stop; the second stops at once."""

    pressed = False

    def __enter__(self) -> "CtrlC":
        # Not in other threads, nor where Ctrl-C is ignored or handled by someone else.
        main_thread = threading.current_thread() is threading.main_thread()
        self.installed = main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.installed:
            signal.signal(signal.SIGINT, self.press)
        return self

    def press(self, *_: Any) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nsaving after this step; Ctrl-C again leaves at once\n")  # it may be print that was interrupted

    def __exit__(self, *_: Any) -> None:
        if self.installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def train(
    config: ChiarConfig, settings: TrainSettings, out: Path, resume: bool = False, device: str = "auto",
    quiet: bool = False, extend: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Train to `settings.steps`, writing to the run folder `out`. Returns the last record. A resumed run may have
    another number of steps, and with it another learning rate schedule, only with `extend`."""
    settings.validate()
    logging.disable_progress_bar()  # of transformers; we show our own
    folder = RunFolder(out)
    try:
        with closing(start(device)) as processes:
            return train_in(processes, config, settings, folder, resume, device, quiet, extend)
    except KeyboardInterrupt:
        if not (folder.path / RUN).is_file():
            raise Interrupted("nothing was written yet.") from None
        saved = checkpoint.steps(folder.checkpoints)
        kept = f"{saved[0].name} is saved, go on with" if saved else "no checkpoint was saved yet, begin again with"
        raise Interrupted(f"{kept}: {folder.command}") from None
    except (RuntimeError, MemoryError) as error:
        if (explanation := out_of_memory(error, settings)) is None:
            raise
        raise explanation from error


MANY_DROPPED = 0.01  # share of dark tokens; above it a run warns that its stacks have too little room


def check_run(config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus]) -> list[str]:
    """InputError if this run is not possible; otherwise notes for those who read its results."""
    first, names = corpora[0], [corpus.name for corpus in corpora]
    text_first, needed, known = first.kind == "language", first.vocab_size, config.vocab_size
    notes = [remark for corpus in corpora for remark in corpus.remarks]
    for corpus in corpora:
        in_order, splits = text_first or corpus.kind != "language", ", ".join(corpus.splits)
        require(in_order, f"{corpus.name} is a language corpus: name it first, before {first.name}.")
        for split in ("train", "valid"):
            require(split in corpus.splits, f"{corpus.folder} has no {split} split (only {splits}): prepare it.")
            rows = Rows(corpus, split, settings.length)  # refuses what is too short
            if split == "train" and (cut := rows.truncated()):
                what = f"{cut:,} of {rows.count:,} training documents of {corpus.name} are truncated"
                notes.append(f"{what} to {settings.length} tokens: a larger --length reads more of them.")
        first.require_same_tokenizer(corpus)
    can_sample = text_first or not settings.sample
    require(can_sample, "sample continues a text, and the run has no language corpus: leave it out.")
    unique = len(set(names)) == len(names)
    require(unique, f"two corpora have the same name ({', '.join(names)}): chiar data prepare --name names one.")
    if settings.initial:
        exists = Path(settings.initial, "config.json").is_file()
        require(exists, f"initial: there is no model in {settings.initial} (a run's are in RUN/best and RUN/final).")
        notes += check_tokenizer(settings.initial, config, first)
    many = f"{first.folder} has {needed} token ids, the model only {known}: take a corpus prepared as the model's was"
    require(needed <= known, f"{many}, or give a new model room with --set vocab_size={needed}.")
    recalibrates, possible = settings.recalibrate_every > 0, config.router_kind.has_thresholds and config.routed_layers
    require(possible or not recalibrates, "recalibrate_every needs routed layers with the entropy router.")
    if recalibrates and config.target_fraction is not None:
        raise InputError("target_fraction already moves the thresholds in training: leave recalibrate_every at 0.")
    fits = config.positions != "learned" or settings.length <= config.max_position_embeddings
    require(fits, f"length {settings.length} exceeds the {config.max_position_embeddings} learned positions.")
    predicts = config.router_kind.reads_prediction or config.router == "forecast"
    if config.stacks and predicts and not (text_first or settings.initial):
        notes.append(f"router={config.router} learns from text, and the run has none: it stays as initialised.")
    if settings.tensorboard:
        optional_module("tensorboard", "tensorboard", "the setting tensorboard=true")
    if (warmup := settings.warmup) >= settings.steps and (rate := settings.learning_rate):
        notes.append(f"all {settings.steps} steps are warm-up (warmup={warmup}): the rate never reaches {rate:g}.")
    return notes


def check_length(folder: RunFolder, settings: TrainSettings, extend: bool) -> list[str]:
    """A cosine schedule has one length: InputError if `settings.steps` changes it without `extend`. Returns notes."""
    _, stored = folder.config_and_settings()
    if settings.steps == stored.steps:
        return []
    done = max((path.name for path in checkpoint.steps(folder.checkpoints)), default="")
    passed = done > checkpoint.step_name(settings.steps)
    require(not passed, f"{folder.path} has {done} already: it cannot be made {settings.steps} steps long.")
    at = min(stored.steps, settings.steps)
    rates = f"the rate at step {at} is {learning_rate(settings, at):.3g} ({learning_rate(stored, at):.3g} as begun)"
    change = f"with {settings.steps} steps instead of {stored.steps} the cosine schedule changes: {rates}"
    require(extend, f"{folder.path}: {change}. Add --extend if that is meant.")
    return [change]


def train_in(
    processes: Processes, config: ChiarConfig, settings: TrainSettings, folder: RunFolder, resume: bool, device: str,
    quiet: bool, extend: bool,
) -> dict[str, Any] | None:  # fmt: skip
    corpora = [Corpus.open(Path(path)) for path in settings.data]
    if config.positions == "rope":
        config = deepcopy(config)
        config.max_position_embeddings = settings.length  # the trained length, which evaluation uses by default
    notes = [f"note: {note}" for note in check_run(config, settings, corpora)]
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    resume = processes.from_main(lambda: folder.should_resume(resume))
    changes = processes.from_main(lambda: check_length(folder, settings, extend)) if resume else []
    notes += [f"note: {note}" for note in changes]
    if settings.precision == "auto":  # that of the main process's device, or the one a resumed run was begun with
        own = {"precision": "bf16" if computes_bf16(processes.device) else "fp32"}
        stored = processes.from_main(lambda: folder.read_part("settings") if resume else own)
        settings = replace(settings, precision=stored["precision"])
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    run = Run(config, settings, corpora, processes)  # before there is a folder, as it may fail
    run.folder = folder
    record = describe(config, settings, corpora, processes.count, device)
    latest = processes.from_main(lambda: folder.open(record, resume))
    if latest is not None:
        run.restore(latest)
        left = "" if run.step < settings.steps else ": nothing is left to train (--steps N --extend goes further)"
        notes += [f"warning: {warning}" for warning in latest.warnings]
        notes.append(f"resuming after step {run.step} of {settings.steps}{left}")
    notes = [*run.banner(), *notes]
    if settings.compile and run.step < settings.steps:
        notes.append("compiling: the first step takes a minute or two (--no-compile starts at once)")
    operators = list(config.operators or ()) if settings.tensorboard else None
    notes += [f"warning: {lost}" for lost in processes.from_main(lambda: folder.trim_metrics(run.step))]
    with closing(Display(settings.steps, run.step, quiet or not processes.main)) as run.display, ExitStack() as opened:
        for note in notes:
            run.display.say(note)
        if processes.main:
            run.metrics = opened.enter_context(closing(Metrics(folder.metrics_path, run.step, operators)))
        with CtrlC() as interruption:
            return run.go(interruption)


class Run(Trainer):
    """The loop around the steps. Only the main process has metrics."""

    folder: RunFolder
    display: Display
    metrics: Metrics | None = None

    def banner(self) -> list[str]:
        """Lines on the model, the training, and where the run is written."""
        settings, kinds = (
            self.settings,
            [(kind, len([*layers])) for kind, layers in groupby(self.config.layer_types or ())],
        )
        layers = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds)
        parameters, tokens = sum(p.numel() for p in self.model.parameters()), settings.batch * settings.length
        device = describe_device(self.processes.device)
        device += f" × {self.processes.count}" if self.processes.count > 1 else ""
        first = f"model: {parameters:,} parameters, width {self.config.hidden_size}, layers {layers}"
        second = f"{settings.steps:,} steps of {settings.batch} × {settings.length} = {tokens:,} tokens"
        return [first, f"training: {second}, on {device} in {settings.precision}", f"writing to: {self.folder.path}"]

    def farewell(self) -> list[str]:
        """Lines on where the results are and which commands use them."""
        path, corpus, best = (shlex.quote(str(p)) for p in (self.folder.path, self.corpora[0].folder, self.folder.best))
        score = f", validation loss {self.best['loss']:.4f} at step {self.best['step']}" if self.best else ""
        commands = [f"chiar eval {path} --data {corpus}"]
        if self.heads[0] is None:  # the others are for language models
            commands += [f"chiar explore {path}", f'chiar generate {path} --prompt "…"']
        return [
            f"done: the best model is {best}{score}; the last one {self.folder.final}",
            "next: " + "\n      ".join(commands),
        ]

    def go(self, interruption: CtrlC) -> dict[str, Any] | None:
        settings, record, warned = self.settings, None, set[str]()
        self.marked_time = time.perf_counter()
        while self.step < settings.steps:
            measured = self.train_step()
            for what, runner in (("torch.compile", self.forward), ("recording CUDA graphs", self.graphs)):
                if runner is not None and runner.failure and what not in warned:
                    self.display.say(f"warning: {what} failed, so the run goes on without it: {runner.failure}")
                    warned.add(what)
            last = self.step == settings.steps
            self.display.advance(self.step)
            evaluates = self.step % settings.evaluate_every == 0 or last
            if logs := self.step % settings.log_every == 0 or evaluates or self.step == 1:
                record = self.measure(measured)
                if record.get("dropped", 0.0) > MANY_DROPPED and "room" not in warned:
                    problem = (
                        f"{record['dropped']:.1%} of dark tokens found no room in step {self.step} and were light there"
                    )
                    self.display.say(f"warning: {problem}: a larger target_fraction makes room for more")
                    warned.add("room")
                if evaluates:
                    self.validate(record)
                if self.metrics is not None:
                    self.metrics.write(record)
                    self.display.record(record)
            if settings.recalibrate_every and self.step % settings.recalibrate_every == 0:
                self.display.say(f"thresholds set to {self.recalibrate()}")
            # Several processes agree on it only in logged steps, where they synchronise anyway.
            alone = self.processes.count == 1
            stops = interruption.pressed if alone else logs and any(self.processes.all(interruption.pressed))
            if self.step % settings.save_every == 0 or last or stops:
                self.save()
            if stops and not last:
                raise KeyboardInterrupt
        self.check_finite()
        self.export(self.folder.final)  # after the loop, so that resuming completes a run killed after its last step
        for line in self.farewell():
            self.display.say(line)
        return record

    def measure(self, measured: dict[str, Any]) -> dict[str, Any]:
        """A step's measurements over all processes, as plain numbers."""
        loss, (losses, gates, _) = self.means(measured["results"])
        self.check_finite({"the loss": loss})
        use_LK = self.processes.total(torch.stack([result.use_LK for _, result, _ in measured["results"]]).mean(0))
        use = [[round(value, 6) for value in row] for row in (use_LK / self.processes.count).tolist()]
        record = {"step": self.step, "loss": loss, "rate": measured["rate"], "gradient_norm": float(measured["norm"])}
        record |= {"use": use} | ({"loss_by_corpus": losses} if len(self.corpora) > 1 else {})
        record |= {"gate": gates} if self.config.meta_router else {}
        if self.config.stacks:
            dropped = torch.stack([result.dropped for _, result, _ in measured["results"]]).mean()
            record["dropped"] = round(float(self.processes.total(dropped)) / self.processes.count, 6)
        now, tokens = time.perf_counter(), self.processes.all(self.tokens)
        record["tokens_per_second"] = round(sum(tokens) / (now - self.marked_time), 1)
        self.tokens, self.marked_time = 0, now
        if (mfu := utilisation(self, record["tokens_per_second"], record["use"])) is not None:
            record["mfu"] = mfu
        record["compiled"] = self.forward.compiled
        if self.processes.device.type == "cuda":
            record["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        return record

    def validate(self, record: dict[str, Any]) -> None:
        """Evaluate, export the best model, continue the prompt greedily (frozen at it: a gate that sees the future)."""
        record |= self.evaluate()
        self.check_finite({f"the validation loss on {name}": loss for name, loss in record["validation"].items()})
        now = {"step": self.step, "loss": record["validation"][self.names[0]]}
        if self.heads[0] is not None:
            now["accuracy"] = record["accuracy"][self.names[0]]
        # Classifiers are compared by accuracy, then by loss; language models by loss.
        score, best = ((one.get("accuracy", 0.0), -one["loss"]) for one in (now, self.best or now))
        if self.best is None or score > best:
            self.best = now
            self.export(self.folder.best)
        if prompt := self.settings.sample:
            with self.language() as language:
                codec = TextCodec.open(language.config, self.corpora[0].folder / "tokenizer")
                record["sample"] = prompt + write_text(language, codec, prompt, Sampling(48))
        self.marked_time = time.perf_counter()

    def save(self) -> None:
        self.check_finite()
        target = self.folder.checkpoints / checkpoint.step_name(self.step)
        if self.metrics is not None:
            self.metrics.sync()
        state = {"step": self.step, "best": self.best, "thresholds": self.model.language.config.thresholds}
        checkpoint.save(target, self.tensors(), state, self.processes)
        if self.processes.main:
            checkpoint.replace_link(self.folder.checkpoints / "latest", target)
            checkpoint.retain(self.folder.checkpoints, self.settings.keep, self.best)

    def export(self, link: Path) -> None:
        """Export the model, or its average if one is kept. All processes take part; the main one writes it."""
        with self.averaged():
            model = whole(self.model, wanted=self.processes.main)
        with checkpoint.collective_write(self.processes, f"the {link.name} model, of step {self.step},"):
            if model is not None:
                self.folder.export(model, self.corpora[0], link, self.step)

    def check_finite(self, losses: dict[str, float] | None = None) -> None:
        """If a gradient, weight or one of `losses` is not finite, save the step's batches and raise TrainingStopped."""
        step, wrong = int(self.first_bad_step), [name for name, x in (losses or {}).items() if not math.isfinite(x)]
        if step >= 0:
            wrong = ["the gradient"]
        elif not wrong:
            bad = torch.stack([~local_rows(p)[1].isfinite().all() for p in self.model.parameters()]).any()
            wrong = ["a weight"] if self.processes.total(bad.float()) else []
        if not wrong:
            return
        step = step if step >= 0 else self.step - 1
        what, tensors = f"{wrong[0]} of step {step + 1} is not finite", dict[str, Tensor]()
        for slot in range(self.schedule.slots):
            for batch in self.schedule.batches(step, slot):
                parts, name = batch._asdict(), f"slot{slot}.{self.names[batch.corpus]}"
                tensors |= {f"{name}.{part}": value for part, value in parts.items() if isinstance(value, Tensor)}
        saved = checkpoint.steps(self.folder.checkpoints)
        last = f"{saved[0].name} is the last good checkpoint" if saved else "no checkpoint was saved before"
        name = f"not-finite-{checkpoint.step_name(step + 1)}.safetensors"
        with checkpoint.collective_write(self.processes, f"{what}, {last}, and its batches, {name},"):
            if self.processes.main:
                save_file(tensors, self.folder.path / name)
        way = f"a new run with a --learning-rate below {self.settings.learning_rate:g} may do better"
        raise checkpoint.TrainingStopped(f"{what}: its batches are in {name}, and {last}; {way}.")
