"""The state of a run and one step of it: the same code for one process and for many."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chiar.config import ChiarConfig
from chiar.routing.calibration import calibrate
from chiar.training import checkpoint
from chiar.training.batches import Batch, ClassificationRows, LanguageRows, Rows, Schedule, slot_seed
from chiar.training.compiling import Forward, miscompiled, uncompiled
from chiar.training.distributed import Processes, average_state, replicate, shard
from chiar.training.graphs import GraphedPasses
from chiar.training.optim import learning_rate, make_optimizer, set_learning_rate
from chiar.training.prefetch import Prefetch
from chiar.training.settings import TrainSettings
from chiar.training.tasks import TaskModel, TaskResult
from chiar.training.weights import materialise, outline, whole


def open_rows(corpus: Any, split: str, length: int) -> Rows:
    kind = ClassificationRows if corpus.kind == "classification" else LanguageRows
    return kind(corpus.split(split), length)


class Validation(NamedTuple):
    """By corpus; accuracies of classification corpora only."""

    losses: dict[str, float]
    accuracies: dict[str, float]


class Trainer:
    """Model, optimiser and data of a run. `step` counts finished optimiser steps."""

    def __init__(self, config: ChiarConfig, settings: TrainSettings, corpora: list[Any], processes: Processes) -> None:
        self.config, self.settings, self.corpora, self.processes = config, settings, corpora, processes
        self.names = [corpus.name for corpus in corpora]
        self.rows = [open_rows(corpus, "train", settings.length) for corpus in corpora]
        self.schedule = Schedule(settings, self.rows)
        self.accumulation = settings.accumulation(processes.count)
        labels = {c.name: len(c.labels) for c in corpora if c.kind == "classification"}
        self.model = outline(config, labels)
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
        """Real tokens this process has read since the loop last looked."""
        self.best: dict[str, float] | None = None
        self.first_bad_step = torch.full((), -1, device=processes.device)
        """The first step whose gradient was not finite; kept on the device so that no step waits for it."""
        self.parallel = self.model if self.sharded else replicate(self.model, processes)
        by_layers = self.sharded or settings.compile_layers
        parts = list(self.model.language.model.layers) if by_layers else None
        obstacle = miscompiled(config, processes.device, settings.precision)
        self.forward = Forward(self.parallel, settings.compile, parts, company=self.sharded, obstacle=obstacle)
        self.graphs: GraphedPasses | None = None
        if self._may_be_recorded():
            self.graphs = GraphedPasses(self._language_pass, self.model.parameters())
        self.slots = [turn * processes.count + processes.rank for turn in range(self.accumulation)]
        self.prefetch = Prefetch(self.schedule, self.slots, processes.device)

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
        set_learning_rate(self.optimizer, rate)
        self.parallel.train()
        self.model.language.model.set_progress(self.step / settings.steps)
        losses: dict[int, list[Tensor]] = {}
        gates: dict[int, list[Tensor]] = {}
        use: list[Tensor] = []
        for slot, batches in zip(self.slots, self.prefetch.batches(self.step), strict=True):
            torch.manual_seed(slot_seed(settings.seed, self.step, slot))
            for number, batch in enumerate(batches):
                last = slot == self.slots[-1] and number == len(batches) - 1
                result = self._backward(batch, sync=last)
                losses.setdefault(batch.corpus, []).append(result.loss.detach())
                if self.config.meta_router:
                    gates.setdefault(batch.corpus, []).append(result.gate)
                use.append(result.use_LK)
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
        return {"losses": losses, "gates": gates, "use": torch.stack(use).mean(0), "norm": norm, "rate": rate}

    def _company(self, slot: int) -> int:
        """Passes every process makes in this turn: sharded, none can do without the others, though where corpora are
        added one may have two batches and another one."""
        if not self.sharded:
            return 0
        first = slot - self.processes.rank
        return max(self.schedule.passes(self.step, first + rank) for rank in range(self.processes.count))

    def _may_be_recorded(self) -> bool:
        """Whether passes can be CUDA graphs: one process, whose kernels nobody waits for."""
        settings, alone = self.settings, self.processes.count == 1 and not self.sharded
        return settings.cuda_graphs and not settings.deterministic and alone and self.processes.device.type == "cuda"

    def _language_pass(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with self.autocast():
            result = self.forward(ids_BT, targets_BT, None, None)
        (result.loss / self.accumulation).backward()
        return result.loss.detach(), result.use_LK, result.gate, result.correct

    def _backward(self, batch: Batch, sync: bool, share: float = 1.0) -> Any:
        """One micro-batch. With a share of 0 it is only there for the other processes."""
        self.tokens += batch.tokens if share else 0
        batch = batch.to(self.processes.device)
        head = self.names[batch.corpus] if isinstance(self.rows[batch.corpus], ClassificationRows) else None
        if self.graphs is not None and head is None and batch.mask is None:
            return TaskResult(*self.graphs(batch.ids, batch.targets))
        waits = sync or self.processes.count == 1 or self.sharded  # whole gradients would not fit where it shards
        with nullcontext() if waits else self.parallel.no_sync():  # type: ignore[operator]
            with self.autocast():
                result = self.forward(batch.ids, batch.targets, batch.mask, head)
            (share * result.loss / self.accumulation).backward()
        return result

    def autocast(self) -> Any:
        enabled = self.settings.precision == "bf16"
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=enabled)

    def summary(self, measured: dict[str, Any]) -> dict[str, Any]:
        """A step's measurements over all processes as plain numbers. This waits for the device."""
        device, count = self.processes.device, len(self.corpora)
        table = torch.zeros(count, 4, device=device, dtype=torch.float64)
        for column, values in ((0, measured["losses"]), (2, measured["gates"])):
            for corpus, tensors in values.items():
                table[corpus, column] = torch.stack(tensors).double().sum()
                table[corpus, column + 1] = len(tensors)
        table = self.processes.total(table)
        use = self.processes.mean(measured["use"].clone())
        present = [i for i in range(count) if table[i, 1] > 0]
        record: dict[str, Any] = {
            "step": self.step,
            "loss": float(table[:, 0].sum() / table[:, 1].sum()),
            "rate": measured["rate"],
            "gradient_norm": float(measured["norm"]),
            "use": [[round(value, 6) for value in row] for row in use.tolist()],
        }
        if count > 1:
            record["loss_by_corpus"] = {self.names[i]: float(table[i, 0] / table[i, 1]) for i in present}
        if measured["gates"]:
            record["gate"] = {self.names[i]: float(table[i, 2] / table[i, 3]) for i in present}
        return record

    def take_tokens(self) -> int:
        """Real tokens all processes have read since the last call."""
        taken, self.tokens = torch.tensor(self.tokens, device=self.processes.device), 0
        return int(self.processes.total(taken))

    @torch.no_grad()
    def evaluate(self) -> Validation:
        """Validation loss of each corpus, and the accuracy where it has classes, on the same rows every time."""
        self.parallel.eval()
        found = Validation({}, {})
        with self.averaged(), uncompiled():
            for number, corpus in enumerate(self.corpora):
                rows = open_rows(corpus, "valid", self.settings.length)
                found.losses[corpus.name], accuracy = self._evaluate_rows(rows, number)
                if isinstance(rows, ClassificationRows):
                    found.accuracies[corpus.name] = accuracy
            self.reshard()
        self.parallel.train()
        return found

    def _evaluate_rows(self, rows: Rows, number: int) -> tuple[float, float]:
        size, total = self.settings.micro_batch, torch.zeros(3, device=self.processes.device, dtype=torch.float64)
        wanted = rows.evaluated(self.settings.evaluate_rows)
        head = self.names[number] if isinstance(rows, ClassificationRows) else None
        firsts = range(0, len(wanted), size)
        for turn in range(0, len(firsts), self.processes.count):
            mine = turn + self.processes.rank < len(firsts)  # a process without rows keeps the others company
            first = firsts[turn + self.processes.rank if mine else 0]
            batch = rows.batch(number, wanted[first : first + size]).to(self.processes.device)
            with self.autocast():
                result = self.model(batch.ids, batch.targets, batch.mask, head)
            if mine:
                total[0] += result.loss.double() * len(batch.ids)
                total[1] += result.correct
                total[2] += len(batch.ids)
        total = self.processes.total(total)
        return float(total[0] / total[2]), float(total[1] / total[2])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The exponential average in place of the weights, where one is kept."""
        kept = [(p, p.detach().clone(), self.average[n]) for n, p in self.model.named_parameters() if self.average]
        with torch.no_grad():
            for parameter, _, average in kept:
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own, _ in kept:
                    parameter.copy_(own)

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

    def whole(self) -> TaskModel | None:
        """The main process gets the model in one piece on the CPU, averaged where an average is kept; all take part."""
        with self.averaged():
            return whole(self.model, wanted=self.processes.main)

    def recalibrate(self) -> list:
        """Per-layer thresholds from rows of the step just done, the same in every process."""
        slots = range(min(self.schedule.slots, 4))
        batches = [self.schedule.batches(self.step - 1, slot)[0] for slot in slots]
        texts = [batch for batch in batches if batch.mask is None] or batches
        stream = [
            {"input_ids": batch.ids} | ({} if batch.mask is None else {"attention_mask": batch.mask}) for batch in texts
        ]
        with self.language() as language:
            found = calibrate(language, stream)
        thresholds = found.thresholds(len(self.config.routed_layers))
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
