"""A model over a prepared corpus: losses of running text or classes of documents, where tokens went, as one report."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus, Split
from chiar.errors import InputError, unknown_name
from chiar.evaluation.report import ClassScores, EvaluationReport, LanguageScores, LayerUse, RoutingUse
from chiar.model.heads import open_classifier
from chiar.model.load import check_tokenizer, choose_device, describe_device, load_config, load_model, resolve_model
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification
from chiar.model.trace import RoutingTrace
from chiar.routing.flops import Shares, baseline_of, count_flops, operator_shares

LOGIT_ROWS = 1024  # logits of a whole batch over GPT-2's vocabulary would take gigabytes
COUNTED_AT_ONCE = 1 << 22
PRECISIONS = ("fp32", "bf16")
Progress = Callable[[int, int], None]
"""Told how many rows were done now, and how many there are."""


@dataclass(frozen=True)
class Reading:
    """How a split is read: in blocks of `length`, or windows of it that slide by `stride`; `rows` limits how many."""

    length: int
    stride: int | None = None
    rows: int | None = None
    batch_size: int = 16
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("length", "stride", "rows", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"the {name.replace('_', ' ')} must be at least 1, got {value}.")
        if (self.stride or 0) > self.length:
            raise InputError(f"the stride must lie between 1 and the length {self.length}, got {self.stride}.")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)


def evaluate(
    model: str,
    data: Path | str,
    split: str | None = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    rows: int | None = None,
    batch_size: int = 16,
    precision: str = "fp32",
    device: str = "auto",
    progress: Progress = lambda done, total: None,
) -> EvaluationReport:
    """Perplexity on a language corpus, accuracy on a classification corpus.

    `model` is a model folder, a training run (its best model is taken) or a preset. `split` is test by default, or
    valid with a remark where a corpus has no test split (GLUE's are without labels); `length` is the trained one.
    """
    target = choose_device(device)
    folder, run = resolve_model(model)
    corpus, config = Corpus.open(data), load_config(folder)
    reading = Reading(checked_length(config, length), stride, rows, batch_size, precision)
    remarks = check_tokenizer(folder, config, corpus)
    if split is None:
        split = "test" if "test" in corpus.splits or "valid" not in corpus.splits else "valid"
        if split == "valid":
            remarks.append(f"{corpus.name} has no test split: measured on valid, by which training chooses its best.")
    opened, classifies = corpus.split(split), corpus.kind == ClassScores.kind
    scores: LanguageScores | ClassScores
    if classifies:
        if stride is not None:
            raise InputError(f"--stride is for language corpora, and {data} is a classification corpus.")
        classifier = open_classifier(folder, corpus).to(target)
        scores, routing, seen = measure_classification(classifier, corpus, opened, reading, progress)
        remarks += compare_classes(classifier.config, corpus)
    else:
        scores, routing = measure_perplexity(load_model(folder)[0].to(target), corpus, opened, reading, progress)
        seen = min(reading.length, opened.tokens - 1)
    counts = count_flops(config, seen, measured_shares(config, routing)), count_flops(baseline_of(config), seen)
    # A classifier has no logits over the vocabulary.
    flops, baseline_flops = (count.total - (count.part("logits") if classifies else 0.0) for count in counts)
    return EvaluationReport(
        model=folder,
        run=run,
        corpus=corpus.name,
        fingerprint=corpus.fingerprint,
        split=split,
        device=describe_device(target),
        scores=scores,
        routing=routing,
        flops=flops,
        baseline_flops=baseline_flops,
        flops_length=seen,
        remarks=[*corpus.remarks, *remarks, *explain(config, reading)],
        **asdict(reading),
    )


def checked_length(config: ChiarConfig, length: int | None) -> int:
    """The trained length by default, and no more than there are learned positions."""
    trained = config.max_position_embeddings
    if length is not None and length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions, so --length can be {trained} at most: {length}.")
    return trained if length is None else length


def compare_classes(config: ChiarConfig, corpus: Corpus) -> list[str]:
    """A remark where the classifier names its classes otherwise than the corpus, as after training on another one."""
    names = [config.id2label[number] for number in range(config.num_labels)]
    if names in ([f"LABEL_{number}" for number in range(config.num_labels)], corpus.labels):
        return []
    return [f"classes are compared by number: the model's {', '.join(names)} with {', '.join(corpus.labels)}."]


def measured_shares(config: ChiarConfig, routing: RoutingUse) -> Shares:
    """What each operator got. Soft routing runs all of them; measured is then where a token weighs most."""
    return operator_shares(config) if config.routing == "soft" else [layer.use for layer in routing.layers]


def explain(config: ChiarConfig, reading: Reading) -> list[str]:
    """What a reader must know to read the figures rightly."""
    pool, trained = config.gate_pool if config.meta_router else "causal", config.max_position_embeddings
    over, on = "the whole row", "how the text is cut into rows"
    if pool == "batch":
        over, on = f"all {reading.batch_size} rows evaluated together", "the batch size"
    again = reading.length / (reading.stride or reading.length)
    remarks = {
        f"gate_pool {pool!r}: g is a mean over {over}, later tokens included, so the figures depend on {on} and are "
        "not those of a causal model.": pool != "causal",
        "soft routing runs every operator on every token: f counts the tokens attention weighs most in.": (
            config.routed_layers and config.routing == "soft"
        ),
        f"longer than the {trained} tokens the model was trained on.": reading.length > trained,
        f"counted FLOPs are those of a token of a window; with stride {reading.stride} each token is computed "
        f"{again:.3g} times.": again > 1,
        f"only {reading.rows} rows of the split were read.": reading.rows is not None,
    }
    return [remark for remark, holds in remarks.items() if holds]


class Tally:
    """Losses and routes added up over batches, on the model's device: reading them would wait for each batch."""

    def __init__(self, model: ChiarForCausalLM | ChiarForSequenceClassification) -> None:
        self.config, self.operators = model.config, model.config.operators or []
        self.loss = torch.zeros((), dtype=torch.float64, device=model.device)
        self.gate, self.tokens = torch.zeros_like(self.loss), torch.zeros_like(self.loss, dtype=torch.int64)
        self.counts_LK = self.tokens.new_zeros(len(self.config.routed_layers), len(self.operators))

    def add_losses(self, logits_NC: Tensor, targets_N: Tensor) -> None:
        self.loss += F.cross_entropy(logits_NC.float(), targets_N, reduction="none").double().sum()

    def add_routes(self, trace: RoutingTrace, counted_BT: Tensor) -> None:
        self.tokens += counted_BT.sum()
        for counts_K, layer in zip(self.counts_LK, self.config.routed_layers, strict=True):
            counts_K += torch.bincount(trace.layers[layer].choice_BT[counted_BT], minlength=len(counts_K))
        if (gate_BT := trace.layers[0].gate_BT) is not None:
            self.gate += gate_BT[counted_BT].double().sum()

    def mean_loss(self, count: int) -> float:
        if not math.isfinite(float(self.loss)):
            raise InputError("the loss is not finite: the model's weights are damaged or its training diverged.")
        return float(self.loss) / count

    def use(self) -> RoutingUse:
        rows = zip(self.config.routed_layers, (self.counts_LK.double() / self.tokens).tolist(), strict=True)
        layers = [LayerUse(layer, dict(zip(self.operators, shares, strict=True))) for layer, shares in rows]
        gate = (float(self.gate / self.tokens), self.config.gate_pool) if self.config.meta_router else (None, None)
        return RoutingUse(layers, *gate)


@contextmanager
def evaluating(model: torch.nn.Module, device: torch.device, precision: str) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        model.train(training)


def window_batches(targets: int, reading: Reading) -> tuple[list[range], int]:
    """Where the windows that predict `targets` ids start, in batches, and how many there are.

    Every id is new in one window: all but the first know length − stride of theirs from before. Only the last may be
    shorter; it is a batch of its own and needs no padding.
    """
    length, stride, size = reading.length, reading.stride or reading.length, reading.batch_size
    starts = range(0, max(0, targets - length) + stride, stride)[: reading.rows]
    whole = len(starts) - (starts[-1] + length > targets)
    batches = [starts[first : min(first + size, whole)] for first in range(0, whole, size)]
    return batches + ([starts[whole:]] if whole < len(starts) else []), len(starts)


def measure_perplexity(
    model: ChiarForCausalLM,
    corpus: Corpus,
    split: Split,
    reading: Reading,
    progress: Progress = lambda done, total: None,
) -> tuple[LanguageScores, RoutingUse]:
    """Routing is counted over the tokens that were predicted from; where rows are limited, the text behind word and
    byte figures is that of the tokens predicted."""
    if split.tokens < 2:
        raise InputError(f"split {split.name!r} has {split.tokens} token: there is nothing to predict.")
    device, targets, tokens, tally = model.device, split.tokens - 1, 0, Tally(model)
    known = reading.length - (reading.stride or reading.length)
    batches, total = window_batches(targets, reading)
    with evaluating(model, device, reading.precision):
        for starts in batches:
            T = min(reading.length, targets - starts[0])
            known_B = torch.tensor([known if start else 0 for start in starts], device=device)
            new_BT = torch.arange(T, device=device) >= known_B[:, None]
            read = torch.from_numpy(split.rows(np.array(starts), T + 1)).to(device)
            decoded = model.model(read[:, :-1], output_routing=True)
            states_ND, targets_N = decoded.last_hidden_state[new_BT], read[:, 1:][new_BT]
            for states_nD, targets_n in zip(states_ND.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
                tally.add_losses(model.lm_head(states_nD), targets_n)
            tally.add_routes(decoded.routing, new_BT)
            tokens += len(targets_N)
            progress(len(starts), total)
    loss, entropy = tally.mean_loss(tokens), unigram_entropy(split, corpus.vocab_size, tokens)
    return LanguageScores(tokens, loss, *count_text(corpus, split, tokens), entropy), tally.use()


def count_text(corpus: Corpus, split: Split, tokens: int) -> tuple[int, int, int]:
    """Words, lines and bytes of the whole split, or of the text its first `tokens` targets stand for."""
    if tokens == split.tokens - 1:
        return split.words, split.lines, split.bytes
    tokenizer, ids = corpus.tokenizer(), split.read(1, tokens)
    documents = [tokenizer.decode_bytes(part) for part in np.split(ids, np.flatnonzero(ids == corpus.end_of_text))]
    texts = [document.decode("utf-8", "replace") for document in documents]
    words, lines = sum(len(text.split()) for text in texts), sum(text.count("\n") for text in texts)
    return words, lines, sum(map(len, documents))


def unigram_entropy(split: Split, vocab_size: int, targets: int | None = None) -> float:
    """−Σ p ln p in nats, p the unsmoothed frequencies of the split's own first `targets` targets (all but its first
    token): the least loss of a model without context, which would have to know these frequencies beforehand."""
    stop = split.tokens if targets is None else 1 + targets
    counts = np.zeros(vocab_size, np.int64)
    for first in range(1, stop, COUNTED_AT_ONCE):
        counts += np.bincount(split.read(first, min(COUNTED_AT_ONCE, stop - first)), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def choose_documents(split: Split, rows: int | None) -> list[int]:
    """All of them, or `rows` spread over the split: files are often sorted by label."""
    count = min(rows or split.documents, split.documents)
    return [row * split.documents // count for row in range(count)]


def measure_classification(
    model: ChiarForSequenceClassification,
    corpus: Corpus,
    split: Split,
    reading: Reading,
    progress: Progress = lambda done, total: None,
) -> tuple[ClassScores, RoutingUse, int]:
    """Scores, routing over real tokens, and the length a token sees on average. Documents are cut to `length` tokens
    and padded on the right, in batches of similar length: the order of the split plays no part."""
    labels, classes, device, tally = split.labels, len(corpus.labels), model.device, Tally(model)
    if labels is None:
        raise InputError(f"{corpus.folder} is a {corpus.kind} corpus: it has no labels to compare with.")
    if model.config.num_labels != classes:
        raise InputError(f"the model knows {model.config.num_labels} classes, but {corpus.folder} has {classes}.")
    chosen = np.array(choose_documents(split, reading.rows))
    whole = np.diff(split.offsets).astype(np.int64)[chosen]
    if not whole.all():
        raise InputError(f"document {chosen[whole == 0][0]} of split {split.name!r} is empty.")
    sizes = np.minimum(whole, reading.length)
    order = np.argsort(sizes, kind="stable")
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    with evaluating(model, device, reading.precision):
        for batch in np.split(order, range(reading.batch_size, len(order), reading.batch_size)):
            cut = [split.document(index)[: reading.length].astype(np.int64) for index in chosen[batch].tolist()]
            ids_BT = pad_sequence([*map(torch.from_numpy, cut)], batch_first=True, padding_value=corpus.end_of_text)
            real_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(sizes[batch])[:, None]
            labels_B = torch.from_numpy(labels[chosen[batch]].astype(np.int64))
            ids_BT, real_BT, labels_B = ids_BT.to(device), real_BT.to(device), labels_B.to(device)
            output = model(ids_BT, attention_mask=real_BT.long(), output_routing=True)
            tally.add_losses(output.logits, labels_B)
            tally.add_routes(output.routing, real_BT)
            confusion.index_put_((labels_B, output.logits.argmax(-1)), confusion.new_ones(()), accumulate=True)
            progress(len(batch), len(order))
    tokens, loss = int(sizes.sum()), tally.mean_loss(len(order))
    longer = int((whole > reading.length).sum())
    scores = ClassScores(len(order), tokens, longer, loss, list(corpus.labels), confusion.tolist())
    # FLOPs per token are linear in the length, so this one stands for all documents.
    return scores, tally.use(), round(int((sizes**2).sum()) / tokens)
