"""Classifiers from scratch and from a checkpoint: what they start from, what they learn, what is exported."""

import random
import re
import shutil

import pytest
import torch
from runs import final_state, metrics
from safetensors.torch import load_file
from transformers import AutoTokenizer, pipeline

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from chiar.evaluation.harness import evaluate
from chiar.model.heads import HEADS
from chiar.model.modeling import ChiarForSequenceClassification
from chiar.training.run_folder import RunFolder
from commands import run
from helpers import refused
from small_corpora import labelled_corpus

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
def finished(tmp_path_factory):
    def make(command, *options):
        out = tmp_path_factory.mktemp("finished") / "run"
        code, output = run(command, "v3-tiny", "--out", out, *options, *SMALL, *CAUSAL)
        assert code == 0 and (command == "train" or "accuracy(sst-2) " in output), output
        assert all((f"chiar {way} {out}" in output) == (command == "train") for way in ("explore", "generate"))
        return out

    return make


@pytest.fixture(scope="session")
def language(finished, corpus):
    """A short language run; its best model is what fine-tuning starts from."""
    return finished("train", "--data", corpus, "--steps", 4, "--batch", 4, "--micro-batch", 4, "--length", 32)


@pytest.fixture(scope="session")
def classifier(finished, sentiment):
    """A run from scratch on the easy task."""
    options = ["--epochs", 8, "--batch", 8, "--learning-rate", "5e-3", "--length", 48, "--set", "ema=0.5"]
    return finished("finetune", "--data", sentiment, *options, "--set", "classifier_pool=mean")


def best_record(out):
    """The evaluation the export is of."""
    step = int((out / "best").resolve().name.removeprefix("best-step-"))
    return next(record for record in metrics(out) if record["step"] == step)


def test_a_classifier_goes_on_by_the_name_of_its_run(classifier, tmp_path):
    shutil.copytree(classifier, tmp_path / "run", symlinks=True)
    code, said = run("finetune", "--resume", tmp_path / "run", "--steps", 97, "--extend")
    assert code == 0 and "resuming after step 96 of 97" in said and "step 97/97" in said
    assert re.search(r"next: chiar eval \S+ --data \S+\n$", said), "the page and generate take language models"
    code, said = run("finetune", "--resume", tmp_path / "run", "--epochs", 9)
    assert code == 2 and "--epochs is for a new run" in said


def test_an_easy_task_is_learned_from_scratch(classifier):
    records = metrics(classifier)
    accuracies = [record["accuracy"]["sst-2"] for record in records if "accuracy" in record]
    assert len(accuracies) == 8 and len(records) == 8 * 96 / 8, "8 epochs of 96 documents in batches of 8"
    assert records[-1]["loss"] < 0.3 * records[0]["loss"]
    assert best_record(classifier)["accuracy"]["sst-2"] == max(accuracies) > 0.95  # chance is 0.5


def test_the_export_is_a_classifier_with_names_tokenizer_and_averaged_weights(classifier):
    folder = classifier / "best"
    model, info = ChiarForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.id2label == {0: "negative", 1: "positive"} and model.config.max_position_embeddings == 48
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for word, label in (("awful", "negative"), ("great", "positive")):
        logits = model.eval()(torch.tensor([tokenizer(f"dark token {word}")["input_ids"]])).logits
        assert model.config.id2label[int(logits.argmax())] == label
    texts = ["dark token awful", "a great, great light"]
    told = pipeline("text-classification", str(folder))(texts, batch_size=2)
    assert [one["label"] for one in told] == ["negative", "positive"]
    assert not (folder / HEADS).exists()
    state, final = final_state(classifier), load_file(classifier / "final" / "model.safetensors")
    assert torch.equal(final["score.weight"], state["average.heads.sst-2.weight"])
    assert not torch.equal(final["score.weight"], state["model.heads.sst-2.weight"])


@pytest.fixture(scope="session")
def mixed(finished, corpus, labelled):
    """A head beside a language model."""
    sizes = ["--steps", 6, "--batch", 8, "--micro-batch", 4, "--length", 32, "--set", "evaluate_rows=0"]
    return finished("train", "--data", corpus, "--data", labelled, *sizes)


MEASURED = [("classifier", "sentiment", "sst-2"), ("mixed", "labelled", "listops")]


@pytest.mark.parametrize(("out", "data", "name"), MEASURED)
def test_evaluation_reports_what_training_measured(out, data, name, request):
    out, data = request.getfixturevalue(out), request.getfixturevalue(data)
    report, record = evaluate(str(out), data, "valid"), best_record(out)
    assert record["accuracy"].keys() == {name}
    # Other rows in a batch: one document at the border may go either way.
    assert report.scores.accuracy == pytest.approx(record["accuracy"][name], abs=1.01 / report.scores.documents)
    assert report.scores.loss == pytest.approx(record["validation"][name], abs=1e-5)


def test_evaluation_says_what_it_read_and_which_heads_there_are(classifier, mixed, sentiment, corpus):
    code, output = run("eval", classifier, "--data", sentiment)
    assert code == 0 and "F1 of positive" in output and "sst-2 has no test split" in output
    assert evaluate(str(classifier), sentiment).length == 48
    assert evaluate(str(mixed), corpus, rows=2).scores.kind == "language"
    refused("has no head for sst-2, only for listops", evaluate, str(mixed), sentiment)


@pytest.mark.parametrize(("start", "length"), [("language", 32), ("classifier", 48)])
def test_a_run_starts_from_the_weights_of_a_model(start, length, labelled, tmp_path, request):
    """With a learning rate of 0 nothing moves, so the export holds the model's weights, and a new head."""
    start, options = request.getfixturevalue(start), ["--steps", 2, "--learning-rate", 0.0]
    assert run("finetune", start, "--data", labelled, "--out", tmp_path / "run", *options, *SMALL)[0] == 0
    before, after = (load_file(folder / "best" / "model.safetensors") for folder in (start, tmp_path / "run"))
    assert after["score.weight"].shape == (10, 16)
    decoder = [name for name in after if name.startswith("model.")]
    assert len(decoder) > 20 and all(torch.equal(before[name], after[name]) for name in decoder)
    settings = RunFolder(tmp_path / "run").read()["settings"]
    assert settings["initial"] == str(start / "best")
    assert (settings["length"], settings["evaluate_rows"], settings["evaluate_every"]) == (length, 0, 2)


@pytest.fixture
def without_valid(tmp_path, corpus):
    return labelled_corpus(tmp_path, corpus, 20, 0, 5)


@pytest.fixture
def other_tokenizer(tmp_path):
    return opinions(tmp_path, TokenizerChoice("bpe", vocab_size=260))


def test_truncated_documents_are_counted(sentiment, tmp_path):
    lengths = [len(line.split("\t")[0]) for line in (sentiment.parent / "train.tsv").read_text().splitlines()[1:]]
    options = ["--data", sentiment, "--out", tmp_path / "run", "--length", 16, "--steps", 1, *SMALL, *CAUSAL]
    code, output = run("finetune", "v3-tiny", *options)
    note = f"{sum(length > 16 for length in lengths)} of 96 training documents of sst-2 are truncated to 16 tokens"
    assert code == 0 and note in output, output


@pytest.mark.parametrize(
    ("model", "data", "options", "sentence"),
    [
        ("language", "corpus", [], "language corpus without labels: train on it with chiar train"),
        ("language", "without_valid", [], r"no valid split \(only train, test\)"),
        ("language", "other_tokenizer", [], "prepare the corpus with the model's tokenizer"),
        ("language", "labelled", ["--epochs", 0], "epochs must be more than 0"),
        ("language", "labelled", ["--set", "initial=x"], "leave --set initial out"),
        ("language", "labelled", ["--set", "sample=x"], "sample continues a text"),
        ("language", "labelled", ["--set", "meta_router=false"], "no place for .* keep the folder's own"),
        ("language", "labelled", ["--set", "hidden_size=32"], "cannot be loaded"),
        ("language", "labelled", ["--set", "steps=many"], "steps must be a whole number"),
        ("v3-tinny", "labelled", [], "Did you mean 'v3-tiny'"),
    ],
    ids=str,
)
def test_bad_input(model, data, options, sentence, request, tmp_path):
    model = model if model == "v3-tinny" else request.getfixturevalue(model)
    data, out = request.getfixturevalue(data), tmp_path / "run"
    code, output = run("finetune", model, "--data", data, "--out", out, *options, "--device", "cpu")
    assert code == 2 and re.search(sentence, output) and not out.exists(), output
