"""Perplexity against a loop over single tokens, and what must not change it."""

import math

import pytest
import torch
from evaluated import LENGTH, language_corpus, tiny_model

from chiar.errors import InputError
from chiar.evaluation.perplexity import count_windows, measure_perplexity, windows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("perplexity") / "text")


@pytest.fixture(scope="module")
def split(corpus):
    return corpus.split("test")


def naive_losses(model, ids: list[int], length: int, stride: int) -> list[float]:
    """Each id from the ids before it, back to the start of the first window that reaches it."""
    losses = []
    for target in range(1, len(ids)):
        start = max(0, math.ceil((target - length) / stride)) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:target]])).logits[0, -1]
        losses.append(-float(logits.double().log_softmax(-1)[ids[target]]))
    return losses


@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"])
@pytest.mark.parametrize("stride", [None, 5, LENGTH])
def test_equals_a_loop_over_tokens(corpus, split, preset, stride):
    model = tiny_model(preset)
    ids = split.read(0, split.tokens).tolist()
    assert (len(ids) - 1) % LENGTH, "the last block should be a partial one"
    losses = naive_losses(model, ids, LENGTH, stride or LENGTH)
    scores, routing = measure_perplexity(model, corpus, split, length=LENGTH, stride=stride, batch_size=3)
    assert scores.tokens == len(ids) - 1
    # fp32 logits of rows of different lengths differ in the last bits.
    assert scores.nll == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert [layer.layer for layer in routing.layers] == model.config.routed_layers


@pytest.mark.parametrize(("targets", "length", "stride"), [(100, 16, 16), (100, 16, 5), (7, 16, 3), (16, 16, 1)])
def test_every_target_is_new_once_with_enough_before_it(targets, length, stride):
    seen = []
    for window in windows(targets, length, stride):
        assert window.inputs <= length
        for local in range(window.known, window.inputs):
            seen.append(window.start + local)
            assert local >= min(window.start + local, length - stride)
    assert seen == list(range(targets))
    assert count_windows(targets, length, stride, None) == len(list(windows(targets, length, stride)))


def test_batch_size_changes_nothing_under_a_causal_gate(corpus, split):
    model = tiny_model()
    one, several = (measure_perplexity(model, corpus, split, length=LENGTH, batch_size=size) for size in (1, 8))
    assert one[0].nll == pytest.approx(several[0].nll, abs=1e-6)  # products of other sizes round otherwise
    assert one[1].gate == pytest.approx(several[1].gate, abs=1e-6)
    assert one[1].layers == several[1].layers


def test_routing_is_the_trace_over_predicted_tokens(corpus, split):
    model = tiny_model()
    _, routing = measure_perplexity(model, corpus, split, length=split.tokens - 1)
    with torch.no_grad():
        trace = model(torch.from_numpy(split.rows(split.offsets[:1], split.tokens - 1)), output_routing=True).routing
    for layer in routing.layers:
        assert layer.use == pytest.approx(trace.operator_use(layer.layer))
        assert 0 < layer.fraction < 1
    assert routing.gate == pytest.approx(float(trace.layers[0].gate_BT.mean()), abs=1e-6)
    assert routing.gate_pool == "causal"


def test_figures_by_word_and_byte(corpus, split):
    scores, _ = measure_perplexity(tiny_model(), corpus, split, length=LENGTH)
    total = scores.nll * scores.tokens
    assert scores.perplexity == pytest.approx(math.exp(scores.nll))
    assert scores.word_perplexity == pytest.approx(math.exp(total / (split.words + split.lines)))
    assert scores.bits_per_byte == pytest.approx(total / math.log(2) / split.bytes)


def test_a_limit_counts_the_text_it_read(corpus, split):
    scores, _ = measure_perplexity(tiny_model(), corpus, split, length=LENGTH, rows=2)
    assert scores.tokens == 2 * LENGTH
    text = corpus.tokenizer().decode(split.read(1, 2 * LENGTH))
    assert scores.words == len(text.split()) and scores.lines == text.count("\n")
    assert scores.bytes == 2 * LENGTH - (split.read(1, 2 * LENGTH) == corpus.end_of_text).sum()


def test_the_model_keeps_its_mode(corpus, split):
    model = tiny_model(dropout=0.5).train()
    first, second = (measure_perplexity(model, corpus, split, length=LENGTH)[0] for _ in range(2))
    assert first == second
    assert model.training


def test_bf16_is_near(corpus, split):
    model = tiny_model("baseline-tiny")
    fp32, bf16 = (measure_perplexity(model, corpus, split, length=LENGTH, precision=p)[0] for p in ("fp32", "bf16"))
    assert fp32.nll != bf16.nll
    assert fp32.nll == pytest.approx(bf16.nll, rel=0.02)  # bf16 keeps 8 bits


def test_refusals(corpus, split):
    model = tiny_model()
    for stride in (0, LENGTH + 1):
        with pytest.raises(InputError, match="stride must lie between 1 and the length 16"):
            measure_perplexity(model, corpus, split, length=LENGTH, stride=stride)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        measure_perplexity(model, corpus, split, length=LENGTH)
