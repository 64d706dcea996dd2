"""Folders in, a report out: what is refused, what is remarked, what is counted."""

import json

import pytest
from evaluated import LENGTH, ChiarForSequenceClassification, class_corpus, language_corpus, save, tiny_model

from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError
from chiar.evaluation.harness import evaluate
from chiar.evaluation.report import EvaluationReport
from chiar.routing.flops import baseline_of, count_flops, operator_shares


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("harness")


@pytest.fixture(scope="module")
def corpus(folder):
    return language_corpus(folder / "text")


@pytest.fixture(scope="module")
def classes(folder):
    return class_corpus(folder / "cola")


@pytest.fixture(scope="module")
def language(folder, corpus):
    return str(save(tiny_model(), folder / "language", corpus))


@pytest.fixture(scope="module")
def classifier(folder):
    return str(save(tiny_model(kind=ChiarForSequenceClassification, num_labels=2), folder / "classifier"))


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
    assert EvaluationReport.from_dict(json.loads(report.to_json())) == report


def test_classification_report(classes, classifier):
    report = evaluate(classifier, classes.folder, "valid")
    assert report.kind == "classification"
    assert classes.remarks and report.remarks[: len(classes.remarks)] == classes.remarks
    assert "no tokenizer" in report.remarks[len(classes.remarks)]
    logits = count_flops(baseline_of(tiny_model().config), report.flops_length).part("logits")
    assert report.baseline_flops + logits == count_flops(baseline_of(tiny_model().config), report.flops_length).total
    data = json.loads(report.to_json())
    assert data["scores"]["accuracy"] == report.scores.accuracy
    assert EvaluationReport.from_dict(data) == report


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"gate_pool": "batch"}, "all 4 rows evaluated together"),
        ({"gate_pool": "sequence"}, "cut into rows"),
        ({"router": "learned", "routing": "soft"}, "soft routing runs every operator"),
    ],
)
def test_remarks_on_the_model(tmp_path, corpus, changes, remark):
    model = save(tiny_model(**changes), tmp_path / "model", corpus)
    report = evaluate(str(model), corpus.folder, batch_size=4)
    assert any(remark in line for line in report.remarks)
    assert report.routing.gate_pool == changes.get("gate_pool", "causal")


def test_three_operators_are_counted_by_their_measured_shares(tmp_path, corpus):
    model = tiny_model(operators=["spectral", "rbf", "attention"])
    report = evaluate(str(save(model, tmp_path / "model", corpus)), corpus.folder)
    shares = [layer.use for layer in report.routing.layers]
    assert any(share["spectral"] != share["rbf"] for share in shares)
    assert report.flops == count_flops(model.config, LENGTH, shares).total
    evenly = operator_shares(model.config, [share["attention"] for share in shares])
    assert report.flops != count_flops(model.config, LENGTH, evenly).total


def test_the_batch_gate_depends_on_the_batch(tmp_path, corpus):
    model = str(save(tiny_model(gate_pool="batch"), tmp_path / "model", corpus))
    assert evaluate(model, corpus.folder, batch_size=1).scores != evaluate(model, corpus.folder, batch_size=4).scores


def test_remarks_on_the_settings(corpus, language):
    report = evaluate(language, corpus.folder, length=24, stride=8, rows=3)
    text = " ".join(report.remarks)
    assert "longer than the 16 tokens" in text and "computed 3 times" in text and "only 3 rows" in text


@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny"])
def test_static_and_dense_models_are_counted(tmp_path, corpus, preset):
    changes = {"router": "static"} if preset == "v1-tiny" else {}
    changes |= {"routing": "threshold"} if preset == "v1-tiny" else {}
    report = evaluate(str(save(tiny_model(preset, **changes), tmp_path / "model", corpus)), corpus.folder)
    assert report.flops > 0
    assert report.routing.gate is None and report.routing.gate_pool is None
    if preset == "baseline-tiny":
        assert report.flops == report.baseline_flops and report.routing.fraction is None


def test_a_run_gives_its_best_model(tmp_path, corpus):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="without a best model"):
        evaluate(str(tmp_path), corpus.folder)
    save(tiny_model(), tmp_path / "best", corpus)
    report = evaluate(str(tmp_path), corpus.folder, rows=1)
    assert report.model == str(tmp_path / "best") and report.run == str(tmp_path)


def test_another_tokenizer_is_refused(tmp_path, corpus, language):
    other = language_corpus(tmp_path / "bpe", TokenizerChoice("bpe", vocab_size=270))
    with pytest.raises(InputError, match=r"vocabulary of 2[67].*more than the 257 entries"):
        evaluate(language, other.folder)
    wide = save(tiny_model(vocab_size=300), tmp_path / "wide", corpus)
    with pytest.raises(InputError, match="prepared with another tokenizer"):
        evaluate(str(wide), other.folder)
    (wide / "tokenizer.json").write_text("{}")
    assert any("not compared" in remark for remark in evaluate(str(wide), other.folder, rows=1).remarks)


def test_kinds_must_fit(corpus, classes, language, classifier):
    with pytest.raises(InputError, match="is a classifier"):
        evaluate(classifier, corpus.folder)
    with pytest.raises(InputError, match="without a classifier"):
        evaluate(language, classes.folder, "valid")
    with pytest.raises(InputError, match="--stride is for language corpora"):
        evaluate(classifier, classes.folder, "valid", stride=4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"split": "tests"}, "Did you mean 'test'"),
        ({"precision": "fp16"}, "unknown precision"),
        ({"device": "tpu"}, "unknown device"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"stride": 17}, "stride must lie between 1 and the length 16"),
    ],
)
def test_bad_settings(corpus, language, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        evaluate(language, corpus.folder, **changes)


def test_learned_positions_end(tmp_path, corpus):
    model = save(tiny_model("v2-tiny"), tmp_path / "model", corpus)
    with pytest.raises(InputError, match="16 learned positions"):
        evaluate(str(model), corpus.folder, length=17)


def test_missing_and_damaged(tmp_path, corpus, language):
    with pytest.raises(InputError, match="not a prepared corpus"):
        evaluate(language, tmp_path)
    with pytest.raises(InputError, match="no folder"):
        evaluate(str(tmp_path / "none"), corpus.folder)


def test_a_preset_is_random(corpus):
    report = evaluate("v3-tiny", corpus.folder, length=LENGTH, rows=1)
    assert "v3-tiny is a preset with random weights." in report.remarks
