"""Every corpus on small files in the layout of its publisher, and what each refuses."""

import ast
import gzip
import json
import lzma
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import sentence, text_file, wikitext_folder

from chiar.data.catalog import CATALOG, build_source
from chiar.data.documents import HashSplit, parse_fractions
from chiar.data.files import split_of_file
from chiar.data.glue import Glue
from chiar.data.imdb import Imdb
from chiar.data.stdlib import Stdlib, docstrings
from chiar.data.text import Text
from chiar.data.tokens_file import TokensFile
from chiar.data.wikitext import WikiText, articles
from chiar.errors import InputError


def texts(source, split="train"):
    return [document.text for document in source.documents(split)]


def everything(source):
    return [document for split in source.splits for document in source.documents(split)]


def test_hash_splits_keep_their_shares_and_never_move_a_document():
    split = HashSplit({"train": 0.8, "valid": 0.1, "test": 0.1})
    names = [split.split_of(f"document {n}") for n in range(4000)]
    # Three standard errors of a share of 0.1 at 4,000 draws are 0.014.
    assert names.count("valid") / 4000 == pytest.approx(0.1, abs=0.015)
    assert names.count("test") / 4000 == pytest.approx(0.1, abs=0.015)
    assert names == [split.split_of(f"document {n}") for n in range(4000)]
    assert HashSplit({"train": 1.0, "valid": 0.0}).splits == ("train",)


@pytest.mark.parametrize("text", ["", "1,0", "0.9,0.1,0.1", "a,b,c", "0,0.5,0.5", "1.2,-0.1,-0.1"])
def test_impossible_fractions(text):
    with pytest.raises(InputError, match="fractions"):
        parse_fractions(text)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.txt", "train"), ("test_d20s.tsv.xz", "test"), ("basic_val.tsv", "valid"), ("dev.jsonl", "valid"),
        ("notes.txt", None), ("training.txt", None), ("train-test.txt", None), ("00-validation.parquet", "valid"),
    ],
)  # fmt: skip
def test_splits_by_file_name(tmp_path, name, split):
    assert split_of_file(tmp_path / name) == split


@pytest.mark.parametrize("form", ["tokens", "raw"])
def test_wikitext_documents_are_articles_and_lose_no_byte(tmp_path, form):
    expected = wikitext_folder(tmp_path, form)
    (tmp_path / f"wiki.test.{form}.xz").write_bytes(lzma.compress((tmp_path / f"wiki.test.{form}").read_bytes()))
    (tmp_path / f"wiki.test.{form}").unlink()
    source = WikiText("wikitext-103-raw" if form == "raw" else "wikitext-103", [tmp_path])
    assert source.splits == ("train", "valid", "test")
    for split in source.splits:
        assert texts(source, split) == expected[split]


def test_only_titles_between_blank_lines_begin_an_article():
    first = " \n = A = \n \n text \n = x = y = \n = b = \n \n = = c = = \n \n"
    second = " \n = D = E = \n \n more \n"
    assert list(articles((first + second).splitlines(keepends=True))) == [first, second]
    assert list(articles([])) == []
    assert list(articles(["no title\n", "at all\n"])) == ["no title\nat all\n"]


def test_wikitext_with_some_splits(tmp_path):
    wikitext_folder(tmp_path)
    (tmp_path / "wiki.train.tokens").unlink()
    assert WikiText("wikitext-2", [tmp_path]).splits == ("valid", "test")
    for message, arguments in [
        ("holds none of", ("wikitext-2-raw", [tmp_path])),
        ("needs its files", ("wikitext-2", [])),
        ("one folder", ("wikitext-2", [tmp_path, tmp_path])),
        ("not a folder", ("wikitext-2", [tmp_path / "wiki.test.tokens"])),
    ]:
        with pytest.raises(InputError, match=message):
            WikiText(*arguments)


def test_wikitext_from_the_hub_equals_the_files(tmp_path, monkeypatch):
    """The Hub stores lines, and blank ones as empty text."""
    expected = wikitext_folder(tmp_path)
    asked = []

    def load_dataset(repository, subset, split, streaming):
        asked.append((repository, subset, split, streaming))
        name = {"validation": "valid"}.get(split, split)
        lines = (tmp_path / f"wiki.{name}.tokens").read_text().splitlines(keepends=True)
        return [{"text": "" if line.isspace() else line} for line in lines]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = WikiText("wikitext-103", [], from_hub=True)
    assert texts(source, "valid") == expected["valid"]
    assert asked == [("Salesforce/wikitext", "wikitext-103-v1", "validation", True)]

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(InputError, match="could not be fetched from the Hub: no network"):
        texts(source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install 'chiar\\[hub\\]'"):
        texts(source)


def imdb_folder(folder):
    for split, count in (("train", 20), ("test", 6)):
        for label, word in (("neg", "poor"), ("pos", "fine")):
            (folder / split / label).mkdir(parents=True)
            for n in range(count):
                text = f"{split} {n} {word}<br />{sentence(n)}"
                (folder / split / label / f"{n}_{9 if label == 'pos' else 2}.txt").write_text(text)
    (folder / "train" / "unsup").mkdir()
    (folder / "train" / "unsup" / "0_0.txt").write_text("unlabelled")


def test_imdb_in_the_official_layout(tmp_path):
    imdb_folder(tmp_path / "aclImdb")
    source = Imdb([tmp_path], fractions=(0.7, 0.3, 0.0))
    assert source.splits == ("train", "valid", "test")
    assert (source.kind, source.labels) == ("classification", ("neg", "pos"))
    documents = everything(source)
    assert len(documents) == 52
    assert all(("fine" in d.text) == (d.label == 1) for d in documents)
    test = list(source.documents("test"))
    assert [d.label for d in test] == [0, 1] * 6
    assert test[10].text.startswith("test 5 poor<br />")
    assert not any("unlabelled" in d.text for d in documents)
    (tmp_path / "aclImdb" / "test" / "pos" / "3_9.txt").write_text("")
    with pytest.raises(InputError, match=r"3_9.txt is empty"):
        texts(source, "test")


def test_imdb_tables(tmp_path):
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b'label\ttext\n0\tpoor "quoted, \n1\tfine\n'))
    (tmp_path / "valid.csv").write_text('review,sentiment\n"fine, with\na ""second"" line",positive\npoor,negative\n')
    (tmp_path / "test.tsv").write_text("1\tno header\n")
    source = Imdb([tmp_path])
    assert [tuple(d) for d in source.documents("train")] == [('poor "quoted, ', 0), ("fine", 1)]
    assert [tuple(d) for d in source.documents("valid")] == [('fine, with\na "second" line', 1), ("poor", 0)]
    assert [tuple(d) for d in source.documents("test")] == [("no header", 1)]


def test_imdb_refusals(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        Imdb([tmp_path])
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match="no folder neg"):
        Imdb([tmp_path])
    (tmp_path / "test").rmdir()
    for content, message in [
        ("label\ttext\n2\tx\n", "line 2 cannot be read: label '2'"),
        ("label\ttext\n1\n", "line 2 has 1 columns"),
        ("label\ttext\n1\t \n", "a label but no text"),
        ("", "is empty"),
    ]:
        (tmp_path / "test.tsv").write_text(content)
        with pytest.raises(InputError, match=message):
            texts(Imdb([tmp_path]), "test")


GLUE_ROWS = {
    "sst-2": ("sentence\tlabel\n", 'a "fine" film \t1\n', ('a "fine" film ', 1)),
    "cola": ("", "gj04\t0\t*\tThe more, the.\n", ("The more, the.", 0)),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
        '1\t1\t2\tHe said " yes .\tYes , he said .\n',
        ('He said " yes .\nYes , he said .', 1),
    ),
    "rte": ("index\tsentence1\tsentence2\tlabel\n", "0\tA.\tB.\tnot_entailment\n", ("A.\nB.", 1)),
}


@pytest.mark.parametrize("name", GLUE_ROWS)
def test_glue(tmp_path, name):
    header, row, expected = GLUE_ROWS[name]
    folder = tmp_path / {"sst-2": "SST-2", "cola": "CoLA", "mrpc": "MRPC", "rte": "RTE"}[name]
    folder.mkdir()
    (folder / "train.tsv").write_text(header + row + row)
    (folder / "dev.tsv.xz").write_bytes(lzma.compress((header + row).encode()))
    for place in (tmp_path, folder):
        source = Glue(name, [place])
        assert source.splits == ("train", "valid")
        assert len(source.labels) == 2
        assert [tuple(d) for d in source.documents("train")] == [expected, expected]
        assert [tuple(d) for d in source.documents("valid")] == [expected]
    (folder / "train.tsv").write_text(header + "a\tb\tc\td\te\n")
    with pytest.raises(InputError, match="cannot be read"):
        texts(source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"neither train.tsv nor dev.tsv"):
        Glue(name, [tmp_path / "empty"])


def test_plain_text_in_paragraphs_lines_and_files(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeffone\ntwo\r\n\r\n\n   \nthree\n\nfour".encode())
    whole = (1.0, 0.0, 0.0)
    assert texts(Text([path], fractions=whole)) == ["one\ntwo\r\n", "three\n", "four"]
    assert texts(Text([path], fractions=whole, unit="lines")) == ["one\n", "two\r\n", "three\n", "four"]
    assert texts(Text([path], fractions=whole, unit="files")) == ["one\ntwo\r\n\r\n\n   \nthree\n\nfour"]
    with pytest.raises(InputError, match="Did you mean 'lines'"):
        Text([path], unit="line")


def test_text_splits_by_hash_or_by_file_name(tmp_path):
    one = text_file(tmp_path / "notes.txt")
    source = Text([one], fractions=(0.8, 0.1, 0.1))
    assert source.splits == ("train", "valid", "test")
    assert len(everything(source)) == 200
    assert len(texts(source)) < 200
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.txt").write_text(f"this is {split}")
    named = Text([tmp_path / "train.txt", tmp_path / "validation.txt", tmp_path / "test.txt"])
    assert [texts(named, split) for split in named.splits] == [
        ["this is train"], ["this is validation"], ["this is test"],
    ]  # fmt: skip
    # One file that names no split, and all are one corpus.
    assert len(everything(Text([tmp_path]))) == 203


def test_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\\ntwo", "body": "b"}\n\n{"text": "é", "body": ""}\n')
    source = Text([path], fractions=(1.0, 0.0, 0.0))
    assert texts(source) == ["one\ntwo", "é"]
    assert texts(Text([path], fractions=(1.0, 0.0, 0.0), field="body")) == ["b"]
    for row, message in [
        ("{", "line 1 is not JSON"),
        ('{"a": 1, "b": 2}', "no field 'text' \\(it has a, b\\)"),
        ("[]", "no field"),
        ('{"text": 3}', "is int, expected text"),
        ('{"text": "\\u0000"}', "NUL"),
        ('{"text": "\\ud800"}', "surrogate"),
    ]:
        path.write_text(row)
        with pytest.raises(InputError, match=message):
            texts(source)


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    source_of = lambda **options: Text([path], fractions=(1.0, 0.0, 0.0), **options)  # noqa: E731
    path.write_bytes(b"PAR1")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        without.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(InputError, match="pip install 'chiar\\[parquet\\]'"):
            texts(source_of())
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with pytest.raises(InputError, match="not a readable parquet file"):
        texts(source_of())
    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(3000)], "other": range(3000)}), path)
    assert texts(source_of()) == [f"row {n}" for n in range(3000)]
    with pytest.raises(InputError, match="no column 'body' \\(it has text, other\\)"):
        texts(source_of(field="body"))
    with pytest.raises(InputError, match="row 1, column 'other' is int"):
        texts(source_of(field="other"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"fine\nthen \xff\xfe", r"not UTF-8 text \(byte 10\)"), (b"fine\nthen \0", r"NUL character \(byte 10\)")],
)
def test_binary_files_are_refused_by_place(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts(Text([tmp_path / "a.txt"]))


def test_damaged_and_missing_files(tmp_path):
    for name in ("a.txt.xz", "a.txt.gz"):
        (tmp_path / name).write_bytes(b"not compressed")
        with pytest.raises(InputError, match="damaged"):
            texts(Text([tmp_path / name]))
    packed = gzip.compress(b"text " * 1000)
    (tmp_path / "a.txt.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match="damaged"):
        texts(Text([tmp_path / "a.txt.gz"]))
    with pytest.raises(InputError, match="there is no file or folder"):
        Text([tmp_path / "missing.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no text file"):
        Text([tmp_path / "empty"])


def test_the_embedded_corpus_is_large_and_varied():
    source = Stdlib()
    documents = [document.text for document in everything(source)]
    assert len(documents) == len(set(documents)) > 300
    assert sum(len(text.encode()) for text in documents) > 1_500_000
    assert source.options["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert any(text.startswith("json.decoder") and "Simple JSON" in text for text in documents)
    assert any(text.startswith("types\n\n") and "standard type hierarchy" in text for text in documents)


def test_harvesting_runs_no_code(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("# a comment\ntopics = {'b': 'B\\n', 'a': 'A\\n'}\n")
    (tmp_path / "first.py").write_text('"""First."""\nraise SystemExit\ndef f(x, y=1):\n    "Do f."\n')
    (tmp_path / "second.py").write_text("class C:\n    'Do f.'\n    if 1:\n        async def g(self): 'Do g.'\n")
    (tmp_path / "third.py").write_text("'Do g.'\n")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "fourth.py").write_text("'A test.'")
    source = Stdlib(folder=tmp_path, fractions=(1.0, 0.0, 0.0))
    assert texts(source) == [
        "first\n\nFirst.\n\nfirst.f(x, y=1)\n\nDo f.\n",
        "a\n\nA\n",
        "b\n\nB\n",
        "second.C.g(self)\n\nDo g.\n",
    ]
    assert list(docstrings(ast.parse("'''\\ud800'''"), "m")) == []
    with pytest.raises(InputError, match="no Python sources"):
        Stdlib(folder=tmp_path / "nowhere")


def test_tokens_files_are_concatenated_in_order(tmp_path):
    ids = np.arange(3000, dtype="<u2")
    for number in range(11):  # 10 comes after 9, not after 1
        part = ids[number * 250 : (number + 1) * 250 if number < 10 else None]
        (tmp_path / f"train.{number}.u16.xz").write_bytes(lzma.compress(part.tobytes()))
    (tmp_path / "val.bin").write_bytes(ids[:5].tobytes())
    source = TokensFile([tmp_path])
    assert source.splits == ("train", "valid")
    assert np.array_equal(np.concatenate(list(source.blocks("train"))), ids)
    (tmp_path / "meta.json").write_text(json.dumps({"train": 3001}))
    with pytest.raises(InputError, match=r"3,000 tokens, but its meta.json says 3,001"):
        list(TokensFile([tmp_path]).blocks("train"))
    (tmp_path / "meta.json").write_text(json.dumps({"train": 3000, "train_sha256": "0"}))
    with pytest.raises(InputError, match="do not have the hash"):
        list(TokensFile([tmp_path]).blocks("train"))
    (tmp_path / "val.bin").write_bytes(b"odd")
    with pytest.raises(InputError, match="odd number of bytes"):
        list(TokensFile([tmp_path]).blocks("valid"))
    (tmp_path / "train.3.u16.xz").unlink()
    with pytest.raises(InputError, match="not numbered"):
        TokensFile([tmp_path])


def test_the_catalog_finds_corpora_by_name_and_files_by_path(tmp_path, monkeypatch):
    path = text_file(tmp_path / "notes.txt")
    assert isinstance(build_source([str(path)]), Text)
    assert isinstance(build_source(["text", str(path)], unit="lines"), Text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").write_text("a file, named like a corpus")
    assert isinstance(build_source(["./imdb"]), Text)
    assert build_source(["ListOps"]).name == "listops"
    for arguments, options, message in [
        ([], {}, "name a corpus"),
        (["wikitex-2"], {}, "Did you mean 'wikitext-2'"),
        (["imdb"], {}, "one folder"),
        (["imdb", str(tmp_path)], {"depth": 3}, "--depth is an option of listops, listops-lra, not of imdb"),
        (["listops"], {"fractions": (0.9, 0.1, 0.0)}, "--split-fractions cannot be used with generated"),
        (["listops", str(path)], {"seed": 1}, "--seed cannot be used with expressions read from files"),
        (["stdlib", str(path)], {}, "takes no files"),
        (["tokens", str(path)], {}, "not a folder"),
        (["text"], {}, "at least one text file"),
    ]:
        with pytest.raises(InputError, match=message):
            build_source(arguments, **options)
    assert {entry.kind for entry in CATALOG.values()} == {"language", "classification"}
