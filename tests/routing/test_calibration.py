"""Thresholds from streams: bounded, exact to a bin, and what they promise is what routing then does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.kernels.white_noise import white_noise_entropy
from chiar.routing.calibration import calibrate, cut, noise_quantiles, temporal_noise_quantiles
from chiar.routing.quantiles import StreamingQuantiles

BIN = 1 / StreamingQuantiles.BINS


def stream(rows=24, length=32, seed=0, vocabulary=257):
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part} for part in ids.split(8)]


def spread(model):
    """Larger weights, so that entropies differ between layers and tokens."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_quantiles_lie_within_a_bin_of_the_exact_ones(values, q):
    quantiles, data = StreamingQuantiles(), torch.tensor(values, dtype=torch.float64)
    quantiles.add(data)
    low = torch.quantile(data, q, interpolation="lower")
    high = torch.quantile(data, q, interpolation="higher")
    ordered = data.sort().values
    # Between order statistics any value is a quantile; ours is one of them up to the width of a bin.
    position = q * len(values)
    nearest = ordered[[max(int(position) - 1, 0), min(int(position), len(values) - 1)]]
    lowest, highest = min(low, nearest.min()), max(high, nearest.max())
    assert lowest - BIN <= quantiles.quantile(q) <= highest + BIN


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=100), st.floats(0, 1))
def test_merged_parts_equal_the_whole_and_fractions_are_right(values, threshold):
    whole, first, second = StreamingQuantiles(), StreamingQuantiles(), StreamingQuantiles()
    data = torch.tensor(values, dtype=torch.float64)
    whole.add(data)
    first.add(data[::2])
    second.add(data[1::2])
    first.merge(second)
    assert torch.equal(first.counts, whole.counts)
    strict = (data > threshold + BIN).double().mean()
    loose = (data >= threshold - BIN).double().mean()
    assert strict - 1e-9 <= whole.fraction_above(threshold) <= loose + 1e-9


def test_memory_does_not_grow_with_the_stream():
    quantiles = StreamingQuantiles()
    for _ in range(50):
        quantiles.add(torch.rand(1000))
    assert quantiles.counts.shape == (StreamingQuantiles.BINS,)
    assert quantiles.total == 50_000


TEMPORAL = {"signal": "temporal", "temporal_window": 6, "temporal_channels": 8}


@pytest.mark.parametrize(("dc_weight", "terms"), [(1.0, 48), (0.0, 40)])
def test_the_temporal_signals_noise_has_the_closed_forms_moments(dc_weight, terms):
    noise, (mean, deviation) = temporal_noise_quantiles(6, 8, 0.0, dc_weight), white_noise_entropy(terms)
    assert abs(noise.mean() - mean) < 4 * deviation / noise.total**0.5 + BIN
    assert noise.deviation() == pytest.approx(deviation, rel=0.04)
    config = presets.get("v3-tiny", entropy_dc_weight=dc_weight, **TEMPORAL)
    assert config.layer_thresholds() == [(mean,)] * 2


@pytest.mark.parametrize("rule", ["layers", "embeddings"])
def test_the_temporal_signal_is_what_is_cut(rule):
    """Also where the embeddings are a baseline's, which routes by nothing."""
    model = spread(ChiarForCausalLM(presets.get("v3-tiny", **TEMPORAL)))
    baseline = spread(ChiarForCausalLM(presets.get("baseline-tiny")))
    measured, target = (model, None) if rule == "layers" else (baseline, model)
    found = calibrate(measured, stream(), rule, fraction=0.3, target=target)
    assert found.noise_mean == pytest.approx(white_noise_entropy(48)[0], abs=2e-3)
    if rule == "embeddings":
        entropy = torch.cat(
            [model.model.layers[0].signal(baseline.model.embed_tokens(b["input_ids"])) for b in stream()]
        )
        tau = found.layers[0].thresholds[0]
        assert float((entropy > tau).float().mean()) == pytest.approx(0.3, abs=0.02)
        return
    model.model.set_thresholds(found.thresholds(2))
    split = [
        sum(model(**b, output_routing=True).routing.attention_fraction(layer) for b in stream()) / 3 for layer in (1, 2)
    ]
    assert split == pytest.approx([0.3, 0.3], abs=0.03)


def test_white_noise_is_at_distance_zero_from_itself_and_structure_is_not():
    noise = noise_quantiles(64, 0.0, 1.0)
    assert noise.distance(noise) == 0
    other = StreamingQuantiles()
    other.add(spectral_entropy(torch.randn(4096, 64), Transform()))
    # Two samples of one distribution: the 99.9% bound of the two-sample statistic is about 1.95·√(1/n + 1/m) = 0.034.
    assert other.distance(noise) < 0.034
    tones = StreamingQuantiles()
    tones.add(spectral_entropy(torch.eye(64), Transform()))
    assert tones.distance(noise) == 1


def test_embedding_rule_is_the_midpoint_of_the_33rd_and_67th_percentiles():
    model = spread(ChiarForCausalLM(presets.get("baseline-tiny")))
    found = calibrate(model, stream(), rule="embeddings")
    ids = torch.cat([batch["input_ids"] for batch in stream()])
    entropy = spectral_entropy(model.model.embed_tokens(ids).detach(), model.model.basis.transform()).flatten().double()
    low, high = torch.quantile(entropy, 0.33), torch.quantile(entropy, 0.67)
    (report,) = found.layers
    # 768 values of at most 257 tokens: a quantile may fall on either neighbour.
    assert report.thresholds == [pytest.approx(float((low + high) / 2), abs=2e-3)]
    assert report.split[1] == pytest.approx(float((entropy > report.thresholds[0]).double().mean()), abs=2e-3)
    assert found.thresholds(3) == report.thresholds * 3


@pytest.mark.parametrize("fraction", [None, 0.25, 0.5, 0.8], ids=lambda f: f"f={f}")
@pytest.mark.parametrize("changes", [{}, {"norm_position": "pre", "norm": "rmsnorm"}, {"keys": "routed"}], ids=str)
def test_each_layer_gets_the_split_that_was_reported(fraction, changes):
    model = spread(ChiarForCausalLM(presets.get("v3-tiny", gate_pool="causal", **changes)))
    before = model.config.thresholds
    found = calibrate(model, stream(), fraction=fraction)
    assert model.config.thresholds == before
    model.model.set_thresholds(found.thresholds(2))
    ids = torch.cat([batch["input_ids"] for batch in stream()])
    with torch.no_grad():
        routing = model(ids, output_routing=True).routing
    for report in found.layers:
        measured = routing.attention_fraction(report.layer)
        # One token of 768 is 0.0013; the histogram cuts inside a bin.
        assert measured == pytest.approx(report.split[-1], abs=0.005)
        if fraction is not None:
            assert measured == pytest.approx(fraction, abs=0.02)


def test_padding_is_not_counted():
    model = spread(ChiarForCausalLM(presets.get("v2-tiny")))
    (batch,) = stream(rows=8)
    plain = calibrate(model, [batch])
    padded = {
        "input_ids": torch.cat([batch["input_ids"], torch.full((8, 9), 7)], dim=1),
        "attention_mask": torch.cat([torch.ones(8, 32), torch.zeros(8, 9)], dim=1).long(),
    }
    again = calibrate(model, [padded])
    assert [r.tokens for r in again.layers] == [r.tokens for r in plain.layers] == [256, 256]
    for ours, theirs in zip(again.thresholds(2), plain.thresholds(2), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_three_operators_get_two_thresholds():
    model = spread(ChiarForCausalLM(presets.get("v1-tiny", router="entropy")))
    found = calibrate(model, stream())
    for report in found.layers:
        low, high = report.thresholds
        assert low < high
        assert len(report.split) == 3
        assert all(0.25 < share < 0.42 for share in report.split)
    model.model.set_thresholds(found.thresholds(2))
    assert model.config.layer_thresholds() == [tuple(r.thresholds) for r in found.layers]


def test_training_mode_is_given_back():
    model = ChiarForCausalLM(presets.get("v3-tiny")).train()
    calibrate(model, stream())
    assert model.model.training


@pytest.mark.parametrize(
    ("preset", "arguments", "message"),
    [
        ("v3-tiny", {"rule": "layer"}, "Did you mean 'layers'"),
        ("v3-tiny", {"fraction": 1.0}, "strictly between 0 and 1"),
        ("baseline-tiny", {"rule": "layers"}, "no routed layers"),
        ("v1-tiny", {"rule": "layers"}, "only the entropy router"),
    ],
)
def test_bad_input(preset, arguments, message):
    with pytest.raises(InputError, match=message):
        calibrate(ChiarForCausalLM(presets.get(preset)), stream(), **arguments)


def test_the_papers_percentiles_exactly():
    """On a ramp the p-th percentile is p."""
    ramp = StreamingQuantiles()
    ramp.add(torch.linspace(0, 1, 100_001))
    assert cut(ramp, 2, None) == [pytest.approx(0.33, abs=1e-4), pytest.approx(0.67, abs=1e-4)]
    assert cut(ramp, 1, None) == [pytest.approx(0.5, abs=1e-4)]
    assert cut(ramp, 1, 0.2) == [pytest.approx(0.8, abs=1e-4)]
    assert cut(ramp, 2, 0.2) == [pytest.approx(0.4, abs=1e-4), pytest.approx(0.8, abs=1e-4)]
    assert ramp.deviation() == pytest.approx(12**-0.5, abs=1e-4)


def test_the_report_says_where_entropies_lie_and_on_which_side_of_noise():
    """Embeddings that are pure tones have H far below noise; all but pure noise, none of it."""
    model = ChiarForCausalLM(presets.get("baseline-tiny", basis="identity"))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(257, 32) + torch.eye(257, 32).roll(1, 1))
    ids = torch.arange(32).repeat(8, 1)
    (low,) = calibrate(model, [{"input_ids": ids}], rule="embeddings").layers
    # Two equal coefficients of 32: H = log 2 / log 32 = 0.2.
    assert low.percentiles == {p: pytest.approx(0.2, abs=1e-4) for p in (5, 33, 50, 67, 95)}
    assert low.shift_from_noise < -5
    assert low.distance_from_noise == 1
    torch.nn.init.normal_(model.model.embed_tokens.weight, generator=torch.Generator().manual_seed(0))
    (white,) = calibrate(model, stream(rows=200), rule="embeddings").layers
    assert abs(white.shift_from_noise) < 0.3
    assert white.percentiles[5] < white.percentiles[50] < white.percentiles[95]


def test_embedding_rule_reports_the_split_of_every_routed_layer():
    baseline = spread(ChiarForCausalLM(presets.get("baseline-tiny")))
    target = spread(ChiarForCausalLM(presets.get("v3-tiny", gate_pool="causal")))
    found = calibrate(baseline, stream(), rule="embeddings", target=target)
    assert [layer.layer for layer in found.layers] == [None, 1, 2]
    assert target.config.thresholds is None
    target.model.set_thresholds(found.thresholds(2))
    ids = torch.cat([batch["input_ids"] for batch in stream()])
    with torch.no_grad():
        routing = target(ids, output_routing=True).routing
    for layer in found.layers[1:]:
        assert layer.split[-1] == pytest.approx(routing.attention_fraction(layer.layer), abs=0.005)


def test_what_does_not_settle_is_said():
    model = spread(ChiarForCausalLM(presets.get("v3-tiny", gate_pool="causal", thresholds=0.0)))
    assert not calibrate(model, stream(), passes=1).converged
    found = calibrate(model, stream())
    assert found.converged
    assert 1 < found.passes <= 6


def test_one_shot_iterators_are_refused():
    with pytest.raises(InputError, match="re-iterable"):
        calibrate(ChiarForCausalLM(presets.get("v3-tiny")), iter(stream()))


def test_ids_outside_the_vocabulary_are_refused_by_both_rules():
    model, bad = ChiarForCausalLM(presets.get("v3-tiny")), [{"input_ids": torch.tensor([[1, 400]])}]
    for rule in ("embeddings", "layers"):
        with pytest.raises(InputError, match="outside the vocabulary"):
            calibrate(model, bad, rule=rule)


def test_an_empty_stream_is_an_error():
    with pytest.raises(InputError, match="empty"):
        calibrate(ChiarForCausalLM(presets.get("v3-tiny")), [])
