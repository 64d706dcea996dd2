"""Is the routing signal more than noise? Tests every layer of a model on a corpus."""

from pathlib import Path

import numpy as np
import torch
from scipy import stats

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.data.tokenizers import check_tokenizer
from chiar.errors import InputError
from chiar.evaluation.harness import choose_device, describe_device
from chiar.model.load import load_config, load_model, resolve_model
from research.nulltest import measures
from research.nulltest.report import BINS, ClassMean, Contrast, LayerNull, NullTest, Signal, Worth
from research.nulltest.sample import LIGHT, Flip, LayerSample, Rows, collect, flip_routes
from research.nulltest.words import CLASSES, CONTENT, FUNCTION, NUMBER_OF, WordClasses, classify_rows

NOISE_ROWS = 2048


class LayerTests:
    """The tests of every layer, and the nulls they compare with."""

    def __init__(
        self, bases: list[measures.Basis], null: measures.Null, rows: Rows, words: WordClasses, shuffles: int,
        seed: int, width: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.bases, self.null, self.shuffles, self.seed = [basis.to(device) for basis in bases], null, shuffles, seed
        count, self.device = len(rows.starts), device
        self.token_N = rows.split.rows(rows.starts, rows.length).flatten()
        self.position_N = measures.position_bins(np.tile(np.arange(rows.length), count))
        self.row_N = np.repeat(np.arange(count), rows.length)
        self.class_N, self.capital_N = words.class_N, words.capital_N
        self.own_entropies: dict[int, np.ndarray] = {}
        """H in the model's basis, of the layers tested so far."""
        # Only the model's own basis can weight the DC bin.
        plain = bases[0].eps == 0.0 and bases[0].dc_weight == 1.0
        self.control_null = null if plain else measures.make_null(width, len(null.sample_N), seed, bases[0].eps)
        self.repeated = measures.repeated_distance(self.token_N, null, seed)
        self.noise_MD = torch.randn(NOISE_ROWS, width, generator=torch.Generator().manual_seed(seed + 1)).to(device)

    def test(self, sample: LayerSample, flips: list[Flip]) -> LayerNull:
        states_ND = sample.states_ND.to(self.device)
        entropies = {basis.name: basis.entropy(states_ND) for basis in self.bases}
        own_N, dark_N = entropies[self.bases[0].name], sample.dark_N
        self.own_entropies[sample.layer] = own_N
        nulls = [self.null, *[self.control_null] * (len(self.bases) - 1)]
        signal = [flip.entropy for flip in flips]
        bins_N = measures.bins_of(own_N, own_N, BINS)
        pairs = zip(entropies.items(), nulls, strict=True)
        whiteness = [measures.whiteness(name, h_N, null, self.token_N, self.repeated) for (name, h_N), null in pairs]
        return LayerNull(
            layer=sample.layer, kind=sample.kind, operators=sample.operators, thresholds=sample.thresholds,
            dark=None if dark_N is None else float(dark_N.mean()), whiteness=whiteness,
            signals=self.signals(sample, entropies), classes=self.class_means(own_N, sample),
            contrasts=self.contrasts(own_N),
            worth=Worth.of(flips, measures.bins_of(np.array(signal), own_N, BINS).tolist(), signal) if flips else None,
            compaction=measures.measure_compaction(states_ND, self.row_N, bins_N, BINS, self.bases, self.noise_MD),
        )  # fmt: skip

    def signals(self, sample: LayerSample, entropies: dict[str, np.ndarray]) -> list[Signal]:
        """The route, if there is one, and H of each basis, thresholded to the same share of dark tokens (else half)."""
        dark_N = sample.dark_N
        fraction = 0.5 if dark_N is None else float(dark_N.mean())
        signals = [] if dark_N is None else [self.signal("route", sample.choice_N, fraction)]
        if not 0.0 < fraction < 1.0:
            fraction = 0.5
        for name, entropy_N in entropies.items():
            above_N = entropy_N > np.quantile(entropy_N, 1.0 - fraction)
            signals.append(self.signal(name, above_N, float(above_N.mean())))
        labels = [self.token_N, self.class_N, self.position_N]
        dark, hashed = measures.hash_information(self.token_N, labels, fraction, self.shuffles, self.seed)
        return [*signals, Signal("hash", dark, *hashed)]

    def signal(self, name: str, route_N: np.ndarray, dark: float) -> Signal:
        labels = (self.token_N, self.class_N, self.position_N)
        return Signal(
            name, dark, *(measures.mutual_information(route_N, one, self.shuffles, self.seed) for one in labels)
        )

    def class_means(self, entropy_N: np.ndarray, sample: LayerSample) -> list[ClassMean]:
        light_N = entropy_N <= np.median(entropy_N)
        if sample.kind == "routed":
            light_N = sample.choice_N == LIGHT
        means = []
        for number, name in enumerate(CLASSES):
            of_class_N = self.class_N == number
            if of_class_N.any():
                mean, error = measures.mean_and_error(entropy_N[of_class_N], self.token_N[of_class_N])
                effect, error = (mean - self.null.mean) / self.null.deviation, error / self.null.deviation
                count, light = int(of_class_N.sum()), float(light_N[of_class_N].mean())
                means.append(ClassMean(name, name in FUNCTION, count, mean, effect, measures.finite(error), light))
        return means

    def contrasts(self, entropy_N: np.ndarray) -> list[Contrast]:
        groups = [np.isin(self.class_N, [NUMBER_OF[name] for name in names]) for names in (FUNCTION, CONTENT)]
        contrasts = []
        for words, kept_N in (("all", np.ones_like(self.capital_N)), ("without a capital", ~self.capital_N)):
            function, content = (group & kept_N for group in groups)
            if function.any() and content.any():
                contrasts.append(contrast(words, entropy_N, function, content, self.token_N, self.null.deviation))
        return contrasts


def contrast(
    words: str, entropy_N: np.ndarray, function_N: np.ndarray, content_N: np.ndarray, token_N: np.ndarray, scale: float
) -> Contrast:
    low_N, high_N = entropy_N[function_N] / scale, entropy_N[content_N] / scale
    influence_N = np.concatenate([(low_N - low_N.mean()) / len(low_N), (high_N.mean() - high_N) / len(high_N)])
    error = measures.clustered_error(influence_N, np.concatenate([token_N[function_N], token_N[content_N]]))
    wins = float(stats.mannwhitneyu(high_N, low_N, method="asymptotic").statistic)
    difference, separation = float(low_N.mean() - high_N.mean()), wins / (len(low_N) * len(high_N))
    return Contrast(words, len(low_N), len(high_N), difference, measures.finite(error), separation)


def worth_of_all(flips: list[Flip], entropies: dict[int, np.ndarray]) -> Worth | None:
    """Of all layers together. H differs between layers, so it is replaced by its rank among the tokens of the layer."""
    bins = [int(measures.bins_of(np.array(flip.entropy), entropies[flip.layer], BINS)) for flip in flips]
    return Worth.of(flips, bins, [float((entropies[f.layer] < f.entropy).mean()) for f in flips]) if flips else None


def nulltest(
    model: str, data: Path | str, split: str | None = None, *, tokens: int = 8192, length: int | None = None,
    batch: int = 8, flips: int = 64, shuffles: int = 20, seed: int = 0, device: str = "auto",
) -> NullTest:  # fmt: skip
    """`model` is a model folder, a training run (its best model) or a preset; `split` defaults to valid if it exists.

    Reads `tokens` in rows of `length` (by default the trained one) spread over the split, and flips `flips` routes in
    each routed layer.
    """
    target = choose_device(device)
    folder, run = resolve_model(model)
    corpus = Corpus.open(data)
    if corpus.kind != "language":
        raise InputError(f"{data} is a {corpus.kind} corpus: the null test needs running text, a language corpus.")
    config = load_config(folder)
    remarks = [*corpus.remarks, *check_tokenizer(folder, config, corpus)]
    trained = config.max_position_embeddings
    length = length or trained
    if length > trained and config.positions == "learned":
        raise InputError(f"the model has {trained} learned positions: --length must be at most that, got {length}.")
    split = split or ("valid" if "valid" in corpus.splits else corpus.splits[0])
    rows = Rows.spread(corpus.split(split), tokens, length)
    loaded = load_model(folder, seed)[0].to(target)

    samples, unflipped = collect(loaded, rows, batch), why_unflipped(config, flips)
    all_flips = [] if unflipped else flip_routes(loaded, rows.read, len(rows.starts), flips, batch, seed)
    width = config.hidden_size
    bases = measures.model_bases(config.basis, width, config.router_seed, config.entropy_eps, config.entropy_dc_weight)
    null = measures.make_null(width, rows.tokens, seed, bases[0].eps, bases[0].dc_weight)
    words = classify_rows(rows.split, rows.starts, length, corpus.tokenizer())
    tests = LayerTests(bases, null, rows, words, shuffles, seed, width, target)
    layers = []
    while samples:
        sample = samples.pop(0)  # frees its states after the test
        layers.append(tests.test(sample, [flip for flip in all_flips if flip.layer == sample.layer]))
    return NullTest(
        model=folder, run=run, corpus=corpus.name, fingerprint=corpus.fingerprint, split=split, tokens=rows.tokens,
        rows=len(rows.starts), length=length, batch_size=batch, seed=seed, device=describe_device(target), width=width,
        shuffles=shuffles, null_mean=null.mean, null_deviation=null.deviation, null_exact=null.exact,
        null_percentiles=measures.percentiles(null.sample_N.numpy()), bins=BINS, layers=layers,
        worth=worth_of_all(all_flips, tests.own_entropies), flips=all_flips,
        remarks=[*remarks, *unflipped, *caveats(config, rows, batch)],
    )  # fmt: skip


def why_unflipped(config: ChiarConfig, flips: int) -> list[str]:
    reasons = {
        "--flips 0.": flips == 0,
        "the model has no routed layers, and attention layers have no filter to switch to.": not config.routed_layers,
        "soft routing blends the operators instead of choosing one.": config.routing == "soft",
    }
    return [f"no routes were flipped: {reason}" for reason, holds in reasons.items() if holds][:1]


def caveats(config: ChiarConfig, rows: Rows, batch: int) -> list[str]:
    """What a reader must know to interpret the numbers."""
    fitted, width = rows.tokens // 2, config.hidden_size
    remarks = {
        f"gate_pool 'batch': the states depend on which {batch} rows share a batch.":
            config.meta_router and config.gate_pool == "batch",
        f"the KLT is fitted on {fitted:,} tokens, few for width {width}: raise --tokens.":
            fitted < 4 * width,
    }  # fmt: skip
    return [remark for remark, holds in remarks.items() if holds]
