"""Preparation: the same bytes whatever happens on the way. The format: random access, and damage that is found."""

import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiar.data import prepare as module
from chiar.data.corpora import Document, Source, WikiText
from chiar.data.listops import GeneratedListOps
from chiar.data.own_files import Text
from chiar.data.prepare import Display, Enwik8, TokensFile, prepare
from chiar.data.shards import Corpus, fingerprint
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from chiar.errors import InputError
from commands import wait_until
from helpers import refused
from small_corpora import BYTES, WHOLE, all_refused, sentence, text_file, tree, wikitext_folder

BPE = TokenizerChoice("bpe", vocab_size=300)


def noted():
    """A display, and the sentences it was given."""
    display, sentences = Display(), []
    display.note = sentences.append
    return display, sentences


@pytest.fixture
def source(tmp_path):
    return Text([text_file(tmp_path / "notes.txt")], fractions=(0.8, 0.1, 0.1), unit="paragraphs")


def test_wikitext_counts_are_those_of_the_literature_and_compression_changes_nothing(tmp_path):
    """Words and newlines of the file, each newline an <eos> there."""
    wikitext_folder(tmp_path / "files")
    corpus = prepare(WikiText([tmp_path / "files"], "wikitext-103"), tmp_path / "out", BPE)
    for path in list((tmp_path / "files").iterdir()):
        text, split = path.read_text(), corpus.split(path.name.split(".")[1])
        assert (split.words, split.lines, split.bytes) == (len(text.split()), text.count("\n"), len(text.encode()))
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    packed = prepare(WikiText([tmp_path / "files"], "wikitext-103"), tmp_path / "other", BPE)
    assert packed.fingerprint == corpus.fingerprint


def test_shards_that_are_exactly_full(tmp_path):
    (tmp_path / "train.txt").write_text("x" * 9)
    corpus = prepare(Text([tmp_path / "train.txt"], fractions=WHOLE), tmp_path / "out", BYTES, shard_tokens=5)
    assert [shard["tokens"] for shard in corpus.manifest["splits"]["train"]["shards"]] == [5, 5]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == ["train.000.bin", "train.001.bin"]
    assert corpus.split("train").read(0, 10).tolist() == [120] * 9 + [256]


class Interrupted(Source):
    """A text that fails after some documents, as an interruption would, until it is allowed to pass."""

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        super().__init__("interrupted", ["train", "valid"], {}, [])

    def read(self, given):
        for number in range(200):
            if given == "train" and number == self.fail_at:
                raise KeyboardInterrupt
            yield Document(f"{given} {sentence(number)}")


def test_an_interrupted_preparation_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)  # so that each document is noted
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and only a power cut would show
    # A tokenizer's training would read all of train first.
    Tokenizer.train([sentence(n) for n in range(200)], 300).save(tmp_path / "tokenizer")
    choice = TokenizerChoice("bpe", path=tmp_path / "tokenizer")
    prepare(Interrupted(), tmp_path / "whole", choice, shard_tokens=700)
    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted(95), tmp_path / "out", choice, shard_tokens=700)
    partial = tmp_path / ".out.partial"
    assert json.loads((partial / "train.progress.json").read_text())["counts"][0] == 95
    assert not (tmp_path / "out").exists()
    # What was written after the last note is not trusted.
    for path in (partial / "train.documents.part", max(partial.glob("train.*.bin"))):
        with path.open("ab") as handle:
            handle.write(b"half a number")
    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted(95), tmp_path / "other", choice, shard_tokens=800)
    encoded, encode_batch, (display, sentences) = [], Tokenizer.encode_batch, noted()
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *a: encoded.extend(a[1]) or encode_batch(*a))
    prepare(Interrupted(), tmp_path / "out", choice, shard_tokens=700, display=display)
    assert len(encoded) == 105 + 200
    prepare(Interrupted(), tmp_path / "other", choice, shard_tokens=700, display=display)
    assert sentences[0] == "resuming the unfinished out."
    assert "from other inputs or options is discarded; starting over" in sentences[1]
    assert tree(tmp_path / "out") == tree(tmp_path / "other") == tree(tmp_path / "whole")
    assert not partial.exists()


SLOW = """
import sys, time
from pathlib import Path
from chiar.data import prepare, tokenizers
from chiar.data.own_files import Text

folder, display, prepare.CHECKPOINT_SECONDS = Path(sys.argv[1]), prepare.Display(), 0.0
display.at = lambda *_: time.sleep(0.002)
source, choice = Text([folder / "notes.txt"], unit="paragraphs"), tokenizers.TokenizerChoice("bpe", vocab_size=300)
prepare.prepare(source, folder / "out", choice, shard_tokens=1000, display=display)
"""


def test_kill_9_and_resume(tmp_path):
    text_file(tmp_path / "notes.txt", documents=800)
    progress = tmp_path / ".out.partial" / "train.progress.json"
    for least in (100, 400):
        process = subprocess.Popen([sys.executable, "-c", SLOW, tmp_path], stderr=subprocess.DEVNULL)
        wait_until(lambda: progress.is_file() and json.loads(progress.read_text())["counts"][0] >= least)  # noqa: B023
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        assert not (tmp_path / "out").exists()
    source, (display, sentences) = Text([tmp_path / "notes.txt"], unit="paragraphs"), noted()
    prepare(source, tmp_path / "out", BPE, shard_tokens=1000, display=display)
    assert sentences == ["resuming the unfinished out."]
    prepare(source, tmp_path / "whole", BPE, shard_tokens=1000)
    left = {"manifest.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert {name for name in tree(tmp_path / "out") if not name.endswith((".bin", ".npy"))} == left
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_two_preparations_of_one_corpus_do_not_meet(tmp_path, source):
    (out := tmp_path / "out").mkdir()  # an empty folder may be the target
    (display := Display()).at = lambda *_: refused("another process is preparing", prepare, source, out, BYTES)
    prepare(source, out, BYTES, display=display)
    Corpus.open(out, verify=True)


def test_tokens_files_become_a_corpus_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr("chiar.data.prepare.BLOCK_BYTES", 64)  # words and characters lie across blocks
    monkeypatch.setattr(os, "fsync", lambda _: None)
    tokenizer = Tokenizer.train([sentence(n, 40) for n in range(30)], 300)
    tokenizer.save(tmp_path / "tokenizer")
    choice, folder = TokenizerChoice("bpe", path=tmp_path / "tokenizer"), tmp_path / "ids"
    texts = [f"{sentence(n, 30)}\n naïve 漢字" for n in range(12)]
    end = np.array([tokenizer.end_of_text], "<u2")
    rows = [np.concatenate([ids, end]) for ids in tokenizer.encode_batch(texts)]
    folder.mkdir()
    np.concatenate(rows).tofile(folder / "train.u16")
    np.concatenate([*rows[:3], rows[3][:-1]]).tofile(folder / "valid.u16")
    (display := Display()).at = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):  # such a split is one piece of work, begun again after an interruption
        prepare(TokensFile([folder]), tmp_path / "out", choice, display=display)
    corpus = prepare(TokensFile([folder]), tmp_path / "out", choice)
    assert corpus.name == "ids"
    train, valid = corpus.split("train"), corpus.split("valid")
    assert np.array_equal(train.read(0, train.tokens), np.concatenate(rows))
    assert (train.documents, valid.documents, train.lines) == (12, 4, 12)
    assert train.bytes == sum(len(text.encode()) for text in texts)
    assert [train.words, valid.words] == [sum(len(text.split()) for text in part) for part in (texts, texts[:4])]
    assert [tokenizer.decode(valid.document(n)) for n in range(4)] == texts[:4]
    Corpus.open(tmp_path / "out", verify=True)


def test_refusals_leave_nothing_behind(tmp_path, source, monkeypatch):
    contents = {"empty.txt": b"\n \n\n", "short.txt": b"one document", "binary.txt": b"fine\n\n" * 2000 + b"\xff\xfe"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    empty, short, binary = (Text([tmp_path / name]) for name in contents)
    prepare(source, full := tmp_path / "full", BYTES)
    wikitext_folder(tmp_path / "wiki")
    (tmp_path / "wiki" / "wiki.train.tokens").unlink()
    for folder, ids in (("ids", [299, 300]), ("none", [])):
        (tmp_path / folder).mkdir()
        np.array(ids, "<u2").tofile(tmp_path / folder / "train.u16")
    ids, none = TokensFile([tmp_path / "ids"]), TokensFile([tmp_path / "none"])
    before = tree(tmp_path)
    new = tmp_path / "out"
    cases = [("exists already", source, there, BYTES) for there in (full, tmp_path / "short.txt")]
    cases += [("--shard-tokens", source, new, BYTES, 0), ("at least 257", source, new, TokenizerChoice(vocab_size=100))]
    other = (TokenizerChoice("bpe", like=full), TokenizerChoice(vocab_size=300, like=full))
    cases += [("leave them out", source, new, choice) for choice in other]
    wiki = WikiText([tmp_path / "wiki"], "wikitext-2")
    cases += [("no train split", wiki, new, TokenizerChoice()), ("tokenised already", ids, new, TokenizerChoice())]
    cases += [("holds id 300, outside the 257 entries", ids, new, BYTES), ("is it binary", binary, new, BYTES)]
    for message, *arguments in cases:
        refused(message, prepare, *arguments)
        assert tree(tmp_path) == before and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(module, "partial_folder", Mock(side_effect=AssertionError("work was begun")))
    for source, message in ((empty, "is empty"), (none, "is empty"), (short, "split has no text: give more")):
        refused(message, prepare, source, new, BYTES)


SHARD = 1000
FRACTIONS = (0.8, 0.1, 0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = Text([text_file(folder / "notes.txt")], fractions=FRACTIONS, unit="paragraphs")
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


def test_rows_and_what_lies_outside(corpus, ids):
    split = corpus.split("train")
    rows = split.rows(starts := np.array([0, 998, 5]), 257)
    assert rows.dtype == np.int64 and np.array_equal(rows, [ids[start : start + 257] for start in starts])
    for start, count in [(-1, 2), (0, -1), (10**9, 1)]:
        with pytest.raises(IndexError, match="split 'train'"):
            split.read(start, count)
    refused("Did you mean 'valid'", corpus.split, "val")


def test_documents_end_with_the_end_of_text_and_decode_to_the_source(corpus):
    tokenizer = corpus.tokenizer()
    source = Text([corpus.folder.parent / "notes.txt"], fractions=FRACTIONS, unit="paragraphs")
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
    stored = [corpus.tokenizer().decode(split.document(n)) for n in range(300)]
    assert [*zip(stored, split.labels.tolist(), strict=True)] == expected
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
        refused(f"{name} does not have the hash", Corpus.open, copy, verify=True)
        (copy / name).write_bytes(right)
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"use_regex": false', '"use_regex": true'))
    refused("not the tokenizer this corpus", Corpus.open, copy, verify=True)
    path = copy / "train.001.bin"
    all_refused(lambda: Corpus.open(copy), path, {path.read_bytes()[:-2]: "has 1998 bytes, expected 2000"})
    path.unlink()
    refused(r"train\.001\.bin is missing", Corpus.open, copy)


@pytest.mark.parametrize("left", [0, 301], ids=["emptied", "cut inside an id"])
def test_a_shard_that_shrinks_while_it_is_open_is_a_sentence(copy, ids, left):
    """Were it mapped into memory, this would end the process by a bus error, or read zeros."""
    split = Corpus.open(copy).split("train")
    os.truncate(copy / "train.001.bin", left)
    whole = SHARD + left // 2
    assert np.array_equal(split.read(500, whole - 500), ids[500:whole])
    sentence = r"train\.001\.bin was cut short after it was opened: restore it.*--resume"
    refused(sentence, split.rows, np.array([0, 900]), 257)
    (copy / "train.000.bin").unlink()
    assert np.array_equal(split.read(0, SHARD), ids[:SHARD])  # held open


def test_manifests_that_cannot_be_used(copy):
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
    path.write_text(json.dumps(right))  # nor are arrays ever unpickled
    for array, message in [(np.array([{"a": 1}]), "npy is damaged, prepare"), (np.zeros(3), "whole numbers")]:
        np.save(copy / "valid.documents.npy", array, allow_pickle=True)
        refused(message, getattr, Corpus.open(copy).split("valid"), "offsets")


@pytest.mark.parametrize("name", ["enwik8", "enwik8.gz"])
def test_enwik8_is_cut_by_bytes(name, tmp_path, monkeypatch):
    """In the middle of a character, if need be; a file of another size is refused."""
    monkeypatch.setattr(Enwik8, "SIZES", {"train": 50, "valid": 7, "test": 7})
    monkeypatch.setattr("chiar.data.prepare.BLOCK_BYTES", 16)
    data = ("Füße " * 20).encode()[:64]
    pack = gzip.compress if name.endswith("gz") else bytes
    (tmp_path / name).write_bytes(pack(data))
    corpus = prepare(Enwik8([tmp_path / name], "enwik8"), tmp_path / "out", BYTES)
    read = [bytes(corpus.split(split).read(0, size).astype("u1")) for split, size in Enwik8.SIZES.items()]
    assert read == [data[:50], data[50:57], data[57:]] and corpus.split("train").tokens == 50
    for wrong, said in ((data[:-1], "shorter than the 64 bytes"), (data + b"x", "longer than the 64 bytes")):
        (tmp_path / name).write_bytes(pack(wrong))
        with pytest.raises(InputError, match=said):
            prepare(Enwik8([tmp_path / name], "enwik8"), tmp_path / "other", BYTES)
    with pytest.raises(InputError, match="--tokenizer bytes"):
        prepare(Enwik8([tmp_path / name], "enwik8"), tmp_path / "other", TokenizerChoice())
