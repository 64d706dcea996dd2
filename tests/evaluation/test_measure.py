"""Losses against loops over single tokens and documents, and what must not change them."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from evaluated import LENGTH, tiny_model

from chiar.errors import InputError
from chiar.evaluation import harness
from chiar.evaluation.harness import Reading, measure_classification, measure_perplexity
from chiar.evaluation.report import ClassScores
from chiar.model.modeling import ChiarForSequenceClassification


def naive_losses(model, ids: list[int], stride: int) -> list[float]:
    """Each id from the ids before it in the first window that reaches it."""
    losses = []
    for target in range(1, len(ids)):
        start = max(0, math.ceil((target - LENGTH) / stride)) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:target]])).logits[0, -1]
        losses.append(-float(logits.double().log_softmax(-1)[ids[target]]))
    return losses


PRESETS = [(preset, None) for preset in ("baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny")]


@pytest.mark.parametrize(("preset", "stride"), [*PRESETS, ("v3-tiny", 5)])
def test_equals_a_loop_over_tokens(corpus, preset, stride):
    model, split = tiny_model(preset), corpus.split("test")
    ids = split.read(0, split.tokens).tolist()
    assert (len(ids) - 1) % LENGTH, "the last block should be a partial one"
    losses = naive_losses(model, ids, stride or LENGTH)
    for batch_size in (1, 3):
        scores, routing, seen = measure_perplexity(model, corpus, split, Reading(LENGTH, stride, batch_size=batch_size))
        assert scores.tokens == len(ids) - 1 and seen == LENGTH
        # fp32 logits of rows of different lengths differ in the last bits.
        assert scores.nll == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        assert [layer.layer for layer in routing.layers] == model.config.routed_layers
        assert all(sum(layer.use.values()) == pytest.approx(1) for layer in routing.layers)


def test_routing_is_the_trace_over_predicted_tokens(corpus):
    model, split = tiny_model(), corpus.split("test")
    _, routing, _ = measure_perplexity(model, corpus, split, Reading(split.tokens + 5))  # one block, shorter than that
    with torch.no_grad():
        trace = model(torch.from_numpy(split.rows(split.offsets[:1], split.tokens - 1)), output_routing=True).routing
    for layer in routing.layers:
        assert layer.use == pytest.approx(trace.operator_use(layer.layer))
        assert 0 < layer.fraction < 1
    assert routing.gate == pytest.approx(float(trace.layers[0].gate_BT.mean()), abs=1e-6)
    assert routing.gate_pool == "causal"


def test_figures_by_word_and_byte_also_of_a_part(corpus):
    split = corpus.split("test")
    scores = measure_perplexity(tiny_model(), corpus, split, Reading(LENGTH))[0]
    total, derived = scores.nll * scores.tokens, scores.derived()
    assert derived["perplexity"] == pytest.approx(math.exp(scores.nll))
    assert derived["word_perplexity"] == pytest.approx(math.exp(total / (split.words + split.lines)))
    assert derived["bits_per_byte"] == pytest.approx(total / math.log(2) / split.bytes)
    scores = measure_perplexity(tiny_model(), corpus, split, Reading(LENGTH, rows=2))[0]
    ids = split.read(1, 2 * LENGTH)
    text = corpus.tokenizer().decode(ids)
    assert (scores.tokens, scores.words, scores.lines) == (2 * LENGTH, len(text.split()), text.count("\n"))
    assert scores.bytes == 2 * LENGTH - (ids == corpus.end_of_text).sum()
    model = tiny_model("baseline-tiny")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        measure_perplexity(model, corpus, split, Reading(LENGTH))


def test_unigram_entropy_also_in_pieces(corpus, monkeypatch):
    monkeypatch.setattr(harness, "COUNTED_AT_ONCE", 37)
    split = corpus.split("train")
    targets = split.read(1, split.tokens - 1).tolist()
    for count in (len(targets), 9):  # sums of a few dozen float64 terms
        by_hand = -sum(n / count * math.log(n / count) for n in Counter(targets[:count]).values())
        assert harness.unigram_entropy(split, corpus.vocab_size, count) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_equals_one_document_at_a_time(classes, two_classes, batch_size):
    model, split = two_classes, classes.split("valid")
    confusion, losses, tokens = [[0, 0], [0, 0]], [], []
    for index, label in enumerate(split.labels.tolist()):
        ids = torch.tensor(split.document(index)[:LENGTH].tolist())[None]
        with torch.no_grad():
            logits = model(ids).logits[0].double()
        losses.append(float(F.cross_entropy(logits, torch.tensor(label))))
        confusion[label][int(logits.argmax())] += 1
        tokens.append(ids.shape[1])
    scores, routing, seen = measure_classification(model, classes, split, Reading(LENGTH, batch_size=batch_size))
    assert scores.confusion == confusion and scores.tokens == sum(tokens)
    assert scores.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)  # padded rows round otherwise
    assert scores.cut == sum(len(split.document(i)) > LENGTH for i in range(split.documents)) > 0
    assert seen == round(sum(t * t for t in tokens) / sum(tokens))
    assert len(routing.layers) == len(model.config.routed_layers)
    assert all(sum(layer.use.values()) == pytest.approx(1) for layer in routing.layers)


def test_scores_of_classes():
    scores = ClassScores(10, 0, 0, 0.5, ["no", "yes"], [[3, 1], [2, 4]]).derived()
    assert scores["accuracy"] == 0.7
    assert scores["class_accuracy"] == {"no": 0.75, "yes": pytest.approx(4 / 6)}
    assert scores["f1"] == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert scores["matthews"] == pytest.approx((3 * 4 - 1 * 2) / (4 * 6 * 5 * 5) ** 0.5)
    one_sided = ClassScores(3, 0, 0, 0.5, ["no", "yes"], [[3, 0], [0, 0]]).derived()
    assert one_sided["matthews"] == one_sided["f1"] == 0.0 and one_sided["class_accuracy"]["yes"] is None
    three = ClassScores(3, 0, 0, 0.5, ["a", "b", "c"], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]).derived()
    assert three["accuracy"] == 1.0 and three["f1"] is None and three["matthews"] is None


def test_a_limit_spreads_over_the_split(classes, two_classes):
    split = classes.split("valid")
    assert split.choose(4) == [0, 5, 11, 17]
    assert split.choose(1000) == split.choose(None) == list(range(split.documents))
    assert measure_classification(two_classes, classes, split, Reading(LENGTH, rows=4))[0].documents == 4
    other = tiny_model(kind=ChiarForSequenceClassification, num_labels=3)
    with pytest.raises(InputError, match=r"knows 3 classes, but .* has 2"):
        measure_classification(other, classes, split, Reading(LENGTH))
