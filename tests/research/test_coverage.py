"""Dark bytes at the ends of words and elsewhere."""

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from research import coverage
from small_corpora import measured_corpus, save, tiny_model


def test_dark_bytes_are_counted_per_word():
    ids = torch.tensor([list(b"a bc  d,")])
    ends = coverage.word_ends(ids)
    assert ends.tolist() == [[True, True, False, False, True, False, False, True]]
    dark = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 0]], dtype=torch.bool)
    measured = coverage.measure(dark, torch.arange(8.0)[None], ends)
    # The words are "a", " bc", "  d" and ","; the second has two dark bytes, the third one.
    assert measured["words without dark bytes"] == 0.5 and measured["dark"] == 3 / 8
    assert (measured["dark at word ends"], measured["dark elsewhere"]) == (1 / 4, 2 / 4)
    assert (measured["bits at word ends"], measured["bits elsewhere"]) == (3.0, 4.0)


@pytest.mark.parametrize(("router", "share"), [("space", "1.000"), ("predictive", None)])
def test_a_model_is_measured(router, share, tmp_path):
    corpus = measured_corpus(tmp_path / "text")
    model = save(tiny_model("v5-tiny", router=router), tmp_path / "model", corpus.tokenizer())
    app = Typer()
    app.command()(coverage.main)
    result = CliRunner().invoke(app, [str(corpus.folder), str(model), "--length", "32", "--device", "cpu"])
    assert result.exit_code == 0 and (share is None or share in result.output)
    assert CliRunner().invoke(app, [str(corpus.folder), str(model), "--length", "100000"]).exit_code != 0
