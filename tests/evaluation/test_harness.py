"""Folders in, a report out: what is refused, what is remarked, what is counted."""

import json
import re

import pytest
from evaluated import LENGTH, make_corpus, save, tiny_model

from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError
from chiar.evaluation.harness import evaluate
from chiar.evaluation.report import EvaluationReport
from chiar.routing.flops import baseline_of, count_flops
from commands import run


def test_language_report(corpus, language):
    report = evaluate(language, corpus.folder)
    assert report.length == LENGTH  # the model's
    assert report.fingerprint == corpus.fingerprint and report.remarks == corpus.remarks
    assert report.baseline_flops == count_flops(baseline_of(tiny_model().config), LENGTH).total
    slid = evaluate(language, corpus.folder, length=24, stride=8, rows=3)
    text = " ".join(slid.remarks)
    assert "longer than the 16 tokens" in text and "only 3 rows" in text and "compute each 3 times" in text
    assert (slid.stride, slid.scores.tokens) == (8, 24 + 2 * 8)
    bf16 = evaluate(language, corpus.folder, precision="bf16").scores.nll
    assert bf16 != report.scores.nll and bf16 == pytest.approx(report.scores.nll, rel=0.02)  # bf16 keeps 8 bits


def test_classification_report(tmp_path, classes, classifier):
    report, known = evaluate(classifier, classes.folder), len(classes.remarks)
    assert report.scores.kind == "classification" and report.split == "valid"
    assert report.remarks[:known] == classes.remarks
    assert "no tokenizer" in report.remarks[known] and "no test split" in report.remarks[known + 1]
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
    model = str(save(tiny_model(**changes), tmp_path / "model", corpus))
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
    with pytest.raises(InputError, match="without a best model"):
        evaluate(str(tmp_path), corpus.folder)
    save(tiny_model(), tmp_path / "best", corpus)
    report = evaluate(str(tmp_path), corpus.folder, rows=1)
    assert report.model == str(tmp_path / "best") and report.run == str(tmp_path)


def test_another_tokenizer_is_refused(tmp_path, corpus, language):
    other = make_corpus(tmp_path / "bpe", tokenizer=TokenizerChoice("bpe", vocab_size=270))
    with pytest.raises(InputError, match=r"vocabulary of 2[67].*more than the 257 entries"):
        evaluate(language, other.folder)
    wide = save(tiny_model(vocab_size=300), tmp_path / "wide", corpus)
    with pytest.raises(InputError, match="prepared with another tokenizer"):
        evaluate(str(wide), other.folder)
    (wide / "tokenizer.json").write_text("{}")
    assert any("not compared" in remark for remark in evaluate(str(wide), other.folder, rows=1).remarks)


def test_what_does_not_fit(tmp_path, corpus, classes, language, classifier):
    learned = str(save(tiny_model("v2-tiny"), tmp_path / "learned", corpus))
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
        with pytest.raises(InputError, match=sentence):
            evaluate(model, data.folder, **options)
    preset = evaluate("v3-tiny", corpus.folder, length=LENGTH, rows=1)
    assert "v3-tiny is a preset with random weights." in preset.remarks


def test_tables_and_json(tmp_path, corpus, language):
    measured = ["eval", language, "--data", corpus.folder, "--rows", 4]
    code, output = run(*measured, "--json", tmp_path / "report.json")
    assert code == 0
    stored = json.loads((tmp_path / "report.json").read_text())
    entropy = stored["scores"]["unigram_entropy"]
    assert re.search(rf"unigram entropy of the same tokens, nats +{entropy:.4f}", output)
    for shown in ("token perplexity", "word perplexity", "bits per byte", "(pool: causal)", "counted MFLOPs", "note:"):
        assert shown in output
    assert json.loads(run(*measured, "--json", "-")[1]) == stored
    code, output = run(*measured, "--json", tmp_path / "report.json")
    assert code == 2 and "exists already" in output
    del stored["scores"]["unigram_entropy"]  # as reports were once
    (tmp_path / "old.json").write_text(json.dumps(stored))
    assert EvaluationReport.read(tmp_path / "old.json").scores.unigram_entropy is None


def test_models_and_reports_side_by_side(tmp_path, corpus, language):
    other = save(tiny_model("baseline-tiny"), tmp_path / "dense", corpus)
    run("eval", language, "--data", corpus.folder, "--json", tmp_path / "report.json")
    models = [other, language, tmp_path / "report.json"]
    code, output = run("eval", *models, "--data", corpus.folder, "--batch", 4, "--json", tmp_path / "all.json")
    assert code == 0
    dense, ours, before = json.loads((tmp_path / "all.json").read_text())
    assert ours["scores"]["nll"] == pytest.approx(before["scores"]["nll"], abs=1e-6)  # other batches round otherwise
    gap = next(line.split()[-3:] for line in output.splitlines() if line.strip().startswith("gap to the baseline"))
    difference = ours["scores"]["nll"] - dense["scores"]["nll"]
    assert float(gap[0]) == 0 and float(gap[1]) == pytest.approx(difference, abs=1e-4)
    run("eval", language, "--data", corpus.folder, "--stride", 4, "--json", tmp_path / "slid.json")
    both = ["eval", tmp_path / "report.json", tmp_path / "slid.json"]
    assert "another stride than report" in run(*both)[1] and "≠ stride" in run(*both, "--anyway")[1]
