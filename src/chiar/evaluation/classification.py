"""Accuracy and loss of a classifier over a prepared split of labelled documents."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.data.shards import Corpus, Split
from chiar.errors import InputError
from chiar.evaluation.report import ClassScores, RoutingUse
from chiar.evaluation.routing_use import RoutingTally


def choose_documents(split: Split, rows: int | None) -> list[int]:
    """All of them, or `rows` spread over the split: files are often sorted by label."""
    if rows is None or rows >= split.documents:
        return list(range(split.documents))
    return [row * split.documents // rows for row in range(rows)]


@torch.inference_mode()
def measure_classification(
    model: Any,
    corpus: Corpus,
    split: Split,
    *,
    length: int,
    rows: int | None = None,
    batch_size: int = 16,
    precision: str = "fp32",
    advance: Callable[[int], None] = lambda documents: None,
) -> tuple[ClassScores, RoutingUse, int]:
    """Scores of a ChiarForSequenceClassification, its routing over real tokens, and the length a token sees on average.

    Documents are cut to their first `length` tokens and padded on the right, in batches of similar length: the order
    of the split plays no part.
    """
    labels, classes = split.labels, len(corpus.labels)
    if labels is None:
        raise InputError(f"{corpus.folder} is a {corpus.kind} corpus: it has no labels to compare with.")
    if model.config.num_labels != classes:
        raise InputError(f"the model knows {model.config.num_labels} classes, but {corpus.folder} has {classes}.")
    chosen = choose_documents(split, rows)
    whole = np.diff(split.offsets)
    sizes = {index: min(int(whole[index]), length) for index in chosen}
    if not all(sizes.values()):
        empty = next(index for index in chosen if not sizes[index])
        raise InputError(f"document {empty} of split {split.name!r} is empty.")
    order = sorted(chosen, key=lambda index: (sizes[index], index))
    device, training = model.device, model.training
    total = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    tally = RoutingTally(model.config, device)
    model.eval()
    try:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            ids_BT, mask_BT = (part.to(device) for part in pad(split, batch, length, corpus.end_of_text))
            labels_B = torch.tensor([int(labels[index]) for index in batch], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(ids_BT, attention_mask=mask_BT, output_routing=True)
            logits_BC = output.logits.float()
            total += F.cross_entropy(logits_BC, labels_B, reduction="none").double().sum()
            counts += torch.bincount(labels_B * classes + logits_BC.argmax(-1), minlength=classes * classes)
            tally.add(output.routing, mask_BT.bool())
            advance(len(batch))
    finally:
        model.train(training)
    if not math.isfinite(float(total)):
        raise InputError("the loss is not finite: the model's weights are damaged or its training diverged.")
    tokens = sum(sizes.values())
    scores = ClassScores(
        documents=len(order),
        tokens=tokens,
        cut=int((whole[chosen] > length).sum()),
        loss=float(total) / len(order),
        labels=list(corpus.labels),
        confusion=counts.view(classes, classes).tolist(),
    )
    # FLOPs per token are linear in the length, so this one stands for all documents.
    seen = round(sum(size * size for size in sizes.values()) / tokens)
    return scores, tally.use(), seen


def pad(split: Split, batch: list[int], length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, T): documents cut to `length`, the rest of each row padding."""
    documents = [split.document(index)[:length] for index in batch]
    T = max(map(len, documents))
    ids_BT = torch.full((len(batch), T), padding, dtype=torch.int64)
    mask_BT = torch.zeros(len(batch), T, dtype=torch.int64)
    for row, document in enumerate(documents):
        ids_BT[row, : len(document)] = torch.from_numpy(document.astype(np.int64))
        mask_BT[row, : len(document)] = 1
    return ids_BT, mask_BT
