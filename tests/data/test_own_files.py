"""Files of the user's own: text and how it is split, tables of labelled texts, and what is refused."""

import gzip
import json

import pytest

import commands
from chiar.data import own_files
from chiar.data.catalog import build_source
from chiar.data.own_files import LabelledFiles, Text
from chiar.data.shards import Corpus
from helpers import refused
from small_corpora import WHOLE, all_refused, sentence

ROWS = [(f'{sentence(n)}, "said" {n}', ("ham", "spam [x]", "Ω")[n % 3]) for n in range(60)]


def texts(source, split="train"):
    return [document.text for document in source.documents(split)]


UNITS = {"paragraphs": ["\n one\ntwo\r\n\r\n\n   \n", "three\n\n", "four"]}
UNITS |= {"lines": ["\n one\n", "two\r\n\r\n\n   \n", "three\n\n", "four"], "files": ["".join(UNITS["paragraphs"])]}


@pytest.mark.parametrize("unit", UNITS)
def test_documents_of_plain_text_joined_are_the_file(tmp_path, unit):
    (path := tmp_path / "notes.txt").write_bytes(("\ufeff" + UNITS["files"][0]).encode())
    assert texts(Text([path], fractions=WHOLE, unit=unit)) == UNITS[unit]
    refused("Did you mean 'lines'", Text, [path], unit="line")


LINES = "".join(f"Line {n}, {sentence(n)}\n" + "\n" * (n % 3) for n in range(300))
ONE_FILE = {
    "lines": LINES,
    "one line": LINES.replace("\n", " "),
    "short": "Few words are enough, cut between them. " * 3,
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("text", ONE_FILE)
def test_one_file_is_split_into_contiguous_parts(tmp_path, monkeypatch, text, unit):
    monkeypatch.setattr(own_files, "LARGEST", 2000)  # a larger file is several documents
    (path := tmp_path / "notes.txt").write_text(whole := ONE_FILE[text])
    source = Text([path], unit=unit, fractions=(0.6, 0.2, 0.2))
    parts = ["".join(texts(source, split)) for split in ("train", "valid", "test")]
    assert "".join(parts) == whole
    assert [len(part) / len(whole) for part in parts] == pytest.approx([0.6, 0.2, 0.2], abs=0.1)
    assert "splits by contiguous parts of notes.txt: train 60.0%, valid 20.0%, test 20.0%." in source.notes
    assert all(len(document) < 4200 for document in texts(source))
    (tmp_path / "copy.txt").write_text(whole)  # copies are one text: none of its train part is in valid
    both = Text([path, tmp_path / "copy.txt"], unit=unit, fractions=(0.6, 0.2, 0.2))
    assert "".join(texts(both, "valid")) == parts[1] * 2


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("count", [2, 3, 40])
def test_of_several_files_none_is_cut(tmp_path, count, unit):
    for n in range(count):
        (tmp_path / f"{n}.txt").write_text(f"file {n}\n\n" + "\n\n".join(sentence(n, 9) for _ in range(1 + n % 7)))
    (tmp_path / "again.txt").write_bytes((tmp_path / "0.txt").read_bytes())
    (tmp_path / "blank.txt").write_text("\n\n")
    source = Text([tmp_path], unit=unit)
    found = {split: "".join(texts(source, split)) for split in source.splits}
    assert list(found) == ["train", "valid", "test"][:count]
    for n in range(count):
        homes = [split for split, text in found.items() if (tmp_path / f"{n}.txt").read_text() in text]
        assert len(homes) == 1 and found[homes[0]].count(f"file {n}\n") == 1 + (n == 0)
    assert all(found.values()) and (count < 40 or 0.8 < len(found["train"]) / sum(map(len, found.values())) < 0.97)
    assert any("whole files: train" in sentence for sentence in source.notes)
    assert any("too few files for a test split" in sentence for sentence in source.notes) == (count == 2)


def test_a_folder_takes_what_a_single_file_may_be(tmp_path):
    contents = {"a.py": "code", "b": "no ending", "c.tex": "TeX", "d.ndjson": '{"text": "row"}\n', "inner/e.log": "log"}
    left_out = {"logo.png": b"\x89PNG\0", "latin.txt": "naïve".encode("latin-1"), "t.csv": b"a,b\n"}
    for name, content in (contents | left_out | {".git/config": "hidden", ".hidden": "hidden"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = Text([tmp_path], fractions=WHOLE)
    assert sorted(texts(source)) == sorted(["row" if "row" in text else text for text in contents.values()])
    assert source.notes[-1] == "3 files left out, tables or no text: latin.txt, logo.png, t.csv."
    for name in contents:
        assert texts(Text([tmp_path / name], fractions=WHOLE))


def test_files_named_after_splits_and_rows_by_hash(tmp_path):
    files = [tmp_path / f"{split}.txt" for split in ("train", "validation", "test")]
    for file in files:
        file.write_text(f"this is {file.stem}")
    source = Text(files)
    assert [texts(source, split) for split in source.splits] == [[f"this is {file.stem}"] for file in files]
    assert source.notes == ["splits by file names: train, valid, test."]
    files[0].write_text(LINES)
    without = Text([files[0], files[2]])
    assert "".join(texts(without) + texts(without, "valid")) == LINES and texts(without, "test") == ["this is test"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(200)))
    rows = Text([tmp_path / "rows.jsonl"], fractions=(0.8, 0.1, 0.1))
    assert rows.notes == ["splits by a hash of each row: train 80.0%, valid 10.0%, test 10.0%."]
    counts = [len(texts(rows, split)) for split in rows.splits]
    assert max(counts) < sum(counts) == 200


def table(path, separator, rows=ROWS, head=("body", "class")):
    def cell(text):
        return '"' + text.replace('"', '""') + '"' if separator == "," else text

    path.write_text("".join(separator.join(map(cell, row)) + "\n" for row in (head, *rows)), encoding="utf-8")
    return path


def json_lines(path, rows=ROWS):
    path.write_text("".join(json.dumps({"body": text, "class": label}) + "\n" for text, label in rows))
    return path


def parquet_file(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.table({"body": [r[0] for r in ROWS], "n": range(60), "class": [r[1] for r in ROWS]}), path
    )
    return path


def compressed(path):
    path.write_bytes(gzip.compress(table(path.with_suffix(""), "\t").read_bytes()))
    return path


FORMS = {"csv": lambda p: table(p, ","), "tsv": lambda p: table(p, "\t"), "jsonl": json_lines, "parquet": parquet_file}
FORMS["tsv.gz"] = compressed


@pytest.mark.parametrize("form", FORMS)
def test_labelled_files_of_every_form_give_the_same_documents(tmp_path, form):
    path = FORMS[form](tmp_path / f"mail box.{form}")
    source = LabelledFiles([path], text_column=["Body"], label_column="class", fractions=WHOLE)
    assert (source.name, source.kind, source.labels) == ("mail-box", "classification", ("ham", "spam [x]", "Ω"))
    assert [(d.text, source.labels[d.label]) for d in source.documents("train")] == ROWS


def test_labelled_columns_by_usual_names_several_texts_and_splits_by_file_name(tmp_path):
    (folder := tmp_path / "pairs").mkdir()
    rows = [[f"first {n}", f"second {n}", str(n % 12 - 1)] for n in range(24)]
    for file in ("train.tsv", "dev.tsv"):
        table(folder / file, "\t", rows, ("Sentence1", "Sentence2", "Label"))
    source = LabelledFiles([folder])
    assert (source.name, source.splits, source.labels) == ("pairs", ("train", "valid"), tuple(map(str, range(-1, 11))))
    assert next(source.documents("valid")) == ("first 0\nsecond 0", 0)
    turned = LabelledFiles([folder / "train.tsv"], text_column=["Sentence2", "Sentence1"])
    assert (turned.name, next(turned.documents("train")).text) == ("pairs", "second 0\nfirst 0")
    whole = LabelledFiles([table(tmp_path / "all.csv", ",")], text_column=["body"], label_column="class")
    assert whole.splits == ("train", "valid", "test")
    assert sorted(d.text for split in whole.splits for d in whole.documents(split)) == sorted(text for text, _ in ROWS)


def test_labelled_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.csv"
    cases = {
        "": "is empty",
        "a,b\n1,2\n": "columns a, b: choose one with --text-column",
        "text,b\n1,2\n": "with --label-column",
    }
    cases |= {"text,label\nx,1\ny,1\n": "one label only, '1'", "text,label\nx,1\ny\n": "line 3 has 1 columns"}
    cases |= {"text,label\nx,\n": "line 2 has no label", "text,label\n ,1\n": "line 2 has no text"}
    cases |= {"text,label\n" + "".join(f"x,{n}\n" for n in range(1001)): "more than 1,000 labels"}
    cases |= {b"text,label\n\xff,1\n": "is it binary"}
    all_refused(lambda: LabelledFiles([path]), path, cases)
    lines = {"[1]": "no object", '{"text": 1, "label": 2}': "is int", '{"text": "x", "label": null}': "has no label"}
    all_refused(lambda: LabelledFiles([tmp_path / "a.jsonl"]), tmp_path / "a.jsonl", lines)
    path.write_text("text,label\nx,1\ny,2\n")
    refused(
        "no field 'kind' .it has text, label.: choose another --label-column",
        LabelledFiles,
        [path],
        label_column="kind",
    )
    refused("is none of .tsv", build_source, ["labelled", __file__])
    refused("is a table: chiar data prepare labelled", build_source, [str(path)])


def test_a_labelled_corpus_of_any_name_by_the_command(tmp_path):
    path, out = json_lines(tmp_path / "mail.jsonl"), tmp_path / "out"
    command = ["data", "prepare", "labelled", path, "--tokenizer", "bytes", "--text-column", "body"]
    command += ["--label-column", "class", "--split-fractions", "0.5,0.25,0.25", "--out", out]
    code, said = commands.run(*command, "--name", "a.b")
    assert (code, "letters, digits, - and _" in said) == (2, True)
    code, said = commands.run(*command)
    assert (code, Corpus.open(out).name) == (0, "mail")
    assert "spam [x]" in said and "Ω" in said
