"""Folders in, a report out: what is refused, what is remarked, what is counted."""

import json
import re
import subprocess
import sys

import pytest
from evaluated import LENGTH, language_corpus, save, tiny_model

from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError
from chiar.evaluation.harness import evaluate
from chiar.evaluation.report import EvaluationReport
from chiar.routing.flops import baseline_of, count_flops, operator_shares
from commands import run


def test_language_report(corpus, language):
    progress = []
    report = evaluate(language, corpus.folder, progress=lambda done, total: progress.append((done, total)))
    assert report.length == LENGTH  # the model's
    assert report.fingerprint == corpus.fingerprint
    assert sum(done for done, _ in progress) == progress[0][1] == -(-(corpus.split("test").tokens - 1) // LENGTH)
    config = tiny_model().config
    assert report.flops == count_flops(config, LENGTH, [layer.use for layer in report.routing.layers]).total
    assert report.baseline_flops == count_flops(baseline_of(config), LENGTH).total
    assert report.remarks == corpus.remarks
    text = " ".join(evaluate(language, corpus.folder, length=24, stride=8, rows=3).remarks)
    assert "longer than the 16 tokens" in text and "computed 3 times" in text and "only 3 rows" in text
    assert EvaluationReport.from_dict(json.loads(report.to_json())) == report


def test_classification_report(classes, classifier):
    report = evaluate(classifier, classes.folder)
    assert report.kind == "classification" and report.split == "valid"
    known = len(classes.remarks)
    assert report.remarks[:known] == classes.remarks
    assert "no tokenizer" in report.remarks[known] and "no test split" in report.remarks[known + 1]
    count = count_flops(baseline_of(tiny_model().config), report.flops_length)
    assert report.baseline_flops + count.part("logits") == count.total
    data = json.loads(report.to_json())
    assert data["scores"]["accuracy"] == report.scores.accuracy
    assert EvaluationReport.from_dict(data) == report


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"gate_pool": "batch"}, "all 4 rows evaluated together"),
        ({"gate_pool": "sequence"}, "cut into rows"),
        ({"router": "learned", "routing": "soft"}, "soft routing runs every operator"),
        ({"preset": "v1-tiny", "router": "static", "routing": "threshold"}, ""),
        ({"preset": "baseline-tiny"}, ""),
    ],
)
def test_every_kind_of_model(tmp_path, corpus, changes, remark):
    model = str(save(tiny_model(**changes), tmp_path / "model", corpus))
    report = evaluate(model, corpus.folder, batch_size=4)
    assert remark in " ".join(report.remarks)
    gated = "preset" not in changes
    assert report.routing.gate_pool == (changes.get("gate_pool", "causal") if gated else None)
    assert (report.routing.gate is None) != gated and report.flops > 0
    if report.routing.gate_pool == "batch":
        assert evaluate(model, corpus.folder, batch_size=1).scores != report.scores
    if changes == {"preset": "baseline-tiny"}:
        assert report.flops == report.baseline_flops and report.routing.fraction is None


def test_three_operators_are_counted_by_their_measured_shares(tmp_path, corpus):
    model = tiny_model(operators=["spectral", "rbf", "attention"])
    report = evaluate(str(save(model, tmp_path / "model", corpus)), corpus.folder)
    shares = [layer.use for layer in report.routing.layers]
    assert any(share["spectral"] != share["rbf"] for share in shares)
    assert report.flops == count_flops(model.config, LENGTH, shares).total
    evenly = operator_shares(model.config, [share["attention"] for share in shares])
    assert report.flops != count_flops(model.config, LENGTH, evenly).total


def test_a_run_gives_its_best_model(tmp_path, corpus):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="without a best model"):
        evaluate(str(tmp_path), corpus.folder)
    save(tiny_model(), tmp_path / "best", corpus)
    report = evaluate(str(tmp_path), corpus.folder, rows=1)
    assert report.model == str(tmp_path / "best") and report.run == str(tmp_path)
    code, output = run("eval", tmp_path, "--data", corpus.folder, "--rows", 2)
    assert code == 0 and "its best model is evaluated" in output


def test_another_tokenizer_is_refused(tmp_path, corpus, language):
    other = language_corpus(tmp_path / "bpe", TokenizerChoice("bpe", vocab_size=270))
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
        (classifier, classes, {"stride": 4}, "--stride is for language corpora"),
        (language, corpus, {"split": "tests"}, "Did you mean 'test'"),
        (language, corpus, {"precision": "fp16"}, "unknown precision"),
        (language, corpus, {"device": "tpu"}, "unknown device"),
        (language, corpus, {"rows": 0}, "rows must be at least 1"),
        (language, corpus, {"stride": 17}, "stride must lie between 1 and the length 16"),
        (learned, corpus, {"length": 17}, "16 learned positions"),
        (str(tmp_path / "none"), corpus, {}, "no folder"),
    ):
        with pytest.raises(InputError, match=sentence):
            evaluate(model, data.folder, **options)
    with pytest.raises(InputError, match="not a prepared corpus"):
        evaluate(language, tmp_path)
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
    assert EvaluationReport.from_dict(stored).scores.unigram_entropy is None


def test_models_and_reports_side_by_side(tmp_path, corpus, language):
    other = save(tiny_model("baseline-tiny"), tmp_path / "dense", corpus)
    run("eval", language, "--data", corpus.folder, "--json", tmp_path / "report.json")
    models = [other, language, tmp_path / "report.json"]
    code, output = run("eval", *models, "--data", corpus.folder, "--batch", 4, "--json", tmp_path / "all.json")
    assert code == 0
    dense, ours, before = json.loads((tmp_path / "all.json").read_text())
    assert ours["scores"]["nll"] == pytest.approx(before["scores"]["nll"], abs=1e-6)  # other batches round otherwise
    gap = next(line.split()[-3:] for line in output.splitlines() if line.strip().startswith("gap to the baseline"))
    assert float(gap[0]) == 0 and float(gap[1]) == pytest.approx(
        ours["scores"]["nll"] - dense["scores"]["nll"], abs=1e-4
    )
    assert f"{dense['scores']['unigram_entropy']:.4f} nats (unigram entropy)" in output
    run("eval", language, "--data", corpus.folder, "--stride", 4, "--json", tmp_path / "slid.json")
    code, output = run("eval", tmp_path / "report.json", tmp_path / "slid.json")
    assert code == 2 and "another stride than report" in output
    code, output = run("eval", tmp_path / "report.json", tmp_path / "slid.json", "--anyway", "--baseline", "slid")
    assert code == 0 and "≠ stride" in output


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'rich'}"
    code = f"import sys, chiar.evaluation.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
