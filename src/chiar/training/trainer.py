"""The model, optimiser and data of a run: one optimiser step after another, evaluation, and its state as tensors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.routing.calibration import calibrate
from chiar.training import checkpoint
from chiar.training.compiling import Forward, GraphedPasses, miscompiled
from chiar.training.distributed import Processes, replicate, shard
from chiar.training.memory import check_memory
from chiar.training.settings import TrainSettings
from chiar.training.tasks import Batch, Rows, Schedule, TaskResult, materialise, outline, read_ahead, seed_of

SHARD_FROM = 600_000_000  # parameters, with `parallel` auto
WeightedResult = tuple[int, TaskResult, int]  # index of a corpus, the result of a batch of it, its weight in the mean


def make_optimizer(model: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """AdamW. Matrices and embeddings decay; biases, norms and the filters, spectral and temporal, do not."""
    by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        by_decay[parameter.ndim >= 2 and not name.endswith("coefficients_KD")].append(parameter)
    groups = [{"params": those, "weight_decay": settings.weight_decay * decay} for decay, those in by_decay.items()]
    fused, betas = device.type == "cuda", (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused or None)
    # AdamW creates its state in the first step; created here, so that a checkpoint can be read into it.
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
        self.accumulation = settings.accumulation(processes.count)
        self.model = outline(config, {c.name: len(c.labels) for c in corpora if c.kind == "classification"})
        parameters = sum(p.numel() for p in self.model.parameters())
        check_memory(config, settings, parameters, processes)
        self.schedule = Schedule(settings, [Rows(corpus, "train", settings.length) for corpus in corpora])
        self.slots = range(processes.rank, self.schedule.slots, processes.count)
        self.batches = read_ahead(self.schedule, self.slots, 0, processes.device)
        big = processes.count > 1 and parameters >= SHARD_FROM
        self.sharded = settings.parallel == "fsdp" or (settings.parallel == "auto" and big)
        if self.sharded:
            shard(self.model, processes)
        materialise(self.model, settings.seed, processes.device, settings.initial)
        if settings.gradient_checkpointing:
            # Without dropout nobody needs the random state; saving it would read it from the device in every layer.
            self.model.language.model.gradient_checkpointing_enable({"preserve_rng_state": config.dropout > 0})
        self.optimizer = make_optimizer(self.model, settings, processes.device)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()} if settings.ema else {}
        self.step, self.tokens = 0, 0  # finished steps; tokens this process has read since the last record
        self.best: dict[str, float] | None = None
        # The first step whose gradient was not finite; kept on the device so that no step waits for it.
        self.first_bad_step = torch.full((), -1, device=processes.device)
        self.parallel = self.model if self.sharded else replicate(self.model, processes)
        decoder = self.model.language.model
        # On a CPU a dark stack packs just the dark tokens of a pass; in one compiled graph its layers would run on all.
        packs = bool(decoder.dark_stacks) and config.execution != "dense" and processes.device.type == "cpu"
        parts: list[nn.Module] = list(decoder.layers) if self.sharded or settings.compile_layers or packs else []
        parts += decoder.dark_stacks if parts and not packs else []
        obstacle = miscompiled(config, processes.device, settings.precision)
        self.forward = Forward(self.parallel, settings.compile, parts, self.sharded, obstacle)
        alone = processes.count == 1 and not self.sharded and processes.device.type == "cuda"
        recorded = alone and settings.cuda_graphs and not settings.deterministic
        self.graphs = GraphedPasses(self._pass, self.model.parameters()) if recorded else None
        self.autocast = partial(torch.autocast, processes.device.type, torch.bfloat16, settings.precision == "bf16")

    def train_step(self) -> dict[str, Any]:
        """One optimiser step, repeated without compiling or recorded passes if these fail or leave no memory."""
        batches = next(self.batches)
        try:
            return self._train_step(batches)
        except Exception as error:
            graphs = self.graphs if self.graphs is not None and self.graphs.records else None
            no_memory = isinstance(error, torch.OutOfMemoryError) and graphs is not None
            if not no_memory and not self.forward.fall_back(error):
                raise
        if graphs is not None:  # recordings hold memory, and contain compiled code
            graphs.give_up("a pass that is not recorded ran out of memory, or could not be compiled")
        self.optimizer.zero_grad(set_to_none=True)
        return self._train_step(batches)

    def _train_step(self, batches_by_slot: list[list[Batch]]) -> dict[str, Any]:
        """Accumulate, clip, update. Returns measurements that are still on the device."""
        settings, count = self.settings, self.processes.count
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.parallel.train()
        results: list[WeightedResult] = []
        for slot, batches in zip(self.slots, batches_by_slot, strict=True):
            torch.manual_seed(seed_of(settings.seed, self.step, slot))
            for number, batch in enumerate(batches):
                last = slot == self.slots[-1] and number == len(batches) - 1
                results.append((batch.corpus, self._backward(batch, sync=last), 1))
            if self.sharded:  # every pass needs all processes, but with mixing=added some have two batches
                first = self.step * self.schedule.slots + slot - self.processes.rank
                most = int(self.schedule.uses[first : first + count].sum(1).max())
                for _ in range(most - len(batches)):
                    self._backward(batches[-1], sync=True, share=0.0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        bad = (self.first_bad_step < 0) & ~norm.isfinite()
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state = self.model.language.model.router_state
        for buffer in state.state_dict().values() if state is not None and count > 1 else ():
            buffer.copy_(self.processes.total(buffer.clone()) / count)  # each process has updated it by its own tokens
        for name, parameter in self.model.named_parameters() if self.average else ():
            self.average[name].lerp_(parameter.detach(), 1 - settings.ema)
        for batch in chain(*batches_by_slot):
            self.tokens += batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
        self.step += 1
        return {"results": results, "norm": norm, "rate": rate}

    def _backward(self, batch: Batch, sync: bool, share: float = 1.0) -> TaskResult:
        """Forward and backward of one micro-batch. With a share of 0 it only takes part for the other processes."""
        batch, head = batch.to(self.processes.device), self.heads[batch.corpus]
        if self.graphs is not None and head is None:
            return TaskResult(*self.graphs(batch.ids, batch.targets))
        reduces = sync or self.processes.count == 1 or self.sharded  # whole gradients of a sharded model would not fit
        with nullcontext() if reduces else self.parallel.no_sync():  # type: ignore[operator]
            return self._pass(batch.ids, batch.targets, batch.mask, head, share)

    def _pass(
        self, ids: Tensor, targets: Tensor, mask: Tensor | None = None, head: str | None = None, share: float = 1.0
    ) -> TaskResult:
        with self.autocast():
            result: TaskResult = self.forward.call(ids, targets, mask, head)
        (share * result.loss / self.accumulation).backward()
        return result._replace(loss=result.loss.detach())

    def means(self, results: list[WeightedResult]) -> tuple[float, list[dict[str, float]]]:
        """The mean loss over all processes, then loss, g and accuracy by corpus. Waits for the device."""
        table_C4 = torch.zeros(len(self.corpora), 4, device=self.processes.device, dtype=torch.float64)
        for corpus, result, weight in results:
            loss, gate, correct = (value.double() for value in (result.loss, result.gate, result.correct))
            table_C4[corpus] += torch.stack([loss * weight, gate * weight, correct, loss.new_full((), weight)])
        table = self.processes.total(table_C4).tolist()
        rows = {name: row for name, row in zip(self.names, table, strict=True) if row[-1]}
        by_corpus = [{name: row[column] / row[-1] for name, row in rows.items()} for column in range(3)]
        return sum(row[0] for row in table) / sum(row[-1] for row in table), by_corpus

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Validation loss of each corpus, and the accuracy of those with classes, on the same rows every time."""
        results: list[WeightedResult] = []
        size, rank, world = self.settings.micro_batch, self.processes.rank, self.processes.count
        self.parallel.eval()
        with self.averaged(), self.language():
            for number, corpus in enumerate(self.corpora):
                rows = Rows(corpus, "valid", self.settings.length)
                firsts = range(0, len(wanted := rows.evaluated(self.settings.evaluate_rows)), size)
                for turn in range(0, len(firsts), world):
                    mine = turn + rank < len(firsts)  # a process without rows takes part for the others
                    first = firsts[turn + rank if mine else 0]
                    batch = rows.batch(number, wanted[first : first + size]).to(self.processes.device)
                    with self.autocast():
                        result = self.model(batch.ids, batch.targets, batch.mask, self.heads[number])
                    if mine:
                        results.append((number, result, len(batch.ids)))
        self.parallel.train()
        _, (losses, _, accuracies) = self.means(results)
        accuracies = {name: value for name, value in accuracies.items() if name in self.heads}
        return {"validation": losses} | ({"accuracy": accuracies} if accuracies else {})

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the weights are their exponential average, if one is kept."""
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()} if self.average else {}
        self.model.load_state_dict(self.average, strict=False)
        try:
            yield
        finally:
            self.model.load_state_dict(kept, strict=False)

    @contextmanager
    def language(self) -> Iterator[Any]:
        """The language model, called uncompiled; if sharded, with the weights outside its layers gathered."""
        if self.sharded:
            self.model.unshard()  # type: ignore[operator]
        try:
            with torch.compiler.set_stance("force_eager"):
                yield self.model.language
        finally:
            if self.sharded:  # later passes would use the gathered weights, outdated
                self.model.reshard()  # type: ignore[operator]

    def recalibrate(self) -> list:
        """Set per-layer thresholds from rows of the last step, the same in every process."""
        batches = [self.schedule.batches(self.step - 1, slot)[0] for slot in range(min(self.schedule.slots, 4))]
        texts: list[dict[str, Any]] = [{"input_ids": batch.ids} for batch in batches if batch.mask is None]
        stream = texts or [{"input_ids": batch.ids, "attention_mask": batch.mask} for batch in batches]
        with self.language() as language:
            thresholds = calibrate(language, stream).thresholds(len(self.config.routed_layers))
        self.model.language.model.set_thresholds(thresholds)
        return thresholds

    def tensors(self) -> dict[str, Tensor]:
        """The state of a run: weights, saved buffers, the optimiser's state, the average."""
        parameters = dict(self.model.named_parameters())  # tied ones once
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - parameters.keys()
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items() if name not in tied}
        for name, parameter in parameters.items():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors | {f"average.{name}": value for name, value in self.average.items()}

    def restore(self, latest: checkpoint.FoundCheckpoint) -> None:
        checkpoint.load(latest.folder, self.tensors())
        self.step, self.best = latest.state["step"], latest.state["best"]
        self.batches = read_ahead(self.schedule, self.slots, self.step, self.processes.device)
        self.model.language.model.set_thresholds(latest.state["thresholds"])
