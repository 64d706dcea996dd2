"""Files of the user's own: tables of labelled texts in every form, and what is refused."""

import gzip
import json

import pytest

import commands
from chiar.data.catalog import build_source
from chiar.data.own_files import LabelledFiles
from chiar.data.shards import Corpus
from helpers import refused
from small_corpora import WHOLE, all_refused, sentence

ROWS = [(f'{sentence(n)}, "said" {n}', ("ham", "spam [x]", "Ω")[n % 3]) for n in range(60)]


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
        "a,b\n1,2\n": "columns a, b: say with --text-column",
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
