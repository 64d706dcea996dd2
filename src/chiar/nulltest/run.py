"""The null test of a model on a corpus: every question asked of every layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiar.data.shards import Corpus
from chiar.errors import InputError
from chiar.evaluation.harness import choose_device, describe_device
from chiar.model.load import check_tokenizer, load_config, load_model, resolve_model
from chiar.nulltest.flips import Flip, flip_routes
from chiar.nulltest.questions import BINS, Labels, Questions, worth_of_all
from chiar.nulltest.report import NullTest
from chiar.nulltest.sample import Rows, collect
from chiar.nulltest.white import make_null, model_bases
from chiar.nulltest.words import classify_rows

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it was done now, and how much there is."""


def nulltest(
    model: str,
    data: Path | str,
    split: str | None = None,
    *,
    tokens: int = 8192,
    length: int | None = None,
    batch_size: int = 8,
    flips: int = 64,
    shuffles: int = 20,
    seed: int = 0,
    device: str = "auto",
    progress: Progress = lambda task, done, total: None,
) -> NullTest:
    """`model` is a model folder, a training run (its best model) or a preset; `split` is valid where there is one.

    `tokens` are read in rows of `length` (the trained one by default) spread over the split; `flips` routes are flipped
    in each routed layer (0: none).
    """
    target = choose_device(device)
    folder, run = resolve_model(model)
    corpus = Corpus.open(data)
    if corpus.kind != "language":
        raise InputError(f"{data} is a {corpus.kind} corpus: the null test reads running text, from a language corpus.")
    config = load_config(folder)
    remarks = [*corpus.remarks, *check_tokenizer(folder, config, corpus)]
    trained = config.max_position_embeddings
    length = length or trained
    if length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions, so --length can be {trained} at most: {length}.")
    split = split or ("valid" if "valid" in corpus.splits else corpus.splits[0])
    rows = Rows.spread(corpus.split(split), tokens, length)
    loaded = load_model(folder, seed)[0].to(target)

    samples = collect(loaded, rows, batch_size, lambda done: progress("reading tokens", done, rows.tokens))
    found_flips, note = run_flips(loaded, rows, flips, batch_size, seed, progress)
    labels = Labels(rows, classify_rows(rows.split, rows.starts, length, corpus.tokenizer()))
    bases = model_bases(
        config.basis, config.hidden_size, config.basis_seed, config.entropy_eps, config.entropy_dc_weight
    )
    null = make_null(config.hidden_size, rows.tokens, seed, bases[0].eps, bases[0].dc_weight)
    questions = Questions(bases, null, labels, shuffles, seed, target)
    layers = []
    while samples:
        sample = samples.pop(0)  # its states are let go once they were looked at
        layers.append(questions.ask(sample, [flip for flip in found_flips if flip.layer == sample.layer]))
        progress("asking layers", 1, len(loaded.model.layers))
    return NullTest(
        model=folder,
        run=run,
        corpus=corpus.name,
        fingerprint=corpus.fingerprint,
        split=split,
        tokens=rows.tokens,
        rows=len(rows.starts),
        length=length,
        batch_size=batch_size,
        seed=seed,
        device=describe_device(target),
        width=config.hidden_size,
        shuffles=shuffles,
        null_mean=null.mean,
        null_deviation=null.deviation,
        null_exact=null.exact,
        null_percentiles=null.percentiles(),
        bins=BINS,
        layers=layers,
        worth=worth_of_all(found_flips, {layer.layer: layer.entropies[config.basis] for layer in layers}),
        flips=found_flips,
        remarks=[*remarks, *note, *explain(config, rows, batch_size)],
        null_sample=null.sample_N,
    )


def run_flips(
    model: Any, rows: Rows, flips: int, batch_size: int, seed: int, progress: Progress
) -> tuple[list[Flip], list[str]]:
    """The flips, or a remark why there are none."""
    config = model.config
    if flips == 0:
        return [], ["no routes were flipped: --flips 0."]
    if not config.routed_layers:
        return [], ["no routes were flipped: the model has no routed layers, and its attention layers no filter."]
    if config.routing == "soft":
        return [], ["no routes were flipped: soft routing blends the operators and takes no route."]
    total = flips * len(config.routed_layers)
    found = flip_routes(
        model,
        rows.read,
        len(rows.starts),
        flips,
        batch_size,
        seed,
        lambda done: progress("flipping routes", done, total),
    )
    return found, []


def explain(config: Any, rows: Rows, batch_size: int) -> list[str]:
    """What a reader must know to read the figures rightly."""
    remarks = []
    if config.meta_router and config.gate_pool == "batch":
        remarks.append(f"gate_pool 'batch': the states depend on which {batch_size} rows are run together.")
    if rows.tokens // 2 < 4 * config.hidden_size:
        remarks.append(
            f"the KLT is fitted on {rows.tokens // 2:,} tokens, few for a width of {config.hidden_size}: "
            "it looks worse than it is; read more with --tokens."
        )
    return remarks
