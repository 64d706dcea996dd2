"""Batches as a pure function of (seed, step, slot), and one model for all tasks of a run. A step has
batch / micro_batch slots; slot k belongs to process k mod W, so the rows of a step are the same for any number W."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.errors import require
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.layers.routers import mean_over_tokens, one_hot
from chiar.model.load import open_weights
from chiar.model.modeling import ChiarForCausalLM, pool_states
from chiar.training.distributed import local_rows
from chiar.training.settings import TrainSettings


@lru_cache(maxsize=8)
def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def seed_of(*parts: int) -> int:
    """A 63-bit seed: for dropout of (seed, step, slot), whichever process runs it; for the weights of one module."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Batch(NamedTuple):
    """One micro-batch. Language: `targets` (B, T) are the next tokens. Classification: `targets` (B,) are classes."""

    corpus: int
    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        mask = None if self.mask is None else change(self.mask)
        return Batch(self.corpus, change(self.ids), change(self.targets), mask)

    def to(self, device: torch.device) -> "Batch":
        return self.each(lambda value: value.to(device, non_blocking=True))


class Rows:
    """Blocks of `length` tokens and the next token of each; or labelled documents, truncated to `length` and padded."""

    def __init__(self, corpus: Corpus, split: str, length: int) -> None:
        self.split, self.length, self.labelled = corpus.split(split), length, corpus.kind == "classification"
        self.count = self.split.documents if self.labelled else (self.split.tokens - 1) // length
        few = f"{corpus.folder} has {self.split.tokens} tokens in {split}: too few for one row of {length}"
        require(self.count > 0, f"{few}: take a smaller --length or more text.")

    def truncated(self) -> int:
        """How many labelled documents are longer than `length`."""
        return int((np.diff(self.split.offsets) > self.length).sum()) if self.labelled else 0

    def evaluated(self, limit: int) -> list[int]:
        return self.split.choose(limit or None) if self.labelled else [*range(self.count)[: limit or None]]

    def batch(self, corpus: int, rows: list[int]) -> Batch:
        if not self.labelled:
            ids = torch.from_numpy(self.split.rows(np.array(rows) * self.length, self.length + 1))
            return Batch(corpus, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        assert self.split.labels is not None
        documents = [torch.from_numpy(self.split.document(row)[: self.length].astype(np.int64)) for row in rows]
        ids = pad_sequence(documents, batch_first=True)
        mask = pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
        return Batch(corpus, ids, torch.from_numpy(self.split.labels[rows].astype(np.int64)), mask)


class Schedule:
    """Which corpora each slot of each step reads, and which of their rows. Each row is read once per epoch, in an order
    shuffled anew. The s-th slot of a run uses the s-th draws of a fixed stream, so a longer run begins like a shorter.
    """

    def __init__(self, settings: TrainSettings, corpora: list[Rows]) -> None:
        self.settings, self.corpora = settings, corpora
        self.slots = settings.batch // settings.micro_batch
        total, count = settings.steps * self.slots, len(corpora)
        draws = np.random.Generator(np.random.Philox(key=[settings.seed, 1 << 40])).random((total, 2))
        self.uses = np.zeros((total, count), dtype=bool)
        first = int(settings.mixing == "added" and count > 1)
        weights = np.array(settings.weights or [1.0] * count, dtype=np.float64)[first:]
        edges = np.cumsum(weights / weights.sum())
        drawn = first + np.minimum(np.searchsorted(edges, draws[:, 0], side="right"), count - first - 1)
        used = draws[:, 1] < settings.added_share if first else np.ones(total, dtype=bool)
        self.uses[np.flatnonzero(used), drawn[used]] = True
        self.uses[:, :first] = True
        self.before = np.cumsum(self.uses, axis=0) - self.uses

    def batches(self, step: int, slot: int) -> list[Batch]:
        """The micro-batches of one slot: one, or two where another corpus is added."""
        index, size, batches = step * self.slots + slot, self.settings.micro_batch, []
        for corpus in np.flatnonzero(self.uses[index]).tolist():
            rows, first = self.corpora[corpus], int(self.before[index, corpus]) * size
            seed, turns = self.settings.seed * 1_000_003 + corpus, range(first, first + size)
            numbers = [int(shuffled(seed, turn // rows.count, rows.count)[turn % rows.count]) for turn in turns]
            batches.append(rows.batch(corpus, numbers))
        return batches


def read_ahead(schedule: Schedule, slots: range, first: int, device: torch.device) -> Iterator[list[list[Batch]]]:
    """The micro-batches of these slots from step `first` on, each step's prefetched while the device works."""
    pins = device.type == "cuda"

    def make(step: int) -> list[list[Batch]]:
        made = [schedule.batches(step, slot) for slot in slots]
        # Copies from pinned memory to a GPU are asynchronous.
        return [[batch.each(Tensor.pin_memory) for batch in batches] for batches in made] if pins else made

    # Each thread has its own current GPU.
    with ThreadPoolExecutor(1, "batches", *((torch.cuda.set_device, (device,)) if pins else ())) as thread:
        coming = thread.submit(make, first)
        for step in range(first + 1, schedule.settings.steps):
            ready, coming = coming.result(), thread.submit(make, step)
            yield ready
        yield coming.result()


class TaskResult(NamedTuple):
    """The loss of one micro-batch, and how its tokens were routed."""

    loss: Tensor
    use_LK: Tensor  # fraction of tokens each operator of each routed layer got
    gate: Tensor  # mean g (0 without a MetaRouter)
    correct: Tensor  # number of correctly classified rows (0 for language)
    dropped: Tensor  # share of dark tokens for which a stack had no room


class TaskModel(nn.Module):
    """A language model, and a head for each labelled corpus, like the `score` of ChiarForSequenceClassification."""

    def __init__(self, config: ChiarConfig, labels: dict[str, int]) -> None:
        super().__init__()
        self.labels = labels  # classes by corpus
        self.language = ChiarForCausalLM(config)
        self.heads = nn.ModuleDict({name: nn.Linear(config.hidden_size, count) for name, count in labels.items()})

    def forward(self, ids_BT: Tensor, targets: Tensor, mask_BT: Tensor | None, head: str | None) -> TaskResult:
        decoded = self.language.model(ids_BT, attention_mask=mask_BT, output_routes=True)
        states_BTD, config = decoded.last_hidden_state, self.language.config
        correct = states_BTD.new_zeros(())
        if head is None:
            loss = linear_cross_entropy(states_BTD.flatten(0, 1), self.language.lm_head.weight, targets.flatten())
            if self.training and self.language.model.stacks:
                early = self.language.model.early_loss(decoded, targets, self.language.lm_head)
                loss = loss + (early - early.detach())  # with its gradient, but the loss reported is the model's alone
        else:
            logits_BC = self.heads[head](pool_states(states_BTD, mask_BT, config.classifier_pool))
            loss = F.cross_entropy(logits_BC.float(), targets)
            correct = (logits_BC.detach().argmax(-1) == targets).sum()
        if self.training and decoded.routing_loss is not None:
            loss = loss + decoded.routing_loss
        real_BT = None if mask_BT is None else mask_BT.bool()
        use = [mean_over_tokens(one_hot(route.choice_BT, len(config.operators)), real_BT) for route in decoded.routes]
        use_LK = torch.stack(use) if use else loss.new_zeros(0, len(config.operators))
        g_BT1 = decoded.gate_BT1
        gate = loss.new_zeros(()) if g_BT1 is None else mean_over_tokens(g_BT1.detach(), real_BT)[0]
        dropped = loss.new_zeros(())
        if stacks := decoded.stacks:
            dark = torch.stack([stack.dark_BT.sum() for stack in stacks]).sum()
            dropped = torch.stack([stack.dropped for stack in stacks]).sum() / dark.clamp_min(1)
        # Zero times the parameters this task does not use, so that every process reduces every gradient.
        unused = [p for name, module in self.heads.items() if name != head for p in module.parameters()]
        if head is not None and not config.tie_word_embeddings:
            unused += list(self.language.lm_head.parameters())
        if head is not None or config.early_weight == 0:  # early heads, and norms that forecasts alone read
            unused += list(self.language.model.stacks.parameters())
        if unused:
            loss = loss + 0.0 * sum((p.sum() for p in unused), loss.new_zeros(()))
        return TaskResult(loss, use_LK, gate, correct, dropped)


def outline(config: ChiarConfig, labels: dict[str, int]) -> TaskModel:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return TaskModel(config, labels)


@torch.no_grad()
def materialise(model: TaskModel, seed: int, device: torch.device | str = "cpu", initial: str = "") -> TaskModel:
    """Allocate an outline and initialise it from `seed`, the same whether whole or sharded: each module is drawn on the
    CPU with a seed of its own. With `initial`, a model folder, the language model gets that model's weights instead."""
    model.to_empty(device=device)
    model.language.tie_weights()
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    options = {"config": model.language.config, "dtype": torch.float32}
    stored = open_weights(ChiarForCausalLM, initial, **options).state_dict() if initial else {}
    source, seen = outline(model.language.config, model.labels), set[int]()
    saved = set(source.state_dict())
    for prefix, module in source.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        fresh = [name for name, value in own if f"{prefix}.{name}" in saved and id(value) not in seen]
        seen.update(id(value) for _, value in own)
        if not fresh:
            continue
        module.to_empty(device="cpu", recurse=False)
        torch.manual_seed(seed_of(seed, *prefix.encode()))
        source.language._init_weights(module)
        for name in fresh:
            start, rows = local_rows(targets[f"{prefix}.{name}"])
            value = stored.get(f"{prefix}.{name}".removeprefix("language."), getattr(module, name))
            rows.copy_(value[start : start + len(rows)] if value.ndim else value)
        module.to_empty(device="meta", recurse=False)
    return model


def whole(model: TaskModel, wanted: bool) -> TaskModel | None:
    """An unsharded copy on the CPU where `wanted`, else None. All processes must call it, to gather the tensors."""
    state = {}
    for name, value in model.state_dict().items():
        complete = value.full_tensor() if isinstance(value, DTensor) else value
        if wanted:
            state[name] = complete.cpu()
    if not wanted:
        return None
    copy = outline(model.language.config, model.labels).to_empty(device="cpu")
    copy.language.tie_weights()
    copy.load_state_dict(state)
    return copy
