"""Losses against loops over tokens and documents; folders in, a report out: what is refused, remarked, counted."""

import json
import math
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from chiar.data.tokenizers import TokenizerChoice
from chiar.evaluation import harness
from chiar.evaluation.harness import Reading, evaluate, measure_classification, measure_perplexity
from chiar.evaluation.report import ClassScores, EvaluationReport
from chiar.model.modeling import ChiarForSequenceClassification
from chiar.routing.flops import baseline_of, count_flops
from commands import run
from helpers import refused
from small_corpora import measured_corpus, save, tiny_model

LENGTH = 16  # of the models


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
        assert 0 < layer.use["attention"] < 1
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
    refused("not finite", measure_perplexity, model, corpus, split, Reading(LENGTH))


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
    assert three["accuracy"] == 1.0 and three["f1"] is three["matthews"] is None


def test_a_limit_spreads_over_the_split(classes, two_classes):
    split = classes.split("valid")
    assert split.choose(4) == [0, 5, 11, 17]
    assert split.choose(1000) == split.choose(None) == list(range(split.documents))
    assert measure_classification(two_classes, classes, split, Reading(LENGTH, rows=4))[0].documents == 4
    other = tiny_model(kind=ChiarForSequenceClassification, num_labels=3)
    refused(r"knows 3 classes, but .* has 2", measure_classification, other, classes, split, Reading(LENGTH))


def test_language_report(corpus, language):
    report = evaluate(language, corpus.folder, "test")
    assert report.length == LENGTH  # the model's
    assert report.fingerprint == corpus.fingerprint and report.remarks == corpus.remarks
    assert report.baseline_flops == count_flops(baseline_of(tiny_model().config), LENGTH).total
    slid = evaluate(language, corpus.folder, length=24, stride=8, rows=3)
    text = " ".join(slid.remarks)
    assert "longer than the 16 tokens" in text and "only 3 rows" in text and "compute each 3 times" in text
    assert (slid.stride, slid.scores.tokens) == (8, 24 + 2 * 8)
    bf16 = evaluate(language, corpus.folder, "test", precision="bf16").scores.nll
    assert bf16 != report.scores.nll and bf16 == pytest.approx(report.scores.nll, rel=0.02)  # bf16 keeps 8 bits


def test_classification_report(tmp_path, classes, classifier):
    report, known = evaluate(classifier, classes.folder), len(classes.remarks)
    assert report.scores.kind == "classification" and report.split == "valid"
    assert report.remarks[:known] == classes.remarks
    assert "no tokenizer" in report.remarks[known]
    count = count_flops(baseline_of(tiny_model().config), report.flops_length)
    assert report.baseline_flops + count.part("logits") == count.total
    (tmp_path / "report.json").write_text(report.to_json())
    assert EvaluationReport.read(tmp_path / "report.json") == report
    assert json.loads(report.to_json())["scores"]["accuracy"] == report.scores.accuracy


KINDS = [({"gate_pool": "batch"}, "all 4 rows of a batch"), ({"gate_pool": "sequence"}, "mean over the whole row")]
KINDS += [({"router": "learned", "routing": "soft"}, "soft routing runs every operator")]
KINDS += [({"preset": "v1-tiny", "router": "static", "routing": "threshold"}, ""), ({"preset": "baseline-tiny"}, "")]
KINDS += [({"operators": ["spectral", "rbf", "attention"]}, "")]


@pytest.mark.parametrize(("changes", "remark"), KINDS)
def test_every_kind_of_model(tmp_path, corpus, changes, remark):
    model = str(save(tiny_model(**changes), tmp_path / "model", corpus.tokenizer()))
    report = evaluate(model, corpus.folder, batch_size=4)
    assert remark in " ".join(report.remarks)
    gated = "preset" not in changes
    assert report.routing.gate_pool == (changes.get("gate_pool", "causal") if gated else None)
    assert (report.routing.gate is None) != gated
    if changes.get("routing") != "soft":  # which runs all of them
        shares = [layer.use for layer in report.routing.layers]
        assert report.flops == count_flops(tiny_model(**changes).config, LENGTH, shares).total
    if report.routing.gate_pool == "batch":
        assert evaluate(model, corpus.folder, batch_size=1).scores != report.scores
    if changes == {"preset": "baseline-tiny"}:
        assert report.flops == report.baseline_flops and report.routing.fraction is None


def test_a_run_gives_its_best_model(tmp_path, corpus):
    (tmp_path / "metrics.jsonl").write_text("")
    refused("without a best model", evaluate, str(tmp_path), corpus.folder)
    save(tiny_model(), tmp_path / "best", corpus.tokenizer())
    report = evaluate(str(tmp_path), corpus.folder, rows=1)
    assert report.model == str(tmp_path / "best") and report.run == str(tmp_path)


def test_another_tokenizer_is_refused(tmp_path, corpus, language):
    other = measured_corpus(tmp_path / "bpe", tokenizer=TokenizerChoice("bpe", vocab_size=270))
    refused(r"vocabulary of 2[67].*more than the 257 entries", evaluate, language, other.folder)
    wide = save(tiny_model(vocab_size=300), tmp_path / "wide", corpus.tokenizer())
    refused("prepared with another tokenizer", evaluate, str(wide), other.folder)
    (wide / "tokenizer.json").write_text("{}")
    assert any("not compared" in remark for remark in evaluate(str(wide), other.folder, rows=1).remarks)


def test_what_does_not_fit(tmp_path, corpus, classes, language, classifier):
    learned = str(save(tiny_model("v2-tiny"), tmp_path / "learned", corpus.tokenizer()))
    for model, data, options, sentence in (
        (classifier, corpus, {}, "is a classifier"),
        (language, classes, {}, "without a classifier"),
        (language, corpus, {"split": "tests"}, "Did you mean 'test'"),
        (language, corpus, {"precision": "fp16"}, "unknown precision"),
        (language, corpus, {"device": "tpu"}, "unknown device"),
        (learned, corpus, {"length": 17}, "16 learned positions"),
        (language, corpus, {"stride": 17}, "stride must lie between 1 and the length 16"),
        (classifier, classes, {"stride": 4}, "--stride is for language corpora"),
        (str(tmp_path / "none"), corpus, {}, "no folder"),
    ):
        refused(sentence, evaluate, model, data.folder, **options)
    assert "a preset with random" in evaluate("v3-tiny", corpus.folder, length=LENGTH, rows=1).remarks[0]


def test_tables_and_json(tmp_path, corpus, language):
    measured = ["eval", language, "--data", corpus.folder, "--rows", 4]
    code, output = run(*measured, "--json", tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert code == 0 and re.search(rf"bits per byte +{stored['scores']['bits_per_byte']:.4f}", output)
    assert json.loads(run(*measured, "--json", "-")[1]) == stored
    assert "add --overwrite" in run(*measured, "--json", tmp_path / "report.json")[1]
    assert run(*measured, "--json", tmp_path / "report.json", "--overwrite")[0] == 0
    del stored["scores"]["unigram_entropy"]  # as reports were once
    (tmp_path / "old.json").write_text(json.dumps(stored))
    assert EvaluationReport.read(tmp_path / "old.json").scores.unigram_entropy is None


def test_models_and_reports_side_by_side(tmp_path, corpus, language):
    other = save(tiny_model("baseline-tiny"), tmp_path / "dense", corpus.tokenizer())
    run("eval", language, "--data", corpus.folder, "--json", tmp_path / "report.json")
    models = [other, language, tmp_path / "report.json"]
    _, output = run("eval", *models, "--data", corpus.folder, "--batch", 4, "--json", tmp_path / "all.json")
    dense, ours, before = json.loads((tmp_path / "all.json").read_text())
    assert ours["scores"]["nll"] == pytest.approx(before["scores"]["nll"], abs=1e-6)  # other batches round otherwise
    gap = next(line.split()[-3:] for line in output.splitlines() if line.strip().startswith("gap to the baseline"))
    difference = ours["scores"]["nll"] - dense["scores"]["nll"]
    assert float(gap[0]) == 0 and float(gap[1]) == pytest.approx(difference, abs=1e-4)
    run("eval", language, "--data", corpus.folder, "--stride", 4, "--json", tmp_path / "slid.json")
    both = ["eval", tmp_path / "report.json", tmp_path / "slid.json"]
    assert "another stride than report" in run(*both)[1] and "≠ stride" in run(*both, "--anyway")[1]
