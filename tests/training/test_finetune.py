"""Classifiers from scratch and from a checkpoint: what they start from, what they learn, what is exported."""

import os
import random
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_loop import assert_same_run, final_state, interrupted, metrics
from torch import nn
from transformers import AutoTokenizer

from chiar import ChiarForCausalLM
from chiar.data import Corpus
from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError
from chiar.evaluation.harness import evaluate
from chiar.model.heads import HEADS, save_heads
from chiar.model.modeling import ChiarForSequenceClassification
from chiar.training.batches import ClassificationRows
from chiar.training.finetune import classification_settings
from chiar.training.loop import is_better, train
from chiar.training.run_folder import RunFolder
from chiar.training.weights import build
from commands import run

SMALL = ["--no-compile", "--set", "precision=fp32", "--set", "log_every=1", "--device", "cpu"]
CAUSAL = ["--set", "hidden_size=16", "--set", "gate_pool=causal"]


def opinions(folder, tokenizer, train_rows=96, valid_rows=40):
    """SST-2's layout; the last word decides the label. Rows are sorted by it, as files often are."""
    rng = random.Random(0)
    for name, count in (("train", train_rows), ("dev", valid_rows)):
        words = [" ".join(rng.choices(["light", "dark", "token", "gate"], k=rng.randint(1, 4))) for _ in range(count)]
        rows = [f"{text} {('awful', 'great')[n * 2 // count]}\t{n * 2 // count}" for n, text in enumerate(words)]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    prepare(build_source(["sst-2", str(folder)]), folder / "prepared", tokenizer)
    return folder / "prepared"


@pytest.fixture(scope="session")
def sentiment(tmp_path_factory, corpus):
    return opinions(tmp_path_factory.mktemp("sentiment"), TokenizerChoice(like=corpus))


@pytest.fixture(scope="session")
def language(tmp_path_factory, corpus):
    """A short language run; its best model is what fine-tuning starts from."""
    out = tmp_path_factory.mktemp("language") / "run"
    sizes = ["--steps", 4, "--batch", 4, "--micro-batch", 4, "--length", 32]
    code, output = run("train", "v3-tiny", "--data", corpus, "--out", out, *sizes, *SMALL, *CAUSAL)
    assert code == 0, output
    return out


@pytest.fixture(scope="session")
def classifier(tmp_path_factory, sentiment):
    """A run from scratch on the easy task."""
    out = tmp_path_factory.mktemp("classifier") / "run"
    options = ["--epochs", 8, "--batch", 8, "--learning-rate", "5e-3", "--length", 48]
    code, output = run("finetune", "v3-tiny", "--data", sentiment, "--out", out, *options, *SMALL, *CAUSAL)
    assert code == 0, output
    assert "accuracy(sst-2) " in output
    return out


def best_record(out):
    """The evaluation the export is of."""
    step = int((out / "best").resolve().name.removeprefix("best-step-"))
    return next(record for record in metrics(out) if record["step"] == step)


def test_an_easy_task_is_learned_from_scratch(classifier):
    records = metrics(classifier)
    assert len([r for r in records if "accuracy" in r]) == 8  # every epoch, all rows
    assert records[-1]["loss"] < 0.3 * records[0]["loss"]
    best = max(r["accuracy"]["sst-2"] for r in records if "accuracy" in r)
    assert best > 0.95  # chance is 0.5
    assert best_record(classifier)["accuracy"]["sst-2"] == best


def test_the_export_is_a_classifier_with_names_and_tokenizer(classifier, sentiment):
    folder = classifier / "best"
    model, info = ChiarForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config.max_position_embeddings == 48
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for word, label in (("awful", "negative"), ("great", "positive")):
        logits = model.eval()(torch.tensor([tokenizer(f"dark token {word}")["input_ids"]])).logits
        assert model.config.id2label[int(logits.argmax())] == label
    assert not (folder / HEADS).exists()


def test_evaluation_reports_what_training_measured(classifier, sentiment):
    code, output = run("eval", classifier, "--data", sentiment)
    assert code == 0
    assert "F1 of positive" in output and "note: sst-2 has no test split: measured on valid" in output
    report = evaluate(str(classifier), sentiment)
    assert (report.split, report.length, report.scores.documents) == ("valid", 48, 40)
    record = best_record(classifier)
    assert report.scores.accuracy == record["accuracy"]["sst-2"]
    assert report.scores.loss == pytest.approx(record["validation"]["sst-2"], abs=1e-5)  # other rows in a batch


def test_classes_of_other_names_are_remarked(classifier, sentiment, tmp_path):
    model = ChiarForSequenceClassification.from_pretrained(classifier / "best")
    model.config.id2label = {0: "neg", 1: "pos"}
    model.save_pretrained(tmp_path)
    remarks = evaluate(str(tmp_path), sentiment, rows=2).remarks
    assert "classes are compared by number: the model's neg, pos with negative, positive." in remarks
    assert not any("by number" in remark for remark in evaluate(str(classifier), sentiment, rows=2).remarks)


def test_the_export_gives_the_logits_of_training(config, settings, labelled, tmp_path):
    chosen = settings(data=[str(labelled)], length=32, steps=6, evaluate_every=6, ema=0.5)
    model = config(classifier_pool="mean", gate_pool="causal")
    train(model, chosen, tmp_path / "run", device="cpu", quiet=True)
    task = build(model, {"listops": 10}, seed=1)
    state = final_state(tmp_path / "run")
    average = {name.removeprefix("average."): value for name, value in state.items() if name.startswith("average.")}
    task.load_state_dict(average, strict=False)
    exported = ChiarForSequenceClassification.from_pretrained(tmp_path / "run" / "best").eval()
    batch = ClassificationRows(Corpus.open(labelled).split("test"), 32).batch(0, list(range(8)))
    with torch.no_grad():
        output = exported(batch.ids, attention_mask=batch.mask, labels=batch.targets)
        result = task.eval()(batch.ids, batch.targets, batch.mask, "listops")
    assert torch.equal(output.loss, result.loss)
    assert int(result.correct) == int((output.logits.argmax(-1) == batch.targets).sum())
    assert torch.equal(exported.score.weight, average["heads.listops.weight"])
    assert not torch.equal(exported.score.weight, state["model.heads.listops.weight"])


def test_a_run_starts_from_the_checkpoint(language, labelled, tmp_path):
    """With a learning rate of 0 nothing moves, so the export holds the checkpoint's weights."""
    options = ["--steps", 2, "--learning-rate", 0.0]
    code, output = run("finetune", language, "--data", labelled, "--out", tmp_path / "run", *options, *SMALL)
    assert code == 0, output
    before = ChiarForCausalLM.from_pretrained(language / "best").model.state_dict()
    after = ChiarForSequenceClassification.from_pretrained(tmp_path / "run" / "best").model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    settings = RunFolder(tmp_path / "run").read()["settings"]
    assert settings["initial"] == str(language / "best")
    assert (settings["length"], settings["evaluate_rows"], settings["evaluate_every"]) == (32, 0, 2)


def test_a_classifier_can_be_tuned_further(classifier, labelled, tmp_path):
    options = ["--steps", 2, "--learning-rate", 0.0]
    code, output = run("finetune", classifier, "--data", labelled, "--out", tmp_path / "run", *options, *SMALL)
    assert code == 0, output
    before = load_file(classifier / "best" / "model.safetensors")
    after = load_file(tmp_path / "run" / "best" / "model.safetensors")
    assert after["score.weight"].shape == (10, 16)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("score."))


def test_the_loss_falls_from_a_checkpoint(language, labelled, tmp_path):
    options = ["--epochs", 10, "--batch", 10, "--learning-rate", "5e-3", "--length", 48]
    code, output = run("finetune", language, "--data", labelled, "--out", tmp_path / "run", *options, *SMALL)
    assert code == 0, output
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert len(losses) == 60
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])


def test_a_resumed_run_is_the_same_run(language, labelled, settings, tmp_path, monkeypatch):
    chosen = settings(data=[str(labelled)], length=32, initial=str(language / "best"), recalibrate_every=5)

    def go(out, resume=False):
        config = ChiarForCausalLM.from_pretrained(language / "best").config
        train(config, chosen, tmp_path / out, resume=resume, device="cpu", quiet=True)

    go("straight")
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 7)):
        go("resumed")
    go("resumed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    exports = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("straight", "resumed")]
    assert all(torch.equal(exports[0][name], exports[1][name]) for name in exports[0])
    chosen.initial = ""
    with pytest.raises(InputError, match="settings initial = "):
        go("resumed", resume=True)


@pytest.mark.slow
def test_two_processes_compute_what_one_does(language, sentiment, tmp_path):
    options = ["--steps", "4", "--batch", "8", "--micro-batch", "4", "--set", "dropout=0.0", *SMALL]
    common = ["-m", "chiar", "finetune", str(language), "--data", str(sentiment), *options, "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for out, start in (("one", []), ("two", torchrun)):
        command = [sys.executable, *start, *common, str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = metrics(tmp_path / "one")[-1], metrics(tmp_path / "two")[-1]
    # Sums in another order, four steps of fp32.
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
    assert ours["accuracy"] == theirs["accuracy"]


@pytest.fixture(scope="session")
def mixed(tmp_path_factory, corpus, labelled):
    """A language run with a head for ListOps."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    sizes = ["--steps", 6, "--batch", 8, "--micro-batch", 4, "--length", 32, "--set", "evaluate_rows=0"]
    options = ["--set", "max_position_embeddings=32", *SMALL, *CAUSAL]
    code, output = run("train", "v3-tiny", "--data", corpus, "--data", labelled, "--out", out, *sizes, *options)
    assert code == 0, output
    return out


def test_a_head_beside_a_language_model_is_evaluated(mixed, labelled, sentiment, corpus):
    report = evaluate(str(mixed), labelled, "valid")
    record = best_record(mixed)
    assert record["accuracy"].keys() == {"listops"}
    assert report.scores.accuracy == record["accuracy"]["listops"]
    assert report.scores.loss == pytest.approx(record["validation"]["listops"], abs=1e-5)
    assert evaluate(str(mixed), corpus, rows=2).kind == "language"
    with pytest.raises(InputError, match="has no head for sst-2, only for listops"):
        evaluate(str(mixed), sentiment)


def test_a_head_of_another_number_of_classes_is_refused(mixed, labelled, tmp_path):
    ChiarForCausalLM.from_pretrained(mixed / "best").save_pretrained(tmp_path)
    save_heads(tmp_path, {"listops": nn.Linear(16, 3)})
    with pytest.raises(InputError, match=r"knows 3 classes, but .* has 10"):
        evaluate(str(tmp_path), labelled)
    (tmp_path / HEADS).write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"heads\.safetensors cannot be loaded"):
        evaluate(str(tmp_path), labelled)


def test_several_labelled_corpora_have_a_head_each(language, labelled, sentiment, tmp_path):
    options = ["--steps", 6, "--batch", 4, "--set", "evaluate_every=3", *SMALL]
    data = ["--data", sentiment, "--data", labelled]
    code, output = run("finetune", language, *data, "--out", tmp_path / "run", *options)
    assert code == 0, output
    record = best_record(tmp_path / "run")
    for corpus, name in ((sentiment, "sst-2"), (labelled, "listops")):
        assert evaluate(str(tmp_path / "run"), corpus, "valid").scores.accuracy == record["accuracy"][name]


def test_better_is_more_accurate_then_lower_loss():
    best = {"loss": 0.5, "accuracy": 0.8}
    assert is_better({"loss": 0.9, "accuracy": 0.81}, best)
    assert is_better({"loss": 0.4, "accuracy": 0.8}, best)
    assert not is_better({"loss": 0.5, "accuracy": 0.8}, best)
    assert not is_better({"loss": 0.1, "accuracy": 0.79}, best)
    assert is_better({"loss": 0.4}, {"loss": 0.5})


def test_a_limited_evaluation_reads_all_over_the_split(sentiment):
    rows = ClassificationRows(Corpus.open(sentiment).split("valid"), 32)
    assert rows.evaluated(0) == list(range(40))
    assert set(rows.batch(0, rows.evaluated(4)).targets.tolist()) == {0, 1}


def test_defaults_follow_the_corpus_and_give_way(config, sentiment):
    corpora = [Corpus.open(sentiment)]
    _, settings = classification_settings(config(), corpora, {"data": [], "initial": ""}, 2.5)
    assert (settings.batch, settings.steps, settings.evaluate_every, settings.length) == (32, 8, 3, 256)
    chosen = {"data": [], "initial": "folder", "batch": 8, "length": 20, "warmup": 1}
    _, tuned = classification_settings(config(), corpora, chosen, 1)
    assert (tuned.steps, tuned.micro_batch, tuned.warmup, tuned.length) == (12, 8, 1, 20)
    assert tuned.learning_rate < settings.learning_rate


@pytest.fixture(scope="session")
def without_valid(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("without")
    source = build_source(["listops"], depth=3, arguments=3, examples=(20, 0, 5))
    prepare(source, folder / "prepared", TokenizerChoice(like=corpus))
    return folder / "prepared"


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory):
    return opinions(tmp_path_factory.mktemp("bpe"), TokenizerChoice("bpe", vocab_size=260))


@pytest.mark.parametrize(
    ("model", "data", "options", "sentence"),
    [
        ("language", "corpus", [], "language corpus without labels: train on it with chiar train"),
        ("language", "without_valid", [], r"no valid split \(only train, test\)"),
        ("language", "other_tokenizer", [], "prepare the corpus with the model's tokenizer"),
        ("wide", "other_tokenizer", [], "prepared with another tokenizer"),
        ("language", "labelled", ["--epochs", 0], "epochs must be more than 0"),
        ("language", "labelled", ["--batch", 0], "batch must be a whole number of at least 1"),
        ("language", "labelled", ["--set", "initial=x"], "leave --set initial out"),
        ("language", "labelled", ["--set", "sample=x"], "sample continues a text"),
        ("language", "labelled", ["--set", "meta_router=false"], "no place for .* keep the folder's own"),
        ("language", "labelled", ["--set", "hidden_size=32"], "cannot be loaded"),
        ("language", "labelled", ["--set", "steps=many"], "steps must be int"),
        ("v3-tinny", "labelled", [], "Did you mean 'v3-tiny'"),
    ],
    ids=str,
)
def test_bad_input(model, data, options, sentence, request, language, corpus, tmp_path):
    if model == "language":
        model = language
    elif model == "wide":
        train_wide = ["--steps", 1, "--batch", 2, "--micro-batch", 2, "--length", 16, "--set", "vocab_size=300"]
        run("train", "v3-tiny", "--data", corpus, "--out", tmp_path / "wide", *train_wide, *SMALL, *CAUSAL)
        model = tmp_path / "wide"
    out = tmp_path / "run"
    data = request.getfixturevalue(data)
    code, output = run("finetune", model, "--data", data, "--out", out, *options, "--device", "cpu")
    assert code == 2, output
    assert re.search(sentence, output), output
    assert not out.exists()


def test_a_language_corpus_comes_first(corpus, labelled, config, settings, tmp_path):
    with pytest.raises(InputError, match="text is a language corpus: name it first, before listops"):
        train(config(), settings(data=[str(labelled), str(corpus)]), tmp_path / "run", device="cpu", quiet=True)


def test_weights_to_start_from_serve_language_training_too(language, corpus, settings, tmp_path):
    chosen = settings(initial=str(language / "best"), steps=1, learning_rate=0.0)
    config = ChiarForCausalLM.from_pretrained(language / "best").config
    train(config, chosen, tmp_path / "run", device="cpu", quiet=True)
    before = load_file(language / "best" / "model.safetensors")
    after = load_file(tmp_path / "run" / "best" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
