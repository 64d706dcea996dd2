"""Accuracy and loss against one document at a time."""

import pytest
import torch
import torch.nn.functional as F
from evaluated import LENGTH, ChiarForSequenceClassification, class_corpus, tiny_model

from chiar.errors import InputError
from chiar.evaluation.classification import choose_documents, measure_classification
from chiar.evaluation.report import ClassScores


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return class_corpus(tmp_path_factory.mktemp("classes") / "cola")


@pytest.fixture(scope="module")
def model():
    return tiny_model(kind=ChiarForSequenceClassification, num_labels=2)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_equals_one_document_at_a_time(corpus, model, batch_size):
    split = corpus.split("valid")
    confusion, losses, tokens = [[0, 0], [0, 0]], [], []
    for index, label in enumerate(split.labels.tolist()):
        ids = torch.tensor(split.document(index)[:LENGTH].tolist())[None]
        with torch.no_grad():
            logits = model(ids).logits[0].double()
        losses.append(float(F.cross_entropy(logits, torch.tensor(label))))
        confusion[label][int(logits.argmax())] += 1
        tokens.append(ids.shape[1])
    scores, routing, seen = measure_classification(model, corpus, split, length=LENGTH, batch_size=batch_size)
    assert scores.confusion == confusion
    assert scores.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)  # padded rows round otherwise
    assert scores.tokens == sum(tokens)
    assert scores.cut == sum(len(split.document(i)) > LENGTH for i in range(split.documents)) > 0
    assert seen == round(sum(t * t for t in tokens) / sum(tokens))
    assert len(routing.layers) == len(model.config.routed_layers)
    assert all(sum(layer.use.values()) == pytest.approx(1) for layer in routing.layers)


def test_scores_of_two_classes():
    scores = ClassScores(10, 0, 0, 0.5, ["no", "yes"], [[3, 1], [2, 4]])
    assert scores.accuracy == 0.7
    assert scores.class_accuracy == {"no": 0.75, "yes": pytest.approx(4 / 6)}
    assert scores.f1 == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert scores.matthews == pytest.approx((3 * 4 - 1 * 2) / (4 * 6 * 5 * 5) ** 0.5)
    one_sided = ClassScores(3, 0, 0, 0.5, ["no", "yes"], [[3, 0], [0, 0]])
    assert one_sided.matthews == 0.0 and one_sided.f1 == 0.0
    assert one_sided.class_accuracy["yes"] is None


def test_three_classes_have_no_f1():
    scores = ClassScores(3, 0, 0, 0.5, ["a", "b", "c"], [[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    assert scores.accuracy == 1.0
    assert scores.f1 is None and scores.matthews is None


def test_a_limit_spreads_over_the_split(corpus, model):
    split = corpus.split("valid")
    assert choose_documents(split, 4) == [0, 5, 11, 17]
    assert choose_documents(split, 1000) == list(range(split.documents))
    assert measure_classification(model, corpus, split, length=LENGTH, rows=4)[0].documents == 4


def test_another_number_of_classes_is_refused(corpus):
    model = tiny_model(kind=ChiarForSequenceClassification, num_labels=3)
    with pytest.raises(InputError, match=r"knows 3 classes, but .* has 2"):
        measure_classification(model, corpus, corpus.split("valid"), length=LENGTH)
