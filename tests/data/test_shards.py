"""The prepared format: random access, and damage that is found."""

import json
import shutil

import numpy as np
import pytest
from corpora import BYTES, text_file
from hypothesis import given
from hypothesis import strategies as st

from chiar.data.listops import GeneratedListOps
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus, fingerprint
from chiar.data.text import Text
from chiar.errors import InputError

SHARD = 1000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = Text([text_file(folder / "notes.txt")], fractions=(0.8, 0.1, 0.1))
    return prepare(source, folder / "corpus", BYTES, shard_tokens=SHARD)


@pytest.fixture(scope="module")
def ids(corpus):
    """The train split as one array, from the files themselves."""
    files = sorted(corpus.folder.glob("train.*.bin"))
    assert len(files) > 5
    return np.concatenate([np.fromfile(path, "<u2") for path in files])


@pytest.fixture
def copy(corpus, tmp_path):
    shutil.copytree(corpus.folder, tmp_path / "copy")
    return tmp_path / "copy"


@given(st.data())
def test_reading_is_slicing(corpus, ids, data):
    split = corpus.split("train")
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    assert np.array_equal(split.read(start, count), ids[start : start + count])


def test_reading_inside_a_shard_copies_nothing(corpus, ids):
    view = corpus.split("train").read(SHARD, 257)
    assert view.base is not None
    assert not view.flags.writeable
    assert np.array_equal(view, ids[SHARD : SHARD + 257])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, -1), (10**9, 1)])
def test_reading_outside_is_an_error(corpus, start, count):
    with pytest.raises(IndexError, match="split 'train'"):
        corpus.split("train").read(start, count)


def test_rows(corpus, ids):
    starts = np.array([0, 998, 5])
    rows = corpus.split("train").rows(starts, 257)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, np.stack([ids[start : start + 257] for start in starts]))


def test_documents_end_with_the_end_of_text_and_decode_to_the_source(corpus):
    tokenizer = corpus.tokenizer()
    source = Text([corpus.folder.parent / "notes.txt"], fractions=(0.8, 0.1, 0.1))
    for name in corpus.splits:
        split = corpus.split(name)
        texts = [document.text for document in source.documents(name)]
        assert split.documents == len(texts)
        assert split.offsets[0] == 0 and split.offsets[-1] == split.tokens
        for index, text in enumerate(texts):
            document = split.document(index)
            assert document[-1] == corpus.end_of_text == 256
            assert tokenizer.decode(document[:-1]) == text
        assert split.bytes == sum(len(text.encode()) for text in texts) == split.tokens - split.documents
        assert split.words == sum(len(text.split()) for text in texts)
        assert split.lines == sum(text.count("\n") for text in texts)
        assert split.labels is None
    with pytest.raises(IndexError):
        corpus.split("test").document(corpus.split("test").documents)
    with pytest.raises(InputError, match="Did you mean 'valid'"):
        corpus.split("val")


def test_classification_keeps_labels_and_adds_no_end_of_text(tmp_path):
    source = GeneratedListOps("listops", examples=(300, 20, 20))
    corpus = prepare(source, tmp_path / "corpus", BYTES)
    assert (corpus.kind, corpus.labels) == ("classification", list("0123456789"))
    split = corpus.split("train")
    expected = list(source.documents("train"))
    assert split.labels.tolist() == [document.label for document in expected]
    assert [bytes(split.document(n).astype(np.uint8)).decode() for n in range(300)] == [d.text for d in expected]
    entry = corpus.manifest["splits"]["train"]
    assert entry["label_counts"] == np.bincount(split.labels, minlength=10).tolist()
    assert Corpus.open(tmp_path / "corpus", verify=True).fingerprint == corpus.fingerprint


def test_the_manifest_says_all(corpus):
    manifest = corpus.manifest
    assert manifest["format"] == "chiar-corpus/1"
    assert manifest["dtype"] == "uint16"
    assert manifest["options"]["hash_split"] == {"train": 0.8, "valid": 0.1, "test": 0.1}
    assert manifest["tokenizer"] == corpus.tokenizer().describe()
    assert manifest["inputs"]["files"] == 1
    assert str(corpus.folder.parent) not in json.dumps(manifest)
    assert fingerprint(manifest) == manifest["fingerprint"]
    assert fingerprint({**manifest, "name": "other"}) != manifest["fingerprint"]


def test_a_flipped_byte_is_found_in_any_file(copy):
    Corpus.open(copy, verify=True)
    for name in ("train.002.bin", "valid.000.bin", "train.documents.npy"):
        path = copy / name
        right = path.read_bytes()
        path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        Corpus.open(copy)
        with pytest.raises(InputError, match=f"{name} does not have the hash"):
            Corpus.open(copy, verify=True)
        path.write_bytes(right)
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"use_regex": false', '"use_regex": true'))
    with pytest.raises(InputError, match="not the tokenizer this corpus"):
        Corpus.open(copy, verify=True)


def test_wrong_sizes_are_found_without_reading(copy):
    path = copy / "train.001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match="has 1998 bytes, expected 2000"):
        Corpus.open(copy)
    path.unlink()
    with pytest.raises(InputError, match=r"train\.001\.bin is missing"):
        Corpus.open(copy)


def rewrite(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["fingerprint"] = fingerprint(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_manifests_that_cannot_be_used(copy, tmp_path):
    def refused(message):
        with pytest.raises(InputError, match=message):
            Corpus.open(copy)

    with pytest.raises(InputError, match="not a prepared corpus"):
        Corpus.open(tmp_path)
    splits = json.loads((copy / "manifest.json").read_text())["splits"]
    splits["valid"]["shards"][0]["file"] = "../outside.bin"
    rewrite(copy, splits=splits)
    refused("a file outside its folder")
    rewrite(copy, splits={"train": {}})
    refused("incomplete")
    rewrite(copy, format="chiar-corpus/9")
    refused("'chiar-corpus/9', expected 'chiar-corpus/1'")
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace("chiar-corpus/9", "chiar-corpus/1"))
    refused("changed after the preparation")
    (copy / "manifest.json").write_text(text[:-9])
    refused("damaged")


def test_arrays_are_never_unpickled(copy):
    array = np.array([{"a": 1}], dtype=object)
    np.save(copy / "valid.documents.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=r"not a readable \.npy"):
        _ = Corpus.open(copy).split("valid").offsets
    np.save(copy / "valid.documents.npy", np.zeros(3))
    with pytest.raises(InputError, match="whole numbers"):
        _ = Corpus.open(copy).split("valid").offsets


def test_corpora_of_different_tokenizers_do_not_mix(corpus, tmp_path):
    from chiar.data.tokenizer_choice import TokenizerChoice

    source = Text([corpus.folder.parent / "notes.txt"])
    other = prepare(source, tmp_path / "other", TokenizerChoice("bpe", vocab_size=280))
    with pytest.raises(InputError, match="different tokenizers"):
        corpus.require_same_tokenizer(other)
    same = prepare(source, tmp_path / "same", TokenizerChoice(like=tmp_path / "other"))
    other.require_same_tokenizer(same)
