"""A run from beginning to end: check, open the folder, resume or start, step, measure, save; by one process or many."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.data.tokenizers import check_tokenizer
from chiar.data.tokens import TextCodec
from chiar.errors import InputError, optional_module
from chiar.generation.writer import Sampling, write_text
from chiar.routing.calibration import calibrate
from chiar.training import checkpoint
from chiar.training.checkpoint import TrainingStopped as TrainingStopped
from chiar.training.compiling import Forward, GraphedPasses, computes_bf16, miscompiled
from chiar.training.distributed import Processes, replicate, shard, start
from chiar.training.reporting import Display, Metrics, utilisation
from chiar.training.run_folder import RUN, RunFolder, describe, told
from chiar.training.settings import TrainSettings
from chiar.training.tasks import Batch, Prefetch, Rows, Schedule, TaskResult, materialise, outline, seed_of, whole

SHARD_FROM = 600_000_000  # parameters, where `parallel` is auto


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says how to go on."""


def train(
    config: ChiarConfig, settings: TrainSettings, out: Path, resume: bool = False, device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Train to `settings.steps`, writing to the run folder `out`. Returns the last record."""
    settings.validate()
    logging.disable_progress_bar()  # ours is enough
    folder = RunFolder(out)
    try:
        with closing(start(device)) as processes:
            return train_among(processes, config, settings, folder, resume, quiet)
    except KeyboardInterrupt:
        if not (folder.path / RUN).is_file():
            raise Interrupted("nothing was written yet.") from None
        saved = checkpoint.steps(folder.checkpoints)
        goes_on = f"goes on after {saved[0].name}" if saved else "starts again, since no checkpoint was saved yet"
        raise Interrupted(f"the same command with --resume {goes_on}.") from None
    except torch.OutOfMemoryError as error:
        ways = f"make --micro-batch ({settings.micro_batch} now) or --length ({settings.length}) smaller"
        ways += "" if settings.gradient_checkpointing else ", or add --set gradient_checkpointing=true"
        raise InputError(f"the GPU's memory does not suffice: {ways}, with a new --out.") from error


def check_run(config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus]) -> list[str]:
    """InputError where the run cannot be; otherwise what a reader of its figures must know."""
    first, names, needed = corpora[0], [corpus.name for corpus in corpora], corpora[0].vocab_size
    texts, moves = [corpus.name for corpus in corpora if corpus.kind == "language"], settings.recalibrate_every > 0
    if texts and first.kind != "language":
        raise InputError(f"{texts[0]} is a language corpus: name it first, before {names[0]}.")
    if not texts and settings.sample:
        raise InputError("sample continues a text, and the run has no language corpus: leave it out.")
    for corpus, split in ((corpus, split) for corpus in corpora for split in ("train", "valid")):
        if split not in corpus.splits:
            raise InputError(f"{corpus.folder} has no {split} split (only {', '.join(corpus.splits)}): prepare it.")
        first.require_same_tokenizer(corpus)
    if len(set(names)) < len(names):
        raise InputError(f"two corpora are called alike ({', '.join(names)}): chiar data prepare --name names one.")
    notes = [remark for corpus in corpora for remark in corpus.remarks]
    notes += check_tokenizer(settings.initial, config, first) if settings.initial else []
    if needed > config.vocab_size:
        raise InputError(f"the corpus has {needed} token ids, the model only {config.vocab_size}: set vocab_size.")
    if moves and (config.router != "entropy" or not config.routed_layers):
        raise InputError("recalibrate_every needs routed layers with the entropy router.")
    if moves and config.target_fraction is not None:
        raise InputError("target_fraction already moves the thresholds in training: leave recalibrate_every at 0.")
    if config.positions == "learned" and settings.length > config.max_position_embeddings:
        raise InputError(f"length {settings.length} exceeds the {config.max_position_embeddings} learned positions.")
    if settings.tensorboard:
        optional_module("tensorboard", "tensorboard", "the setting tensorboard=true")
    if (warmup := settings.warmup) >= settings.steps and (rate := settings.learning_rate):
        notes.append(f"all {settings.steps} steps are warm-up (warmup={warmup}): the rate never gets to {rate:g}.")
    return notes


def settle(settings: TrainSettings, processes: Processes, resumed: RunFolder | None) -> TrainSettings:
    """Precision `auto` as what it means on the main process's device, or as what a resumed run was begun with."""
    if settings.precision != "auto":
        return settings
    here = {"precision": "bf16" if computes_bf16(processes.device) else "fp32"}
    begun = processes.from_main(lambda: told(resumed.read(), "settings", resumed.path.name) if resumed else here)
    return replace(settings, precision=begun["precision"])


def train_among(
    processes: Processes, config: ChiarConfig, settings: TrainSettings, folder: RunFolder, resume: bool, quiet: bool
) -> dict[str, Any] | None:
    corpora = [Corpus.open(Path(path)) for path in settings.data]
    if config.positions == "rope":
        config = deepcopy(config)
        config.max_position_embeddings = settings.length  # the trained length, which evaluation takes as its own
    notes = [f"note: {note}" for note in check_run(config, settings, corpora)]
    for corpus in corpora:
        Rows(corpus, "valid", settings.length)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    resume = processes.from_main(lambda: folder.goes_on(resume))
    settings = settle(settings, processes, folder if resume else None)
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    run = Run(config, settings, corpora, processes)  # what cannot be built leaves no folder
    run.folder = folder
    record = describe(config, settings, corpora, processes.count)
    found = processes.from_main(lambda: folder.open(record, resume))
    if found is not None:
        run.restore(found)
        left = "" if run.step < settings.steps else ": nothing is left to train"
        notes += [f"warning: {complaint}" for complaint in found.complaints]
        notes.append(f"resuming after step {run.step} of {settings.steps}{left}")
    if settings.compile and run.step < settings.steps:
        notes.append("compiling: the first step takes a minute or two (--no-compile starts at once)")
    with ExitStack() as opened:
        run.display = opened.enter_context(closing(Display(settings.steps, run.step, quiet or not processes.main)))
        for note in notes:
            run.display.say(note)
        if processes.main:
            kept, operators = found.state["metrics_bytes"] if found else 0, list(config.operators or ())
            metrics = Metrics(folder.metrics_path, kept, run.step, operators if settings.tensorboard else None)
            run.metrics = opened.enter_context(closing(metrics))
        return run.go()


def make_optimizer(model: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """Matrices and embeddings decay; biases, norms and the filters, spectral and temporal, do not."""
    by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        by_decay[parameter.ndim >= 2 and not name.endswith("coefficients_KD")].append(parameter)
    groups = [{"params": those, "weight_decay": settings.weight_decay * decay} for decay, those in by_decay.items()]
    fused, betas = device.type == "cuda", (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused or None)
    # AdamW makes its state on the first step; made now, so that a checkpoint can be read into it.
    for parameter in model.parameters():
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, then a cosine down to the final rate at the last step."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = min((step - settings.warmup) / max(settings.steps - settings.warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_learning_rate + (settings.learning_rate - settings.final_learning_rate) * cosine


class Trainer:
    """Model, optimiser and data of a run. `step` counts finished optimiser steps."""

    def __init__(
        self, config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus], processes: Processes
    ) -> None:
        self.config, self.settings, self.corpora, self.processes = config, settings, corpora, processes
        self.names = [corpus.name for corpus in corpora]
        self.heads = [corpus.name if corpus.kind == "classification" else None for corpus in corpora]
        self.schedule = Schedule(settings, [Rows(corpus, "train", settings.length) for corpus in corpora])
        self.accumulation = settings.accumulation(processes.count)
        self.slots = [turn * processes.count + processes.rank for turn in range(self.accumulation)]
        self.prefetch = Prefetch(self.schedule, self.slots, processes.device)
        self.model = outline(config, {c.name: len(c.labels) for c in corpora if c.kind == "classification"})
        big = processes.count > 1 and sum(p.numel() for p in self.model.parameters()) >= SHARD_FROM
        self.sharded = settings.parallel == "fsdp" or (settings.parallel == "auto" and big)
        if self.sharded:
            shard(self.model, processes)
        materialise(self.model, settings.seed, processes.device, settings.initial)
        if settings.gradient_checkpointing:
            # Without dropout no random state need be kept, which would read it from the device in every layer.
            self.model.language.model.gradient_checkpointing_enable({"preserve_rng_state": config.dropout > 0})
        self.optimizer = make_optimizer(self.model, settings, processes.device)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()} if settings.ema else {}
        self.step, self.tokens = 0, 0  # finished; read by this process since the loop last took them
        self.best: dict[str, float] | None = None
        # The first step whose gradient was not finite; kept on the device so that no step waits for it.
        self.first_bad_step = torch.full((), -1, device=processes.device)
        self.parallel = self.model if self.sharded else replicate(self.model, processes)
        parts = list(self.model.language.model.layers) if self.sharded or settings.compile_layers else []
        obstacle = miscompiled(config, processes.device, settings.precision)
        self.forward = Forward(self.parallel, settings.compile, parts, self.sharded, obstacle)
        self.graphs: GraphedPasses | None = None
        alone = processes.count == 1 and not self.sharded and processes.device.type == "cuda"
        if alone and settings.cuda_graphs and not settings.deterministic:
            self.graphs = GraphedPasses(self._language_pass, self.model.parameters())

    def train_step(self) -> dict[str, Any]:
        """One optimiser step; run again without compiling, or without recorded passes, where that fails in it."""
        tokens = self.tokens
        try:
            return self._train_step()
        except Exception as error:
            no_memory = isinstance(error, torch.OutOfMemoryError) and self.graphs is not None and self.graphs.records
            if not no_memory and not self.forward.fall_back(error):
                raise
        if self.graphs is not None and self.graphs.records:  # they hold memory, or what was compiled
            self.graphs.give_up("a pass beside the recorded ones found no memory, or could not be compiled")
        self.tokens = tokens
        self.optimizer.zero_grad(set_to_none=True)
        return self._train_step()

    def _train_step(self) -> dict[str, Any]:
        """Accumulate, clip, update. Returns what was measured, still on the device."""
        settings, count = self.settings, self.processes.count
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.parallel.train()
        done: list[tuple[int, TaskResult]] = []
        for slot, batches in zip(self.slots, self.prefetch.batches(self.step), strict=True):
            torch.manual_seed(seed_of(settings.seed, self.step, slot))
            for number, batch in enumerate(batches):
                last = slot == self.slots[-1] and number == len(batches) - 1
                done.append((batch.corpus, self._backward(batch, sync=last)))
            if self.sharded:  # none can do without the others, though where corpora are added one may have two batches
                first = self.step * self.schedule.slots + slot - self.processes.rank
                most = int(self.schedule.uses[first : first + count].sum(1).max())
                for _ in range(most - len(batches)):
                    self._backward(batches[-1], sync=True, share=0.0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        bad = (self.first_bad_step < 0) & ~norm.isfinite()
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state = self.model.language.model.router_state
        for buffer in state.state_dict().values() if state is not None and count > 1 else ():
            buffer.copy_(self.processes.total(buffer.clone()) / count)  # each process has moved it by its own tokens
        for name, parameter in self.model.named_parameters() if self.average else ():
            self.average[name].lerp_(parameter.detach(), 1 - settings.ema)
        self.step += 1
        return {"done": done, "norm": norm, "rate": rate}

    def _language_pass(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with self.autocast():
            result = self.forward(ids_BT, targets_BT, None, None)
        (result.loss / self.accumulation).backward()
        return result.loss.detach(), result.use_LK, result.gate, result.correct

    def _backward(self, batch: Batch, sync: bool, share: float = 1.0) -> TaskResult:
        """One micro-batch. With a share of 0 it is only there for the other processes."""
        if share:
            self.tokens += batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
        batch, head = batch.to(self.processes.device), self.heads[batch.corpus]
        if self.graphs is not None and head is None:
            return TaskResult(*self.graphs(batch.ids, batch.targets))
        waits = sync or self.processes.count == 1 or self.sharded  # whole gradients would not fit where it shards
        with nullcontext() if waits else self.parallel.no_sync():  # type: ignore[operator]
            with self.autocast():
                result = self.forward(batch.ids, batch.targets, batch.mask, head)
            (share * result.loss / self.accumulation).backward()
        result.loss = result.loss.detach()
        return result

    def autocast(self) -> Any:
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")

    def summary(self, measured: dict[str, Any]) -> dict[str, Any]:
        """A step's measurements over all processes as plain numbers. This waits for the device."""
        table_C3 = torch.zeros(len(self.corpora), 3, device=self.processes.device, dtype=torch.float64)
        for corpus, result in measured["done"]:
            table_C3[corpus] += torch.stack([result.loss.double(), result.gate.double(), table_C3.new_ones(())])
        losses, gates, counts = self.processes.total(table_C3).T.tolist()
        use = self.processes.total(torch.stack([result.use_LK for _, result in measured["done"]]).mean(0))
        record: dict[str, Any] = {"step": self.step, "loss": sum(losses) / sum(counts), "rate": measured["rate"]}
        record["gradient_norm"] = float(measured["norm"])
        record["use"] = [[round(value, 6) for value in row] for row in (use / self.processes.count).tolist()]
        read = [(name, i) for i, name in enumerate(self.names) if counts[i]]
        if len(self.corpora) > 1:
            record["loss_by_corpus"] = {name: losses[i] / counts[i] for name, i in read}
        if self.config.meta_router:
            record["gate"] = {name: gates[i] / counts[i] for name, i in read}
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Validation loss of each corpus, and the accuracy of those with classes, on the same rows every time."""
        found: dict[str, dict[str, float]] = {"validation": {}}
        size, rank, world = self.settings.micro_batch, self.processes.rank, self.processes.count
        self.parallel.eval()
        with self.averaged(), self.language():
            for number, corpus in enumerate(self.corpora):
                rows = Rows(corpus, "valid", self.settings.length)
                firsts = range(0, len(wanted := rows.evaluated(self.settings.evaluate_rows)), size)
                total = torch.zeros(3, device=self.processes.device, dtype=torch.float64)
                for turn in range(0, len(firsts), world):
                    mine = turn + rank < len(firsts)  # a process without rows keeps the others company
                    first = firsts[turn + rank if mine else 0]
                    batch = rows.batch(number, wanted[first : first + size]).to(self.processes.device)
                    with self.autocast():
                        result = self.model(batch.ids, batch.targets, batch.mask, self.heads[number])
                    if mine:
                        count = total.new_tensor(len(batch.ids))
                        total += torch.stack([result.loss.double() * count, result.correct.double(), count])
                loss, correct, rows_read = self.processes.total(total).tolist()
                found["validation"][corpus.name] = loss / rows_read
                if self.heads[number] is not None:
                    found.setdefault("accuracy", {})[corpus.name] = correct / rows_read
        self.parallel.train()
        return found

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The exponential average in place of the weights, where one is kept."""
        named = self.model.named_parameters() if self.average else ()
        parameters = [(p, p.detach().clone(), self.average[name]) for name, p in named]
        with torch.no_grad():
            try:
                for parameter, _, average in parameters:
                    parameter.copy_(average)
                yield
            finally:
                for parameter, kept, _ in parameters:
                    parameter.copy_(kept)

    @contextmanager
    def language(self) -> Iterator[Any]:
        """The language model, to be called uncompiled, and sharded with its first and last matrices gathered."""
        if self.sharded:
            self.model.unshard()  # type: ignore[operator]
        try:
            with torch.compiler.set_stance("force_eager"):
                yield self.model.language
        finally:
            if self.sharded:  # what was gathered would be used again, outdated
                self.model.reshard()  # type: ignore[operator]

    def recalibrate(self) -> list:
        """Per-layer thresholds from rows of the step just done, the same in every process."""
        batches = [self.schedule.batches(self.step - 1, slot)[0] for slot in range(min(self.schedule.slots, 4))]
        stream: list[dict[str, Any]] = [{"input_ids": batch.ids} for batch in batches if batch.mask is None]
        stream = stream or [{"input_ids": batch.ids, "attention_mask": batch.mask} for batch in batches]
        with self.language() as language:
            thresholds = calibrate(language, stream).thresholds(len(self.config.routed_layers))
        self.model.language.model.set_thresholds(thresholds)
        return thresholds

    def tensors(self) -> dict[str, Tensor]:
        """Everything a run has learned: weights, saved buffers, the optimiser's state, the average."""
        parameters = dict(self.model.named_parameters())  # tied ones once
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - parameters.keys()
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items() if name not in tied}
        for name, parameter in parameters.items():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors | {f"average.{name}": value for name, value in self.average.items()}

    def restore(self, found: checkpoint.Found) -> None:
        checkpoint.load(found.folder, self.tensors())
        self.step, self.best = found.state["step"], found.state["best"]
        self.model.language.model.set_thresholds(found.state["thresholds"])


class Run(Trainer):
    """The loop around the steps. Metrics are the main process's."""

    folder: RunFolder
    display: Display
    metrics: Metrics | None = None

    def go(self) -> dict[str, Any] | None:
        settings, record, warned = self.settings, None, set[str]()
        self.marked_step, self.marked_time = self.step, time.perf_counter()
        while self.step < settings.steps:
            measured = self.train_step()
            graphs = self.graphs.failure if self.graphs is not None else None
            for text, why in (("torch.compile failed", self.forward.failure), ("recording CUDA graphs failed", graphs)):
                if why and text not in warned:
                    self.display.say(f"warning: {text}, so the run goes on without it: {why}")
                    warned.add(text)
            last = self.step == settings.steps
            self.display.advance(self.step)
            evaluates = self.step % settings.evaluate_every == 0 or last
            if self.step % settings.log_every == 0 or evaluates or self.step == 1:
                record = self.measure(measured)
                if evaluates:
                    self.validate(record)
                if self.metrics is not None:
                    self.metrics.write(record)
                    self.display.record(record)
            if settings.recalibrate_every and self.step % settings.recalibrate_every == 0:
                self.display.say(f"thresholds set to {self.recalibrate()}")
            if self.step % settings.save_every == 0 or last:
                self.save()
        self.export(self.folder.final)  # here, so that a run killed after its last step is completed when resumed
        return record

    def measure(self, measured: dict[str, Any]) -> dict[str, Any]:
        record = self.summary(measured)
        self.check_finite(record["loss"])
        now, tokens = time.perf_counter(), self.processes.all(self.tokens)
        record["tokens_per_second"] = round(sum(tokens) / (now - self.marked_time), 1)
        self.tokens, self.marked_step, self.marked_time = 0, self.step, now
        if (mfu := utilisation(self, record["tokens_per_second"], record["use"])) is not None:
            record["mfu"] = mfu
        record["compiled"] = self.forward.compiled
        if self.processes.device.type == "cuda":
            record["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        return record

    def validate(self, record: dict[str, Any]) -> None:
        """Evaluate, export the best, continue the prompt greedily (a gate that sees the future is frozen at it)."""
        record |= self.evaluate()
        now = {"step": self.step, "loss": record["validation"][self.names[0]]}
        if self.heads[0] is not None:
            now["accuracy"] = record["accuracy"][self.names[0]]
        # A classifier by its accuracy, and by its loss where that is equal; a language model by its loss.
        better, than = ((found.get("accuracy", 0.0), -found["loss"]) for found in (now, self.best or now))
        if self.best is None or better > than:
            self.best = now
            self.export(self.folder.best)
        if prompt := self.settings.sample:
            with self.language() as language:
                codec = TextCodec.open(language.config, self.corpora[0].folder / "tokenizer")
                record["sample"] = prompt + write_text(language, codec, prompt, Sampling(48))
        self.marked_step, self.marked_time = self.step, time.perf_counter()

    def save(self) -> None:
        self.check_finite(0.0)
        target = self.folder.checkpoints / checkpoint.step_name(self.step)
        written = self.metrics.bytes if self.metrics is not None else 0
        learned = {"best": self.best, "thresholds": self.model.language.config.thresholds}
        state = {"step": self.step, "metrics_bytes": written, **learned}
        checkpoint.save(target, self.tensors(), state, self.processes)
        if self.processes.main:
            checkpoint.point(self.folder.checkpoints / "latest", target)
            checkpoint.retain(self.folder.checkpoints, self.settings.keep, self.best)

    def export(self, link: Path) -> None:
        """All processes take part; the main one gets the model in one piece, averaged where an average is kept."""
        with self.averaged():
            model = whole(self.model, wanted=self.processes.main)
        with checkpoint.agreed(self.processes, f"the {link.name} model, of step {self.step},"):
            if model is not None:
                self.folder.export(model, self.corpora[0], link, self.step)

    def check_finite(self, loss: float) -> None:
        """Where the gradient of a step or this loss is not finite: keep the step's batches, say so, stop."""
        if (step := int(self.first_bad_step)) < 0 and math.isfinite(loss):
            return
        step = step if step >= 0 else self.step - 1
        path = self.folder.path / f"not-finite-{checkpoint.step_name(step + 1)}.safetensors"
        kept, tensors = f"its batches are in {path.name}", dict[str, Tensor]()
        for slot in range(self.schedule.slots):
            for batch in self.schedule.batches(step, slot):
                parts = {"ids": batch.ids, "targets": batch.targets, "mask": batch.mask}
                name = f"slot{slot}.{self.names[batch.corpus]}"
                tensors |= {f"{name}.{part}": value for part, value in parts.items() if value is not None}
        try:
            with checkpoint.agreed(self.processes, path.name):
                if self.processes.main:
                    save_file(tensors, path)
        except TrainingStopped as error:
            kept = str(error).removesuffix(".")
        saved = checkpoint.steps(self.folder.checkpoints)
        last = f"{saved[0].name} is the last good checkpoint" if saved else "no checkpoint was saved before"
        raise TrainingStopped(f"the gradient of step {step + 1} is not finite: {kept}, and {last}.")
