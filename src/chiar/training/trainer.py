"""The state of a run and one step of it: the same code for one process and for many."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chiar.config import ChiarConfig
from chiar.data import Corpus
from chiar.routing.calibration import calibrate
from chiar.training import checkpoint
from chiar.training.batches import Batch, ClassificationRows, Prefetch, Rows, Schedule, open_rows, slot_seed
from chiar.training.compiling import Forward, GraphedPasses, miscompiled, uncompiled
from chiar.training.distributed import Processes, average_state, replicate, shard
from chiar.training.settings import TrainSettings
from chiar.training.tasks import TaskResult, materialise, outline


def make_optimizer(model: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """Matrices and embeddings decay; biases, norms and the filters, spectral and temporal, do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decaying = {name for name, p in named if p.ndim >= 2 and not name.endswith("coefficients_KD")}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name in decaying], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused or None)
    # AdamW makes its state on the first step; made now, so that a checkpoint can be read into it.
    for _, parameter in named:
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
        self.schedule = Schedule(settings, [open_rows(corpus, "train", settings.length) for corpus in corpora])
        self.accumulation = settings.accumulation(processes.count)
        self.slots = [turn * processes.count + processes.rank for turn in range(self.accumulation)]
        self.prefetch = Prefetch(self.schedule, self.slots, processes.device)
        self.model = outline(config, {c.name: len(c.labels) for c in corpora if c.kind == "classification"})
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.sharded = settings.shards(parameters, processes.count)
        if self.sharded:
            shard(self.model, processes)
        materialise(self.model, settings.seed, processes.device, settings.initial)
        if settings.gradient_checkpointing:
            # Without dropout no random state need be kept, which would read it from the device in every layer.
            self.model.language.model.gradient_checkpointing_enable({"preserve_rng_state": config.dropout > 0})
        self.optimizer = make_optimizer(self.model, settings, processes.device)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()} if settings.ema else {}
        self.step = 0
        self.tokens = 0
        """Real tokens this process has read since the loop last took them."""
        self.best: dict[str, float] | None = None
        self.first_bad_step = torch.full((), -1, device=processes.device)
        """The first step whose gradient was not finite; kept on the device so that no step waits for it."""
        self.parallel = self.model if self.sharded else replicate(self.model, processes)
        parts = list(self.model.language.model.layers) if self.sharded or settings.compile_layers else []
        obstacle = miscompiled(config, processes.device, settings.precision)
        self.forward = Forward(self.parallel, settings.compile, parts, company=self.sharded, obstacle=obstacle)
        self.graphs: GraphedPasses | None = None
        alone = processes.count == 1 and not self.sharded and processes.device.type == "cuda"
        if alone and settings.cuda_graphs and not settings.deterministic:
            self.graphs = GraphedPasses(self._language_pass, self.model.parameters())

    def train_step(self) -> dict[str, Any]:
        """One optimiser step. Where compiling fails in it, the whole step is run again without; where memory runs out
        beside recorded passes, without those."""
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
        settings = self.settings
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.parallel.train()
        done: list[tuple[int, TaskResult]] = []
        for slot, batches in zip(self.slots, self.prefetch.batches(self.step), strict=True):
            torch.manual_seed(slot_seed(settings.seed, self.step, slot))
            for number, batch in enumerate(batches):
                last = slot == self.slots[-1] and number == len(batches) - 1
                done.append((batch.corpus, self._backward(batch, sync=last)))
            for _ in range(self._company(slot) - len(batches)):
                self._backward(batches[-1], sync=True, share=0.0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        bad = (self.first_bad_step < 0) & ~norm.isfinite()
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        average_state(self.model.language.model.router_state, self.processes)
        for name, parameter in self.model.named_parameters() if self.average else ():
            self.average[name].lerp_(parameter.detach(), 1 - settings.ema)
        self.step += 1
        return {"done": done, "norm": norm, "rate": rate}

    def _company(self, slot: int) -> int:
        """Passes every process makes in this turn: sharded, none can do without the others, though where corpora are
        added one may have two batches and another one."""
        first = slot - self.processes.rank
        turn = range(first, first + self.processes.count) if self.sharded else ()
        return max((self.schedule.passes(self.step, other) for other in turn), default=0)

    def _language_pass(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with self.autocast():
            result = self.forward(ids_BT, targets_BT, None, None)
        (result.loss / self.accumulation).backward()
        return result.loss.detach(), result.use_LK, result.gate, result.correct

    def _backward(self, batch: Batch, sync: bool, share: float = 1.0) -> TaskResult:
        """One micro-batch. With a share of 0 it is only there for the other processes."""
        self.tokens += batch.tokens if share else 0
        batch = batch.to(self.processes.device)
        head = self._head(batch.corpus)
        if self.graphs is not None and head is None:
            return TaskResult(*self.graphs(batch.ids, batch.targets))
        waits = sync or self.processes.count == 1 or self.sharded  # whole gradients would not fit where it shards
        with nullcontext() if waits else self.parallel.no_sync():  # type: ignore[operator]
            with self.autocast():
                result = self.forward(batch.ids, batch.targets, batch.mask, head)
            (share * result.loss / self.accumulation).backward()
        result.loss = result.loss.detach()
        return result

    def _head(self, corpus: int) -> str | None:
        return self.names[corpus] if self.corpora[corpus].kind == "classification" else None

    def autocast(self) -> Any:
        enabled = self.settings.precision == "bf16"
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=enabled)

    def summary(self, measured: dict[str, Any]) -> dict[str, Any]:
        """A step's measurements over all processes as plain numbers. This waits for the device."""
        table_C3 = torch.zeros(len(self.corpora), 3, device=self.processes.device, dtype=torch.float64)
        for corpus, result in measured["done"]:
            table_C3[corpus] += torch.stack([result.loss.double(), result.gate.double(), table_C3.new_ones(())])
        losses, gates, counts = self.processes.total(table_C3).T.tolist()
        use = self.processes.mean(torch.stack([result.use_LK for _, result in measured["done"]]).mean(0))
        present = [i for i, count in enumerate(counts) if count > 0]
        record: dict[str, Any] = {
            "step": self.step,
            "loss": sum(losses) / sum(counts),
            "rate": measured["rate"],
            "gradient_norm": float(measured["norm"]),
            "use": [[round(value, 6) for value in row] for row in use.tolist()],
        }
        if len(self.corpora) > 1:
            record["loss_by_corpus"] = {self.names[i]: losses[i] / counts[i] for i in present}
        if self.config.meta_router:
            record["gate"] = {self.names[i]: gates[i] / counts[i] for i in present}
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Validation loss of each corpus, and the accuracy of those with classes, on the same rows every time."""
        found: dict[str, dict[str, float]] = {"validation": {}}
        self.parallel.eval()
        with self.averaged(), uncompiled():
            for number, corpus in enumerate(self.corpora):
                rows = open_rows(corpus, "valid", self.settings.length)
                found["validation"][corpus.name], accuracy = self._evaluate_rows(rows, number)
                if isinstance(rows, ClassificationRows):
                    found.setdefault("accuracy", {})[corpus.name] = accuracy
            self.reshard()
        self.parallel.train()
        return found

    def _evaluate_rows(self, rows: Rows, number: int) -> tuple[float, float]:
        size, total = self.settings.micro_batch, torch.zeros(3, device=self.processes.device, dtype=torch.float64)
        wanted = rows.evaluated(self.settings.evaluate_rows)
        firsts = range(0, len(wanted), size)
        for turn in range(0, len(firsts), self.processes.count):
            mine = turn + self.processes.rank < len(firsts)  # a process without rows keeps the others company
            first = firsts[turn + self.processes.rank if mine else 0]
            batch = rows.batch(number, wanted[first : first + size]).to(self.processes.device)
            with self.autocast():
                result = self.model(batch.ids, batch.targets, batch.mask, self._head(number))
            if mine:
                count = len(batch.ids)
                total += torch.stack([result.loss.double() * count, result.correct.double(), total.new_tensor(count)])
        loss, correct, count = self.processes.total(total).tolist()
        return loss / count, correct / count

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The exponential average in place of the weights, where one is kept."""
        kept = {n: p.detach().clone() for n, p in self.model.named_parameters() if self.average}
        try:
            self._set_weights(self.average)
            yield
        finally:
            self._set_weights(kept)

    @torch.no_grad()
    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters() if weights else ():
            parameter.copy_(weights[name])

    @contextmanager
    def language(self) -> Iterator[Any]:
        """The language model, to be called by itself. Sharded, its first and last matrices are gathered meanwhile."""
        if self.sharded:
            self.model.unshard()  # type: ignore[operator]
        try:
            with uncompiled():
                yield self.model.language
        finally:
            self.reshard()

    def reshard(self) -> None:
        """Let go of what a forward pass without a backward one has gathered; it would be used again, outdated."""
        if self.sharded:
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

    def batch_tensors(self, step: int) -> dict[str, Tensor]:
        """Everything a step reads, by slot and corpus."""
        found: dict[str, Tensor] = {}
        for slot in range(self.schedule.slots):
            for batch in self.schedule.batches(step, slot):
                named = {"ids": batch.ids, "targets": batch.targets, "mask": batch.mask}
                name = f"slot{slot}.{self.names[batch.corpus]}"
                found |= {f"{name}.{part}": value for part, value in named.items() if value is not None}
        return found

    def tensors(self) -> dict[str, Tensor]:
        return checkpoint.state_tensors(self.model, self.optimizer, self.average)

    def state(self, metrics_bytes: int) -> dict[str, Any]:
        """The plain values of a checkpoint."""
        thresholds = self.model.language.config.thresholds
        return {"step": self.step, "best": self.best, "metrics_bytes": metrics_bytes, "thresholds": thresholds}

    def restore(self, found: checkpoint.Found) -> None:
        checkpoint.load(found.folder, self.tensors())
        self.step, self.best = found.state["step"], found.state["best"]
        self.model.language.model.set_thresholds(found.state["thresholds"])
