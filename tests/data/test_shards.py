"""The prepared format: random access, and damage that is found."""

import json
import shutil

import numpy as np
import pytest
from corpora import BYTES, all_refused, refused, text_file
from hypothesis import given
from hypothesis import strategies as st

from chiar.data.corpora import Text
from chiar.data.listops import GeneratedListOps
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus, fingerprint
from chiar.data.tokenizers import TokenizerChoice

SHARD = 1000
FRACTIONS = (0.8, 0.1, 0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = Text([text_file(folder / "notes.txt")], fractions=FRACTIONS)
    return prepare(source, folder / "corpus", BYTES, shard_tokens=SHARD)


@pytest.fixture(scope="module")
def ids(corpus):
    """The train split as one array, from the files themselves."""
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(corpus.folder.glob("train.*.bin"))])


@pytest.fixture
def copy(corpus, tmp_path):
    shutil.copytree(corpus.folder, tmp_path / "copy")
    return tmp_path / "copy"


@given(st.data())
def test_reading_is_slicing(corpus, ids, data):
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    assert np.array_equal(corpus.split("train").read(start, count), ids[start : start + count])


def test_views_rows_and_what_lies_outside(corpus, ids):
    split = corpus.split("train")
    view = split.read(SHARD, 257)  # inside a shard: nothing is copied
    assert view.base is not None and not view.flags.writeable
    rows = split.rows(starts := np.array([0, 998, 5]), 257)
    assert rows.dtype == np.int64 and np.array_equal(rows, [ids[start : start + 257] for start in starts])
    for start, count in [(-1, 2), (0, -1), (10**9, 1)]:
        with pytest.raises(IndexError, match="split 'train'"):
            split.read(start, count)
    with pytest.raises(IndexError, match="split 'train'"):
        split.document(split.documents)
    with refused("Did you mean 'valid'"):
        corpus.split("val")


def test_documents_end_with_the_end_of_text_and_decode_to_the_source(corpus):
    tokenizer = corpus.tokenizer()
    source = Text([corpus.folder.parent / "notes.txt"], fractions=FRACTIONS)
    for name in corpus.splits:
        split = corpus.split(name)
        texts = [document.text for document in source.documents(name)]
        stored = [split.document(index) for index in range(split.documents)]
        assert all(document[-1] == corpus.end_of_text == 256 for document in stored)
        assert [tokenizer.decode(document[:-1]) for document in stored] == texts
        assert split.offsets[0] == 0 and split.offsets[-1] == split.tokens
        assert split.bytes == sum(len(text.encode()) for text in texts) == split.tokens - split.documents
        assert split.labels is None


def test_classification_keeps_labels_and_adds_no_end_of_text(tmp_path):
    source = GeneratedListOps([], "listops", examples=(300, 20, 20))
    corpus = prepare(source, tmp_path / "corpus", BYTES)
    assert (corpus.kind, corpus.labels) == ("classification", list("0123456789"))
    split = corpus.split("train")
    expected = list(source.documents("train"))
    assert split.labels.tolist() == [document.label for document in expected]
    assert [corpus.tokenizer().decode(split.document(n)) for n in range(300)] == [d.text for d in expected]
    assert corpus.manifest["splits"]["train"]["label_counts"] == np.bincount(split.labels, minlength=10).tolist()
    manifest = Corpus.open(tmp_path / "corpus", verify=True).manifest
    assert str(tmp_path) not in json.dumps(manifest)
    assert fingerprint(manifest) == manifest["fingerprint"] != fingerprint({**manifest, "name": "other"})


def test_damaged_files_are_found(copy):
    Corpus.open(copy, verify=True)
    for name in ("train.002.bin", "valid.000.bin", "train.documents.npy"):
        right = (copy / name).read_bytes()
        (copy / name).write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        Corpus.open(copy)
        with refused(f"{name} does not have the hash"):
            Corpus.open(copy, verify=True)
        (copy / name).write_bytes(right)
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"use_regex": false', '"use_regex": true'))
    with refused("not the tokenizer this corpus"):
        Corpus.open(copy, verify=True)
    path = copy / "train.001.bin"
    all_refused(lambda: Corpus.open(copy), path, {path.read_bytes()[:-2]: "has 1998 bytes, expected 2000"})
    path.unlink()
    with refused(r"train\.001\.bin is missing"):
        Corpus.open(copy)


def test_manifests_that_cannot_be_used(copy, tmp_path):
    path = copy / "manifest.json"
    right = json.loads(path.read_text())
    outside = json.loads(path.read_text().replace("valid.000.bin", "../outside.bin"))["splits"]
    cases = {json.dumps(right | {"name": "other"}): "changed after the preparation", "{": "damaged"}
    changes = {"lies outside its folder": {"splits": outside}, "incomplete": {"splits": {"train": {}}}}
    changes["'chiar-corpus/9', expected 'chiar-corpus/1'"] = {"format": "chiar-corpus/9"}
    for message, change in changes.items():
        manifest = right | change
        cases[json.dumps(manifest | {"fingerprint": fingerprint(manifest)})] = message
    all_refused(lambda: Corpus.open(copy), path, cases)
    for folder, message in [(tmp_path, "not a prepared corpus"), (tmp_path / "nowhere", "there is no folder")]:
        with refused(message):
            Corpus.open(folder)
    path.write_text(json.dumps(right))  # nor are arrays ever unpickled
    for array, message in [(np.array([{"a": 1}]), r"not a readable \.npy"), (np.zeros(3), "whole numbers")]:
        np.save(copy / "valid.documents.npy", array, allow_pickle=True)
        with refused(message):
            _ = Corpus.open(copy).split("valid").offsets


def test_corpora_of_different_tokenizers_do_not_mix(corpus, tmp_path):
    source, choice = Text([corpus.folder.parent / "notes.txt"]), TokenizerChoice("bpe", vocab_size=280)
    with refused("different tokenizers"):
        corpus.require_same_tokenizer(prepare(source, tmp_path / "other", choice))
