"""Measures a model on a prepared corpus: losses of running text or classes of documents, and routing, as one report."""

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus, Split
from chiar.data.tokenizers import check_tokenizer
from chiar.errors import InputError, require, unknown_name
from chiar.evaluation.report import (
    ClassScores,
    EvaluationReport,
    LanguageScores,
    LayerUse,
    RoutingUse,
    training_data,
)
from chiar.model.heads import open_classifier
from chiar.model.load import choose_device, describe_device, load_config, load_model, resolve_model
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification
from chiar.model.trace import RoutingTrace
from chiar.routing.flops import Shares, baseline_of, count_flops, operator_shares

LOGIT_ROWS = 1024  # rows of logits at a time: those of a batch over GPT-2's vocabulary take gigabytes
COUNTED_AT_ONCE = 1 << 22
Measured = tuple[LanguageScores | ClassScores, RoutingUse, int]
with_bar = partial(track, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@dataclass(frozen=True)
class Reading:
    """At most `rows` blocks of `length`, sliding windows with `stride` new tokens each, or documents cut to length."""

    length: int
    stride: int | None = None
    rows: int | None = None
    batch_size: int = 16
    precision: str = "fp32"

    @classmethod
    def of(cls, config: ChiarConfig, length: int | None = None, **how: Any) -> "Reading":
        """The length defaults to the trained one, and is limited by learned positions."""
        trained = config.max_position_embeddings
        reading = cls(length or trained, **how)
        if reading.length > trained and config.positions == "learned":
            raise InputError(f"the model has {trained} learned positions: --length {length} is too long.")
        if reading.stride is not None and not 1 <= reading.stride <= reading.length:
            raise InputError(f"the stride must lie between 1 and the length {reading.length}, got {reading.stride}.")
        if reading.precision not in ("fp32", "bf16"):
            raise unknown_name("precision", reading.precision, ("fp32", "bf16"))
        return reading


def evaluate(
    model: str, data: Path | str, split: str = "valid", *, device: str = "auto", **how: Any
) -> EvaluationReport:
    """Perplexity or accuracy of a model folder, a training run (its best model is taken) or a preset; `how` has
    fields of `Reading`."""
    target, (folder, run) = choose_device(device), resolve_model(model)
    corpus, config = Corpus.open(data), load_config(folder)
    reading = Reading.of(config, **how)
    remarks = [*corpus.remarks, *check_tokenizer(folder, config, corpus)]
    if split == "valid" and corpus.fingerprint in training_data(Path(folder).parent):
        other = "--split test is unseen" if "test" in corpus.splits else f"{corpus.name} has no test split"
        remarks.append(f"measured on valid, on which training chose its best model: {other}.")
    opened, classifies = corpus.split(split), corpus.kind == ClassScores.kind
    if classifies and reading.stride is not None:
        raise InputError(f"--stride is for language corpora, and {data} is a classification corpus.")
    opened_model = (open_classifier(folder, corpus) if classifies else load_model(folder)[0]).to(target).eval()
    measure = measure_classification if classifies else measure_perplexity
    with torch.autocast(target.type, torch.bfloat16, enabled=reading.precision == "bf16"):
        scores, routing, seen = measure(opened_model, corpus, opened, reading)
    counts = count_flops(config, seen, measured_shares(config, routing)), count_flops(baseline_of(config), seen)
    # A classifier has no logits over the vocabulary.
    flops, baseline = (count.total - (count.part("logits") if classifies else 0.0) for count in counts)
    report: dict[str, Any] = asdict(reading) | {"device": describe_device(target)}
    report |= {"flops": flops, "baseline_flops": baseline, "flops_length": seen, "scores": scores, "routing": routing}
    if not classifies and seen < reading.length:
        remarks.append(f"the split has only {seen} tokens to predict: rows are no longer than that.")
    remarks += explain(opened_model.config, corpus, reading)
    return EvaluationReport(folder, run, corpus.name, corpus.fingerprint, split, remarks=remarks, **report)


def measured_shares(config: ChiarConfig, routing: RoutingUse) -> Shares:
    """The share of tokens each operator ran on: all under soft routing, where `routing` counts largest weights."""
    return operator_shares(config) if config.routing == "soft" else [layer.use for layer in routing.layers]


def explain(config: ChiarConfig, corpus: Corpus, reading: Reading) -> list[str]:
    """Remarks without which the figures would be misread."""
    pool, trained = config.gate_pool if config.meta_router else "causal", config.max_position_embeddings
    over = f"all {reading.batch_size} rows of a batch" if pool == "batch" else "the whole row"
    names, numbers = [*config.id2label.values()], [f"LABEL_{number}" for number in range(config.num_labels)]
    times = reading.length / (reading.stride or reading.length)
    others = corpus.kind == ClassScores.kind and names not in (numbers, corpus.labels)
    remarks = {
        f"gate_pool {pool!r}: g is a mean over {over}, later tokens too: not causal.": pool != "causal",
        "soft routing runs every operator; f counts the tokens that weigh attention most.": config.routing == "soft",
        f"longer than the {trained} tokens the model was trained on.": reading.length > trained,
        f"FLOPs are per token of a window; sliding windows compute each {times:.3g} times.": times > 1,
        f"only {reading.rows} rows of the split were read.": reading.rows is not None,
        f"classes are compared by number: the model's {', '.join(names)} with {', '.join(corpus.labels)}.": others,
    }
    return [remark for remark, holds in remarks.items() if holds]


class Tally:
    """Losses and routes summed over batches on the model's device, as reading them would wait for each batch."""

    def __init__(self, model: ChiarForCausalLM | ChiarForSequenceClassification) -> None:
        self.config, self.operators = model.config, model.config.operators or []
        self.loss, self.gate, self.tokens = torch.zeros(3, dtype=torch.float64, device=model.device)
        self.counts_LK = self.loss.new_zeros(len(self.config.routed_layers), len(self.operators), dtype=torch.int64)

    def add(self, trace: RoutingTrace, head: nn.Module, states_ND: Tensor, targets_N: Tensor) -> None:
        for states_nD, targets_n in zip(states_ND.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
            self.loss += F.cross_entropy(head(states_nD).float(), targets_n, reduction="none").double().sum()
        self.tokens += trace.real_BT.sum()
        for counts_K, layer in zip(self.counts_LK, self.config.routed_layers, strict=True):
            counts_K += torch.bincount(trace.layers[layer].choice_BT[trace.real_BT], minlength=len(counts_K))
        if (gate_BT := trace.layers[0].gate_BT) is not None:
            self.gate += gate_BT[trace.real_BT].double().sum()

    def read(self, count: int) -> tuple[float, RoutingUse]:
        """The mean of `count` losses, and the routing."""
        if not self.loss.isfinite():
            raise InputError("the loss is not finite: the model's weights are damaged or its training diverged.")
        rows = zip(self.config.routed_layers, (self.counts_LK / self.tokens).tolist(), strict=True)
        layers = [
            LayerUse(layer, dict(zip(self.operators, shares, strict=True)), len(self.config.stacks.get(layer, [layer])))
            for layer, shares in rows
        ]
        gate = (float(self.gate / self.tokens), self.config.gate_pool) if self.config.meta_router else (None, None)
        return float(self.loss) / count, RoutingUse(layers, *gate)


@torch.inference_mode()
def measure_perplexity(model: ChiarForCausalLM, corpus: Corpus, split: Split, reading: Reading) -> Measured:
    """Scores, routing, and the length of a block. With limited rows, words and bytes are those of the tokens read."""
    targets, tally = split.tokens - 1, Tally(model)
    require(targets > 0, f"split {split.name!r} has {split.tokens} token: there is nothing to predict.")
    stride, size = reading.stride or reading.length, reading.batch_size
    starts = np.arange(0, max(targets - reading.length, 0) + stride, stride)[: reading.rows]
    tokens = min(int(starts[-1]) + reading.length, targets)
    # The last block may be shorter: it is a batch of its own, which needs no padding.
    full = int((starts + reading.length <= targets).sum())
    for batch in with_bar(np.split(starts, sorted({*range(size, full, size), full} - {0, len(starts)})), corpus.name):
        length = min(reading.length, targets - int(batch[0]))
        ids_BT = torch.from_numpy(split.rows(batch, length + 1)).to(model.device)
        decoded = model.model(ids_BT[:, :-1], output_routing=True)
        known_B = torch.from_numpy(np.where(batch > 0, reading.length - stride, 0)).to(model.device)
        new_BT = torch.arange(length, device=model.device) >= known_B[:, None]
        states_ND, targets_N = decoded.last_hidden_state[new_BT], ids_BT[:, 1:][new_BT]
        tally.add(replace(decoded.routing, real_BT=new_BT), model.lm_head, states_ND, targets_N)
    words, lines, size = split.words, split.lines, split.bytes
    if tokens < targets:
        tokenizer, ids = corpus.tokenizer(), split.read(1, tokens)
        documents = [tokenizer.decode_bytes(part) for part in np.split(ids, np.flatnonzero(ids == corpus.end_of_text))]
        text = b" ".join(documents).decode("utf-8", "replace")
        words, lines, size = len(text.split()), text.count("\n"), sum(map(len, documents))
    (loss, use), entropy = tally.read(tokens), unigram_entropy(split, corpus.vocab_size, tokens)
    return LanguageScores(tokens, loss, words, lines, size, entropy), use, min(reading.length, targets)


def unigram_entropy(split: Split, vocab_size: int, targets: int | None = None) -> float:
    """−Σ p ln p in nats, where p are the unsmoothed frequencies of the split's first `targets` targets (None: all but
    its first token). It is the least loss of a model without context, which would have to know them beforehand."""
    stop = split.tokens if targets is None else 1 + targets
    counts = np.zeros(vocab_size, np.int64)
    for first in range(1, stop, COUNTED_AT_ONCE):
        counts += np.bincount(split.read(first, min(COUNTED_AT_ONCE, stop - first)), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@torch.inference_mode()
def measure_classification(
    model: ChiarForSequenceClassification, corpus: Corpus, split: Split, reading: Reading
) -> Measured:
    """Scores, routing over real tokens, and the mean length of the document a token is in. Documents are cut to
    `length` tokens, sorted by length whatever their order in the split, and padded on the right."""
    labels, device, tally = split.labels, model.device, Tally(model)
    known, classes = model.config.num_labels, len(corpus.labels)
    assert labels is not None, "the corpus is a classification corpus"
    require(known == classes, f"the model knows {known} classes, but {corpus.folder} has {classes}.")
    chosen = np.array(split.choose(reading.rows))
    whole = np.diff(split.offsets).astype(np.int64)[chosen]
    if not whole.all():
        raise InputError(f"document {chosen[whole == 0][0]} of split {split.name!r} is empty.")
    sizes = np.minimum(whole, reading.length)
    order = np.argsort(sizes, kind="stable")
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    for batch in with_bar(np.split(order, range(reading.batch_size, len(order), reading.batch_size)), corpus.name):
        cut = [split.document(index)[: reading.length].astype(np.int64) for index in chosen[batch].tolist()]
        ids_BT = pad_sequence([*map(torch.from_numpy, cut)], batch_first=True, padding_value=corpus.end_of_text)
        real_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(sizes[batch])[:, None]
        labels_B = torch.from_numpy(labels[chosen[batch]].astype(np.int64)).to(device)
        output = model(ids_BT.to(device), attention_mask=real_BT.long().to(device), output_routing=True)
        tally.add(output.routing, nn.Identity(), output.logits, labels_B)
        confusion.index_put_((labels_B, output.logits.argmax(-1)), confusion.new_ones(()), accumulate=True)
    (loss, use), tokens, longer = tally.read(len(order)), int(sizes.sum()), int((whole > reading.length).sum())
    scores = ClassScores(len(order), tokens, longer, loss, list(corpus.labels), confusion.tolist())
    # FLOPs per token are linear in the length, so those of this mean are the mean over all tokens.
    return scores, use, round(int((sizes**2).sum()) / tokens)
