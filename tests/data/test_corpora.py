"""Every corpus on small files in the layout of its publisher, and what each refuses."""

import ast
import gzip
import json
import lzma
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from chiar.data import corpora
from chiar.data.catalog import build_source
from chiar.data.corpora import Labelled, Stdlib, WikiText
from chiar.data.own_files import Text
from chiar.data.prepare import TokensFile
from helpers import refused
from small_corpora import WHOLE, all_refused, sentence, text_file, wikitext_folder


def texts(source, split="train"):
    return [document.text for document in source.documents(split)]


def everything(source):
    return [document for split in source.splits for document in source.documents(split)]


def test_hash_splits_keep_their_shares_and_never_move_a_document():
    fractions = corpora.carve_all((0.8, 0.1, 0.1))
    names = [corpora.split_by_hash(f"document {n}", fractions) for n in range(4000)]
    # Three standard errors of a share of 0.1 at 4,000 draws are 0.014.
    assert [names.count(split) / 4000 for split in ("valid", "test")] == pytest.approx([0.1, 0.1], abs=0.015)
    assert names[::-1] == [corpora.split_by_hash(f"document {n}", fractions) for n in reversed(range(4000))]
    for impossible in [(0.9, 0.1, 0.1), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1)]:
        refused("split fractions must", corpora.carve_all, impossible)
    valid, none = "basic_val.tsv dev.jsonl 00-validation.parquet", "notes.txt training.txt train-test.txt"
    for split, files in {"test": "test_d20s.tsv.xz", "valid": valid, None: none}.items():
        assert {corpora.split_of_file(Path(name)) for name in files.split()} == {split}


@pytest.mark.parametrize(("form", "name"), [("tokens", "wikitext-103"), ("raw", "wikitext-103-raw")])
def test_wikitext_documents_are_articles_and_lose_no_byte(tmp_path, form, name):
    expected = wikitext_folder(tmp_path, form)
    plain = tmp_path / f"wiki.test.{form}"
    (tmp_path / f"wiki.test.{form}.xz").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    source = WikiText([tmp_path], name)
    assert {split: texts(source, split) for split in source.splits} == expected
    # Only titles between blank lines begin an article.
    first = " \n = A = \n \n text \n = x = y = \n = b = \n \n = = c = = \n \n"
    second = " \n = D = E = \n \n more \n"
    assert list(corpora.articles((first + second).splitlines(keepends=True))) == [first, second]
    assert list(corpora.articles(["no title\n", "at all\n"])) == ["no title\nat all\n"]


def test_wikitext_from_the_hub_equals_the_files(tmp_path, monkeypatch):
    """The Hub stores lines, and blank ones as empty text."""
    expected, source = wikitext_folder(tmp_path), WikiText([], "wikitext-103", from_hub=True)
    lines = (tmp_path / "wiki.valid.tokens").read_text().splitlines(keepends=True)
    rows = [{"text": "" if line.isspace() else line} for line in lines]
    load_dataset = Mock(side_effect=[rows, ConnectionError("no network")])
    monkeypatch.setitem(sys.modules, "datasets", Mock(load_dataset=load_dataset))
    assert texts(source, "valid") == expected["valid"]
    load_dataset.assert_called_with("Salesforce/wikitext", "wikitext-103-v1", split="validation", streaming=True)
    refused("could not be fetched from the Hub: no network", texts, source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("pip install 'chiar\\[hub\\]'", texts, source)


def test_imdb_in_the_official_layout(tmp_path):
    for split, count in (("train", 20), ("test", 6)):
        for label, word in (("neg", "poor"), ("pos", "fine"), ("unsup", "unlabelled")):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            for n in range(count):
                path = tmp_path / "aclImdb" / split / label / f"{n}_{9 if label == 'pos' else 2}.txt"
                path.write_text(f"{split} {n} {word}<br />{sentence(n)}")
    source = Labelled([tmp_path], "imdb", fractions=(0.7, 0.3, 0.0))
    assert (source.splits, source.kind, source.labels) == (("train", "valid", "test"), "classification", ("neg", "pos"))
    assert len(everything(source)) == 52
    assert all(("fine" in d.text) == (d.label == 1) and "unlabelled" not in d.text for d in everything(source))
    assert [d.label for d in source.documents("test")] == [0, 1] * 6
    (tmp_path / "aclImdb" / "test" / "pos" / "3_9.txt").write_text("")
    refused(r"3_9.txt is empty", texts, source, "test")
    (tmp_path / "aclImdb" / "train" / "neg").rename(tmp_path / "negative")
    refused("no folder neg", Labelled, [tmp_path], "imdb")


def test_imdb_tables(tmp_path):
    refused("holds neither", Labelled, [tmp_path], "imdb")
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b'label\ttext\n0\tpoor "quoted, \n1\tfine\n'))
    (tmp_path / "valid.csv").write_text('review,sentiment\n"fine, with\na ""second"" line",positive\npoor,negative\n')
    (tmp_path / "test.tsv").write_text("1\tno header\n")
    source = Labelled([tmp_path], "imdb")
    assert list(source.documents("train")) == [('poor "quoted, ', 0), ("fine", 1)]
    assert list(source.documents("valid")) == [('fine, with\na "second" line', 1), ("poor", 0)]
    assert list(source.documents("test")) == [("no header", 1)]
    cases = {"label\ttext\n2\tx\n": "line 2 cannot be read: label '2'", "label\ttext\n1\n": "line 2 .* 1 columns"}
    cases |= {"label\ttext\n1\t \n": "a label but no text", "": "is empty"}
    all_refused(lambda: texts(source, "test"), tmp_path / "test.tsv", cases)


GLUE = [("SST-2", "sentence\tlabel\n", 'a "fine" film \t1\n', ('a "fine" film ', 1))]
GLUE += [("CoLA", "", "gj04\t0\t*\tThe more, the.\n", ("The more, the.", 0))]
GLUE += [("MRPC", "Quality\t#1 ID\t#1 String\t#2 String\n", '1\t1\tHe said "\tYes , he\n', ('He said "\nYes , he', 1))]
GLUE += [("RTE", "index\tsentence1\tsentence2\tlabel\n", "0\tA.\tB.\tnot_entailment\n", ("A.\nB.", 1))]


@pytest.mark.parametrize(("folder", "header", "row", "expected"), GLUE)
def test_glue(tmp_path, folder, header, row, expected):
    name, inner = folder.lower(), tmp_path / folder
    inner.mkdir()
    (inner / "train.tsv").write_text(header + row + row)
    (inner / "dev.tsv.xz").write_bytes(lzma.compress((header + row).encode()))
    (inner / "test.tsv").write_text("without labels\n")
    for place in (tmp_path, inner):
        source = Labelled([place], name)
        found = {split: list(source.documents(split)) for split in source.splits}
        assert found == {"train": [expected, expected], "valid": [expected]}
    all_refused(lambda: texts(source), inner / "train.tsv", {header + "a\tb\tc\td\te\n": "cannot be read"})


def test_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\\ntwo", "body": "b"}\n\n{"text": "é", "body": ""}\n')
    source = Text([path], fractions=WHOLE)
    assert texts(source) == ["one\ntwo", "é"]
    assert texts(Text([path], fractions=WHOLE, field="body")) == ["b"]
    cases = {"{": "line 1 is not JSON", '{"a": 1, "b": 2}': "no field 'text' \\(it has a, b\\)", "[]": "no field"}
    contents = {3: "is int, expected text", "\0": "NUL", "\ud800": "surrogate"}
    cases |= {json.dumps({"text": content}): message for content, message in contents.items()}
    all_refused(lambda: texts(source), path, cases)


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow.parquet", None)
        refused("pip install 'chiar\\[parquet\\]'", texts, Text([path]))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    refused("not a readable parquet file", texts, Text([path]))
    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(3000)], "other": range(3000)}), path)
    assert texts(Text([path], fractions=WHOLE)) == [f"row {n}" for n in range(3000)]
    for field, message in {"body": "no field 'body' \\(it has text, other\\)", "other": "'other' is int"}.items():
        refused(f"row 1.*{message}", texts, Text([path], field=field))


def test_damaged_and_missing_files(tmp_path):
    binary = {b"fine\nthen \xff\xfe": r"not UTF-8 text \(byte 10\)", b"fine\nthen \0": r"NUL character \(byte 10\)"}
    files = {"a.txt": binary, "a.txt.gz": {gzip.compress(b"text " * 1000)[:40]: "damaged"}}
    files |= {name: {b"not compressed": "damaged"} for name in ("a.txt.xz", "a.txt.bz2")}
    for name, cases in (files | {"a.tsv": {b"1\ttext": "is a table"}}).items():
        all_refused(lambda name=name: texts(Text([tmp_path / name])), tmp_path / name, cases)
    (tmp_path / "empty").mkdir()
    for name, message in [("missing.txt", "there is no file or folder"), ("empty", "holds no file that can")]:
        refused(message, Text, [tmp_path / name])


def test_harvesting_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(Stdlib, "folder", tmp_path)
    refused("no Python sources", Stdlib)
    files = {"first.py": '"""First."""\nraise SystemExit\ndef f(x, y=1):\n    "Do f."\n', "third.py": "'Do g.'\n"}
    files["pydoc_data/topics.py"] = "# a comment\ntopics = {'b': 'B\\n', 'a': 'A\\n'}\n"
    files["second.py"] = "class C:\n    'Do f.'\n    if 1:\n        async def g(self): 'Do g.'\n"
    for name, code in (files | {"broken.py": "def (", "test/fourth.py": "'A test.'"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    first, second = "first\n\nFirst.\n\nfirst.f(x, y=1)\n\nDo f.\n", "second.C.g(self)\n\nDo g.\n"
    assert texts(Stdlib(fractions=WHOLE)) == [first, "a\n\nA\n", "b\n\nB\n", second]
    assert list(corpora.docstrings(ast.parse("'''\\ud800'''"), "m")) == []


def test_tokens_files_are_concatenated_in_order(tmp_path):
    parts = np.arange(2750, dtype="<u2").reshape(11, 250)
    for number, part in enumerate(parts):  # 10 comes after 9, not after 1
        (tmp_path / f"train.{number}.u16.xz").write_bytes(lzma.compress(part.tobytes()))
    (tmp_path / "val.bin").write_bytes(b"odd")
    source = TokensFile([tmp_path])
    assert source.splits == ("train", "valid")
    assert np.array_equal(np.concatenate(list(source.blocks("train"))), parts.ravel())
    refused("odd number of bytes", list, source.blocks("valid"))
    (tmp_path / "train.3.u16.xz").unlink()
    refused("not numbered", TokensFile, [tmp_path])


def test_the_catalog_finds_corpora_by_name_and_files_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = text_file(tmp_path / "notes.txt")
    wikitext_folder(tmp_path)
    (tmp_path / "imdb").write_text("a file, named like a corpus")
    for arguments in ([str(path)], ["text", str(path)], ["./imdb"]):
        assert isinstance(build_source(arguments), Text)
    assert build_source(["ListOps"]).name == "listops"
    cases = {"": "name a corpus", "wikitex-2": "Did you mean 'wikitext-2'", "wikitext-2": "needs its files"}
    cases |= {"wikitext-2 . .": "one folder", "wikitext-2 wiki.test.tokens": "not a folder", "imdb": "one folder"}
    cases |= {"wikitext-2-raw .": "holds none of", "stdlib notes.txt": "takes no files"}
    cases |= {"tokens notes.txt": "not a folder", "text": "name at least one"}
    for arguments, message in cases.items():
        refused(message, build_source, arguments.split())
    refused("--depth is an option of listops, listops-lra, not for imdb", build_source, ["imdb", "."], depth=3)
    refused("--seed is .*not for listops from files", build_source, ["listops", "notes.txt"], seed=1)
