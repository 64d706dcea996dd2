"""The text of a prepared corpus, written back to files."""

import typer
from typer.testing import CliRunner

from research.text_of import main
from small_corpora import SPLITS, measured_corpus


def test_the_text_is_the_original_one(tmp_path):
    corpus, script = measured_corpus(tmp_path / "text").folder, typer.Typer()
    script.command()(main)
    for code in (0, 2):  # nothing is overwritten
        assert CliRunner().invoke(script, [str(corpus), "--out", str(tmp_path / "out")]).exit_code == code
    for split in SPLITS:
        assert (tmp_path / "out" / f"{split}.txt").read_text() == (tmp_path / "text" / f"{split}.txt").read_text()
