"""`chiar eval` and `chiar compare` as a user runs them."""

import json
import subprocess
import sys

import pytest
from evaluated import language_corpus, save, tiny_model

from commands import run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("cli") / "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus):
    return save(tiny_model(gate_pool="batch"), tmp_path_factory.mktemp("cli") / "model", corpus)


def test_table_json_and_comparison(tmp_path, model, corpus):
    code, output = run("eval", model, "--data", corpus.folder, "--json", tmp_path / "report.json")
    assert code == 0
    for shown in ("token perplexity", "word perplexity", "bits per byte", "(pool: batch)", "counted MFLOPs", "note:"):
        assert shown in output
    code, printed = run("eval", model, "--data", corpus.folder, "--json", "-")
    assert json.loads(printed) == json.loads((tmp_path / "report.json").read_text())
    code, output = run("eval", model, "--data", corpus.folder, "--json", tmp_path / "report.json")
    assert code == 2 and "exists already" in output
    run("eval", model, "--data", corpus.folder, "--stride", 4, "--json", tmp_path / "slid.json")
    code, output = run("compare", tmp_path / "report.json", tmp_path / "slid.json")
    assert code == 2 and "another stride than report" in output
    code, output = run("compare", tmp_path / "report.json", tmp_path / "slid.json", "--anyway", "--baseline", "slid")
    assert code == 0 and "≠ stride" in output


def test_a_run_is_announced(tmp_path, corpus):
    save(tiny_model(), tmp_path / "best", corpus)
    code, output = run("eval", tmp_path, "--data", corpus.folder, "--rows", 2)
    assert code == 0 and "its best model is evaluated" in output


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'rich'}"
    code = f"import sys, chiar.evaluation.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
