"""Preparation: the same bytes however it is done, whatever happens on the way."""

import json
import lzma
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from corpora import BYTES, sentence, text_file, tree, wikitext_folder

from chiar.data import encoding, writer
from chiar.data.documents import Document, Source
from chiar.data.encoding import WorkerDied
from chiar.data.imdb import Imdb
from chiar.data.prepare import prepare
from chiar.data.progress import Silent
from chiar.data.shards import Corpus
from chiar.data.text import Text
from chiar.data.tokenizer_choice import TokenizerChoice
from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens_file import TokensFile
from chiar.data.wikitext import WikiText
from chiar.errors import InputError

BPE = TokenizerChoice("bpe", vocab_size=300)


class Notes(Silent):
    def __init__(self):
        self.sentences = []

    def note(self, sentence):
        self.sentences.append(sentence)


@pytest.fixture
def small_batches(monkeypatch):
    """So that little text is many batches, and goes to other processes."""
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 10)


@pytest.fixture
def source(tmp_path):
    return Text([text_file(tmp_path / "notes.txt")], fractions=(0.8, 0.1, 0.1))


@pytest.mark.parametrize("choice", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.usefixtures("small_batches")
def test_any_number_of_workers_and_any_run_gives_the_same_bytes(tmp_path, source, choice):
    prepare(source, tmp_path / "one", choice, workers=1, shard_tokens=1000)
    prepare(source, tmp_path / "again", choice, workers=1, shard_tokens=1000)
    prepare(source, tmp_path / "three", choice, workers=3, shard_tokens=1000)
    expected = tree(tmp_path / "one")
    assert expected == tree(tmp_path / "again") == tree(tmp_path / "three")
    left = {"manifest.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert {name for name in expected if not name.endswith((".bin", ".npy"))} == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "notes.txt", "one", "three"]


def test_compression_and_place_do_not_change_the_corpus(tmp_path):
    wikitext_folder(tmp_path / "plain")
    (tmp_path / "packed").mkdir()
    for path in (tmp_path / "plain").iterdir():
        (tmp_path / "packed" / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    prints = {
        prepare(WikiText("wikitext-2", [tmp_path / name]), tmp_path / f"{name}-out", BYTES).fingerprint
        for name in ("plain", "packed")
    }
    assert len(prints) == 1


def test_wikitext_counts_are_those_of_the_literature(tmp_path):
    """Words and newlines of the file, each newline an <eos> there."""
    wikitext_folder(tmp_path)
    corpus = prepare(WikiText("wikitext-103", [tmp_path]), tmp_path / "out", BPE)
    for name in corpus.splits:
        text = (tmp_path / f"wiki.{name}.tokens").read_text()
        split = corpus.split(name)
        assert (split.words, split.lines, split.bytes) == (len(text.split()), text.count("\n"), len(text.encode()))
        stored = [corpus.tokenizer().decode(split.document(n)) for n in range(split.documents)]
        assert "".join(stored) == text
    assert all(split.read(int(end) - 1, 1)[0] == corpus.end_of_text for end in split.offsets[1:])


def test_shards_that_are_exactly_full(tmp_path):
    (tmp_path / "train.txt").write_text("x" * 9)
    corpus = prepare(Text([tmp_path / "train.txt"], fractions=(1.0, 0.0, 0.0)), tmp_path / "out", BYTES, shard_tokens=5)
    assert [shard["tokens"] for shard in corpus.manifest["splits"]["train"]["shards"]] == [5, 5]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.bin")) == ["train.000.bin", "train.001.bin"]
    assert corpus.split("train").read(0, 10).tolist() == [120] * 9 + [256]


class Interrupted(Source):
    """A text that fails after some documents, as an interruption would, until it is allowed to pass."""

    def __init__(self, fail_at):
        self.fail_at = fail_at
        super().__init__("interrupted", ["train", "valid"], {}, [])

    def read(self, given):
        for number in range(200):
            if given == "train" and number == self.fail_at:
                raise KeyboardInterrupt
            yield Document(f"{given} {sentence(number)}")


@pytest.mark.parametrize("choice", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_preparation_goes_on_where_it_stopped(tmp_path, monkeypatch, choice):
    monkeypatch.setattr(writer, "CHECKPOINT_SECONDS", 0.0)
    prepare(Interrupted(None), tmp_path / "whole", choice, shard_tokens=700)
    stopped = Interrupted(None)
    if choice is BPE:  # the tokenizer's training reads all of train first
        prepare(stopped, tmp_path / "other", choice, shard_tokens=700)
        tokenizer = tmp_path / "other" / "tokenizer"
        choice_of = TokenizerChoice("bpe", path=tokenizer)
    else:
        choice_of = choice
    stopped.fail_at = 95
    with pytest.raises(KeyboardInterrupt):
        prepare(stopped, tmp_path / "out", choice_of, shard_tokens=700)
    partial = tmp_path / ".out.partial"
    assert json.loads((partial / "train.progress.json").read_text())["counts"]["documents"] == 90
    assert not (tmp_path / "out").exists()
    # What was written after the last note is not trusted.
    with (partial / "train.ends.part").open("ab") as handle:
        handle.write(b"half a number")
    with max(partial.glob("train.*.bin")).open("ab") as handle:
        handle.write(b"half a batch")
    encoded = []
    encode = encoding.encode
    monkeypatch.setattr(encoding, "encode", lambda *a: encoded.extend(a[2]) or encode(*a))
    stopped.fail_at = None
    notes = Notes()
    prepare(stopped, tmp_path / "out", choice_of, shard_tokens=700, display=notes)
    assert len(encoded) == 110 + 200
    assert notes.sentences == ["going on with the unfinished out."]
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert not partial.exists()


@pytest.mark.usefixtures("small_batches")
def test_other_inputs_begin_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted(95), tmp_path / "out", BYTES, shard_tokens=700)
    notes = Notes()
    prepare(Interrupted(None), tmp_path / "out", BYTES, shard_tokens=800, display=notes)
    assert "begun anew" in notes.sentences[0]
    prepare(Interrupted(None), tmp_path / "whole", BYTES, shard_tokens=800)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


SLOW = """
import sys, time
from chiar.data import encoding, writer
from chiar.data.imdb import Imdb
from chiar.data.prepare import prepare
from chiar.data.text import Text
from chiar.data.tokenizer_choice import TokenizerChoice
from pathlib import Path

def slow(counts): time.sleep(0.02)

if __name__ == "__main__":
    writer.CHECKPOINT_SECONDS = 0.0
    encoding.BATCH_DOCUMENTS = 10
    from chiar.data.progress import Silent
    display = Silent()
    display.at = slow
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    source = Text([folder / "notes.txt"], fractions=(0.8, 0.1, 0.1))
    prepare(source, folder / "out", TokenizerChoice("bpe", vocab_size=300), workers=workers, shard_tokens=1000,
            display=display)
"""


def wait_until_empty(group):
    """Until no process of the group runs any more."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the killed process left others behind")


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_and_resume(tmp_path, workers):
    text_file(tmp_path / "notes.txt", documents=800)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, str(script), str(tmp_path), str(workers)]
    for documents in (100, 400):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        progress = tmp_path / ".out.partial" / "train.progress.json"
        while process.poll() is None and not (
            progress.is_file() and json.loads(progress.read_text())["counts"]["documents"] >= documents
        ):
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        assert not (tmp_path / "out").exists()
        wait_until_empty(process.pid)
    notes = Notes()
    source = Text([tmp_path / "notes.txt"], fractions=(0.8, 0.1, 0.1))
    prepare(source, tmp_path / "out", BPE, shard_tokens=1000, display=notes)
    assert notes.sentences == ["going on with the unfinished out."]
    prepare(source, tmp_path / "whole", BPE, shard_tokens=1000)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_batches")
def test_a_dead_worker_is_a_sentence_and_the_work_is_kept(tmp_path, source, monkeypatch):
    monkeypatch.setattr(writer, "CHECKPOINT_SECONDS", 0.0)

    class Killer(Silent):
        def at(self, counts):
            import multiprocessing

            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(WorkerDied, match="run the same command again"):
        prepare(source, tmp_path / "out", BYTES, workers=2, display=Killer())
    prepare(source, tmp_path / "out", BYTES, workers=1)
    prepare(source, tmp_path / "whole", BYTES)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_two_preparations_of_one_corpus_do_not_meet(tmp_path, source):
    class Second(Silent):
        def at(self, counts):
            with pytest.raises(InputError, match="another process is preparing"):
                prepare(source, tmp_path / "out", BYTES)

    prepare(source, tmp_path / "out", BYTES, display=Second())
    Corpus.open(tmp_path / "out", verify=True)


def gpt2_like(folder):
    """A tokenizer of bytes under another id of the end of text, and files of its ids."""
    tokenizer = Tokenizer.train([sentence(n, 40) for n in range(30)], 300)
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def test_tokens_files_become_a_corpus_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr("chiar.data.tokens_file.BLOCK_BYTES", 64)  # words and characters lie across blocks
    tokenizer = gpt2_like(tmp_path)
    texts = [f"{sentence(n, 30)}\n naïve 漢字" for n in range(12)]
    end = np.array([tokenizer.end_of_text], "<u2")
    rows = [np.concatenate([ids, end]) for ids in tokenizer.encode_batch(texts)]
    folder = tmp_path / "ids"
    folder.mkdir()
    np.concatenate(rows).tofile(folder / "train.u16")
    np.concatenate([*rows[:3], rows[3][:-1]]).tofile(folder / "valid.u16")
    corpus = prepare(TokensFile([folder]), tmp_path / "out", TokenizerChoice("bpe", path=tmp_path / "tokenizer"))
    assert corpus.name == "ids"
    train, valid = corpus.split("train"), corpus.split("valid")
    assert np.array_equal(train.read(0, train.tokens), np.concatenate(rows))
    assert (train.documents, valid.documents) == (12, 4)
    assert train.words == sum(len(text.split()) for text in texts)
    assert train.bytes == sum(len(text.encode()) for text in texts)
    assert train.lines == 12
    assert valid.words == sum(len(text.split()) for text in texts[:4])
    assert [tokenizer.decode(valid.document(n)) for n in range(4)] == texts[:4]
    Corpus.open(tmp_path / "out", verify=True)


def test_tokens_files_need_their_own_tokenizer(tmp_path):
    folder = tmp_path / "ids"
    folder.mkdir()
    np.array([299, 300], "<u2").tofile(folder / "train.u16")
    gpt2_like(tmp_path)
    for choice, message in [
        (TokenizerChoice(), "tokenised already"),
        (TokenizerChoice("bpe", path=tmp_path / "tokenizer"), "holds id 300, outside the 300 entries"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare(TokensFile([folder]), tmp_path / "out", choice)
    (folder / "train.u16").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        prepare(TokensFile([folder]), tmp_path / "out", BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids", "tokenizer"]


def test_refusals_leave_nothing_behind(tmp_path, source):
    def refused(message, *arguments, **options):
        before = tree(tmp_path)
        with pytest.raises(InputError, match=message):
            prepare(*arguments, **options)
        assert tree(tmp_path) == before
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    out = tmp_path / "out"
    (tmp_path / "empty.txt").write_text("\n \n\n")
    refused("is empty", Text([tmp_path / "empty.txt"], fractions=(1.0, 0.0, 0.0)), out, BYTES)
    (tmp_path / "short.txt").write_text("one document")
    refused("too few documents for a valid split", Text([tmp_path / "short.txt"]), out, BYTES)
    (tmp_path / "binary.txt").write_bytes(b"fine\n\n" * 2000 + b"\xff\xfe")
    refused("is it binary", Text([tmp_path / "binary.txt"], fractions=(1.0, 0.0, 0.0)), out, BYTES)
    refused("300 workers are more than the \\d+ documents", source, out, BYTES, workers=300)
    refused("--workers must be at least 1", source, out, BYTES, workers=0)
    refused("--shard-tokens", source, out, BYTES, shard_tokens=0)
    refused("at least 257", source, out, TokenizerChoice(vocab_size=100))
    prepare(source, tmp_path / "full", BYTES)
    refused("exists already", source, tmp_path / "full", BYTES)
    refused("exists already", source, tmp_path / "short.txt", BYTES)
    refused("does not match", source, out, TokenizerChoice("bpe", like=tmp_path / "full"))
    refused("does not match", source, out, TokenizerChoice(vocab_size=300, like=tmp_path / "full"))
    wikitext_folder(tmp_path / "wiki")
    (tmp_path / "wiki" / "wiki.train.tokens").unlink()
    refused("no train split to train a BPE on", WikiText("wikitext-2", [tmp_path / "wiki"]), out, TokenizerChoice())


def test_more_cores_than_documents_are_fine(tmp_path, monkeypatch):
    monkeypatch.setattr("chiar.data.prepare.available_cores", lambda: 64)
    (tmp_path / "train.txt").write_text("one document")
    source = Text([tmp_path / "train.txt"], fractions=(1.0, 0.0, 0.0))
    assert prepare(source, tmp_path / "out", BYTES, workers=None).split("train").documents == 1


def test_an_empty_folder_may_be_the_target(tmp_path, source):
    (tmp_path / "out").mkdir()
    prepare(source, tmp_path / "out", BYTES)
    Corpus.open(tmp_path / "out", verify=True)


def test_parts_of_published_sets_say_so(tmp_path):
    wikitext_folder(tmp_path)
    corpus = prepare(WikiText("wikitext-2", [tmp_path]), tmp_path / "wiki", BYTES)
    assert len(corpus.remarks) == 4
    assert "the published wikitext-2 245,569: not the same set" in corpus.remarks[2]
    assert "not in the published order" in corpus.remarks[3]
    text = (tmp_path / "wiki.train.tokens").read_text().replace("= train 0 =", "= Valkyria Chronicles III =")
    (tmp_path / "wiki.train.tokens").write_text(text)
    assert not any("order" in r for r in prepare(WikiText("wikitext-2", [tmp_path]), tmp_path / "b", BYTES).remarks)
    (tmp_path / "train.tsv").write_text("".join(f"{n % 2}\treview {n}\n" for n in range(50)))
    imdb = prepare(Imdb([tmp_path]), tmp_path / "imdb", BYTES)
    assert imdb.remarks == [
        "train and valid together hold 50 documents, the published imdb 25,000: not the same set.",
        "imdb has no test split here.",
    ]
    assert prepare(Text([text_file(tmp_path / "notes.txt")]), tmp_path / "text", BYTES).remarks == []
