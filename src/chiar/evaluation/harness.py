"""A model and a corpus by their folders, checked against each other, measured, and written up as one report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chiar.data.shards import Corpus
from chiar.errors import InputError, unknown_name
from chiar.evaluation.classification import choose_documents, measure_classification
from chiar.evaluation.perplexity import count_windows, measure_perplexity
from chiar.evaluation.report import ClassScores, EvaluationReport, LanguageScores, RoutingUse
from chiar.model.heads import open_classifier
from chiar.model.load import check_tokenizer, choose_device, load_config, load_model, resolve_model
from chiar.routing.flops import Shares, baseline_of, count_flops, operator_shares

PRECISIONS = ("fp32", "bf16")

Progress = Callable[[int, int], None]
"""Told how many rows were done now, and how many there are."""


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
    valid with a remark where a corpus has no test split (GLUE's are without labels). `length` is the model's trained
    one by default; `rows` limits blocks, windows or documents.
    """
    for name, value in (("length", length), ("stride", stride), ("rows", rows), ("batch size", batch_size)):
        if value is not None and value < 1:
            raise InputError(f"the {name} must be at least 1, got {value}.")
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    target = choose_device(device)
    folder, run = resolve_model(model)
    corpus = Corpus.open(data)
    config = load_config(folder)
    remarks = check_tokenizer(folder, config, corpus)
    trained = config.max_position_embeddings
    length = length or trained
    if length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions, so --length can be {trained} at most: {length}.")
    if split is None:
        split = "test" if "test" in corpus.splits or "valid" not in corpus.splits else "valid"
        if split == "valid":
            remarks.append(f"{corpus.name} has no test split: measured on valid, by which training chooses its best.")
    opened = corpus.split(split)
    classifies = corpus.kind == ClassScores.kind
    if classifies and stride is not None:
        raise InputError(f"--stride is for language corpora, and {data} is a classification corpus.")
    loaded = open_classifier(folder, corpus) if classifies else load_language_model(folder)
    loaded.to(target)
    settings: dict[str, Any] = {"rows": rows, "batch_size": batch_size, "precision": precision}
    if classifies:
        remarks += compare_classes(loaded.config, corpus)
        total = len(choose_documents(opened, rows))
        scores: LanguageScores | ClassScores
        scores, routing, seen = measure_classification(
            loaded, corpus, opened, length=length, advance=lambda done: progress(done, total), **settings
        )
    else:
        total = count_windows(opened.tokens - 1, length, stride or length, rows)
        scores, routing = measure_perplexity(
            loaded, corpus, opened, length=length, stride=stride, advance=lambda done: progress(done, total), **settings
        )
        seen = min(length, opened.tokens - 1)
    ours, baseline = counted(config, routing, seen, classifies)
    return EvaluationReport(
        model=folder,
        run=run,
        corpus=corpus.name,
        fingerprint=corpus.fingerprint,
        split=split,
        length=length,
        stride=stride,
        device=describe_device(target),
        scores=scores,
        routing=routing,
        flops=ours,
        baseline_flops=baseline,
        flops_length=seen,
        remarks=[*corpus.remarks, *remarks, *explain(config, corpus, length, stride, rows, batch_size)],
        **settings,
    )


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compare_classes(config: Any, corpus: Corpus) -> list[str]:
    """A remark where the classifier names its classes otherwise than the corpus, as after training on another one."""
    names = [config.id2label[number] for number in range(config.num_labels)]
    unnamed = [f"LABEL_{number}" for number in range(config.num_labels)]
    if names in (unnamed, corpus.labels):
        return []
    return [f"classes are compared by number: the model's {', '.join(names)} with {', '.join(corpus.labels)}."]


def load_language_model(folder: str) -> Any:
    return load_model(folder)[0]


def measured_shares(config: Any, routing: RoutingUse) -> Shares:
    """What each operator got. Soft routing runs all of them; measured is then where a token weighs most."""
    return operator_shares(config) if config.routing == "soft" else [layer.use for layer in routing.layers]


def counted(config: Any, routing: RoutingUse, length: int, classifies: bool) -> tuple[float, float]:
    """FLOPs per token of the model and of attention everywhere; a classifier has no logits over the vocabulary."""
    counts = count_flops(config, length, measured_shares(config, routing)), count_flops(baseline_of(config), length)
    ours, baseline = (count.total - (count.part("logits") if classifies else 0.0) for count in counts)
    return ours, baseline


def explain(
    config: Any, corpus: Corpus, length: int, stride: int | None, rows: int | None, batch_size: int
) -> list[str]:
    """What a reader must know to read the figures rightly."""
    remarks = []
    pool = config.gate_pool if config.meta_router else "causal"
    if pool == "batch":
        remarks.append(
            f"gate_pool 'batch': g is a mean over all {batch_size} rows evaluated together, later tokens included, so "
            "the figures depend on the batch size and are not those of a causal model."
        )
    elif pool == "sequence":
        remarks.append(
            "gate_pool 'sequence': g is a mean over the whole row, later tokens included, so the figures depend on how "
            "the text is cut into rows and are not those of a causal model."
        )
    if config.routed_layers and config.routing == "soft":
        remarks.append("soft routing runs every operator on every token: f counts the tokens attention weighs most in.")
    if length > config.max_position_embeddings:
        remarks.append(f"longer than the {config.max_position_embeddings} tokens the model was trained on.")
    if stride is not None and stride < length:
        remarks.append(
            f"counted FLOPs are those of a token of a window; with stride {stride} each token is computed "
            f"{length / stride:.3g} times."
        )
    if rows is not None:
        remarks.append(f"only {rows} rows of the split were read.")
    return remarks
