"""Operator use in training, from records with known shares."""

import pytest
from recorded import elements, words, write_run

from chiar.analysis.curves import open_curves
from chiar.data.shards import Corpus
from chiar.errors import InputError
from chiar.figures.operators import draw_operators, mean_use, steps_per_epoch

RECORDS = [{"step": s, "loss": 1.0, "use": [[0.5, 0.5 - s / 10, s / 10], [1.0, 0.0, 0.0]]} for s in (1, 2, 5)]


def test_every_operator_of_every_layer_is_a_line(tmp_path):
    folder = write_run(tmp_path / "v1", "v1-tiny", RECORDS)
    svg = draw_operators([folder])
    assert {"layer 2", "layer 3", "mean of the routed layers", "spectral", "rbf", "attention"} <= set(words(svg))
    assert "across: steps; up: share of the tokens of a logged step" in words(svg)
    drawn = elements(svg, "polyline", "line")
    assert len(drawn) == 9
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in drawn}) == 3
    (run,), _ = open_curves([folder])
    assert run.use(0, 1) == [(1, 0.4), (2, 0.3), (5, 0.0)]
    assert mean_use(run, 0) == [(1, 0.75), (2, 0.75), (5, 0.75)]


def test_several_runs_have_panels_of_their_own(tmp_path):
    svg = draw_operators([write_run(tmp_path / name, "v1-tiny", RECORDS) for name in ("one", "two")])
    assert {"one, layer 2", "two, layer 3"} <= set(words(svg))


def test_epochs_are_counted_of_the_first_corpus(tmp_path, mixed_run, corpus, labelled):
    (run,), _ = open_curves([mixed_run])
    rows = (Corpus.open(corpus).split("train").tokens - 1) // 16
    assert steps_per_epoch(run, corpus) == rows / 8
    assert "across: epochs; up: share of the tokens of a logged step" in words(draw_operators([mixed_run], corpus))
    with pytest.raises(InputError, match="was not trained on"):
        draw_operators([mixed_run], labelled)
    settings = {"batch": 8, "length": 16, "data": ["a", "b"], "mixing": "weights"}
    drawn_by_turns = write_run(
        tmp_path / "turns", "v1-tiny", RECORDS, settings=settings, data={"a": Corpus.open(corpus).fingerprint}
    )
    with pytest.raises(InputError, match="from several corpora"):
        draw_operators([drawn_by_turns], corpus)


def test_a_run_without_routes_is_refused(tmp_path):
    with pytest.raises(InputError, match="no routed layers"):
        draw_operators([write_run(tmp_path / "base", "baseline-tiny", [{"step": 1, "loss": 1.0, "use": []}])])
