"""What is asked of every layer, and what the answers are compared with."""

import math

import torch
from torch import Tensor

from chiar.nulltest.compaction import measure_compaction
from chiar.nulltest.flips import Flip, Worth, summarise
from chiar.nulltest.information import cut_at_fraction, hash_information, mutual_information, position_bins
from chiar.nulltest.report import ClassMean, Contrast, LayerNull, Signal
from chiar.nulltest.sample import LayerSample, Rows
from chiar.nulltest.statistics import bin_edges, clustered_error, mean_and_error, separation
from chiar.nulltest.white import Basis, Null, make_null, repeated_distance, whiteness
from chiar.nulltest.words import CLASSES, CONTENT, FUNCTION, NUMBER_OF, WordClasses

BINS = 4
"""Of H, each with as many tokens of the layer."""
NOISE_ROWS = 2048


def bins_of(entropy_N: Tensor, layer_N: Tensor) -> Tensor:
    """The bin of each entropy, where bins hold equally many of the layer's."""
    return torch.bucketize(entropy_N.double(), bin_edges(layer_N, BINS))


class Labels:
    """What is known of every token besides its states."""

    def __init__(self, rows: Rows, words: WordClasses) -> None:
        count, length = len(rows.starts), rows.length
        ids = rows.split.rows(rows.starts, length)
        self.token_N = torch.from_numpy(ids).flatten()
        self.position_N = position_bins(torch.arange(length).repeat(count))
        self.row_N = torch.arange(count).repeat_interleave(length)
        self.class_N, self.capital_N = torch.from_numpy(words.class_N), torch.from_numpy(words.capital_N)

    def any_of(self, names: tuple[str, ...]) -> Tensor:
        return torch.isin(self.class_N, torch.tensor([NUMBER_OF[name] for name in names]))


class Questions:
    """What is asked of every layer, with what the answers are compared with."""

    def __init__(
        self, bases: list[Basis], null: Null, labels: Labels, shuffles: int, seed: int, device: torch.device
    ) -> None:
        self.bases = [basis.to(device) for basis in bases]
        self.null, self.labels, self.shuffles, self.seed, self.device = null, labels, shuffles, seed, device
        plain = bases[0].eps == 0.0 and bases[0].dc_weight == 1.0
        # Only the model's own basis can have a DC bin of another weight.
        width, samples = self.width(bases), len(null.sample_N)
        self.control_null = null if plain else make_null(width, samples, seed, bases[0].eps)
        self.repeated = repeated_distance(labels.token_N, null, seed)
        self.noise_MD = torch.randn(NOISE_ROWS, width, generator=torch.Generator().manual_seed(seed + 1))

    @staticmethod
    def width(bases: list[Basis]) -> int:
        """Of the random basis, which is always a whole matrix."""
        whole_DD = next(basis.transform.whole_DD for basis in bases if basis.name == "random")
        assert whole_DD is not None
        return whole_DD.shape[0]

    def ask(self, sample: LayerSample, flips: list[Flip]) -> LayerNull:
        states_ND = sample.states_ND.to(self.device)
        entropies = {basis.name: basis.entropy(states_ND) for basis in self.bases}
        own_N = next(iter(entropies.values()))
        bin_N = bins_of(own_N, own_N)
        dark_N = sample.dark_N
        nulls = [self.null, *[self.control_null] * (len(self.bases) - 1)]
        compaction = measure_compaction(
            states_ND, self.labels.row_N.to(self.device), bin_N.to(self.device), BINS, self.bases,
            self.noise_MD.to(self.device),
        )  # fmt: skip
        return LayerNull(
            layer=sample.layer,
            kind=sample.kind,
            operators=sample.operators,
            thresholds=sample.thresholds,
            dark=None if dark_N is None else float(dark_N.double().mean()),
            whiteness=[
                whiteness(name, h_N, null, self.labels.token_N, self.repeated)
                for (name, h_N), null in zip(entropies.items(), nulls, strict=True)
            ],
            signals=self.signals(sample, entropies),
            classes=self.class_means(own_N, sample),
            contrasts=self.contrasts(own_N),
            worth=worth_of_layer(flips, own_N),
            compaction=compaction,
            entropies=entropies,
        )

    def signals(self, sample: LayerSample, entropies: dict[str, Tensor]) -> list[Signal]:
        """The route, if there is one, and H of each basis cut so that as many tokens are dark (half if none)."""
        dark_N = sample.dark_N
        fraction = 0.5 if dark_N is None else float(dark_N.double().mean())
        found = [] if dark_N is None else [self.signal("route", sample.choice_N, fraction)]
        if not 0.0 < fraction < 1.0:
            fraction = 0.5
        for name, entropy_N in entropies.items():
            above_N = cut_at_fraction(entropy_N, fraction)
            found.append(self.signal(name, above_N.long(), float(above_N.double().mean())))
        labels = [self.labels.token_N, self.labels.class_N, self.labels.position_N]
        dark, hashed = hash_information(self.labels.token_N, labels, fraction, self.shuffles, self.seed)
        return [*found, Signal("hash", dark, *hashed)]

    def signal(self, name: str, route_N: Tensor, dark: float) -> Signal:
        labels = self.labels
        token, word_class, position = (
            mutual_information(route_N, label_N, self.shuffles, self.seed)
            for label_N in (labels.token_N, labels.class_N, labels.position_N)
        )
        return Signal(name, dark, token, word_class, position)

    def class_means(self, entropy_N: Tensor, sample: LayerSample) -> list[ClassMean]:
        light_N = entropy_N <= entropy_N.median()
        if sample.kind == "routed":
            light_N = sample.choice_N == sample.operators.index("spectral")
        found = []
        for number, name in enumerate(CLASSES):
            of_class_N = self.labels.class_N == number
            if bool(of_class_N.any()):
                mean, error = mean_and_error(entropy_N[of_class_N], self.labels.token_N[of_class_N])
                found.append(
                    ClassMean(
                        name=name,
                        function=name in FUNCTION,
                        tokens=int(of_class_N.sum()),
                        mean=mean,
                        effect=(mean - self.null.mean) / self.null.deviation,
                        error=error / self.null.deviation if math.isfinite(error) else None,
                        light=float(light_N[of_class_N].double().mean()),
                    )
                )
        return found

    def contrasts(self, entropy_N: Tensor) -> list[Contrast]:
        function_N, content_N = self.labels.any_of(FUNCTION), self.labels.any_of(CONTENT)
        everything_N = torch.ones_like(self.labels.capital_N)
        found = []
        for words, kept_N in (("all", everything_N), ("without a capital", ~self.labels.capital_N)):
            function, content = function_N & kept_N, content_N & kept_N
            if bool(function.any()) and bool(content.any()):
                found.append(contrast(words, entropy_N, function, content, self.labels.token_N, self.null.deviation))
        return found


def worth_of_layer(flips: list[Flip], entropy_N: Tensor) -> Worth | None:
    if not flips:
        return None
    signal = [flip.entropy for flip in flips]
    return summarise(flips, bins_of(torch.tensor(signal), entropy_N).tolist(), signal, BINS)


def worth_of_all(flips: list[Flip], entropies: dict[int, Tensor]) -> Worth | None:
    """All layers together. H differs between layers, so each flip stands by its rank among the tokens of its layer."""
    if not flips:
        return None
    bins, signal = [], []
    for flip in flips:
        layer_N = entropies[flip.layer]
        bins.append(int(bins_of(torch.tensor([flip.entropy]), layer_N)))
        signal.append(float((layer_N < flip.entropy).double().mean()))
    return summarise(flips, bins, signal, BINS)


def contrast(
    words: str, entropy_N: Tensor, function_N: Tensor, content_N: Tensor, token_N: Tensor, scale: float
) -> Contrast:
    h_N = entropy_N.double() / scale
    low_N, high_N = h_N[function_N], h_N[content_N]
    influence_N = torch.cat([(low_N - low_N.mean()) / len(low_N), (high_N.mean() - high_N) / len(high_N)])
    error = clustered_error(influence_N, torch.cat([token_N[function_N], token_N[content_N]]))
    return Contrast(
        words=words,
        function_tokens=len(low_N),
        content_tokens=len(high_N),
        difference=float(low_N.mean() - high_N.mean()),
        error=error if math.isfinite(error) else None,
        separation=separation(low_N, high_N),
    )
