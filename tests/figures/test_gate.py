"""g as recorded, and as the model gives it for each corpus."""

import json
import shutil

import pytest
import torch
from recorded import elements, words, write_run

from chiar.analysis.chart import Line
from chiar.analysis.curves import open_curves
from chiar.errors import InputError
from chiar.figures.gate import BARS, draw_gate, gates_of, outline
from chiar.model.modeling import ChiarForCausalLM
from chiar.training.trainer import open_rows


def test_the_histogram_has_shares_as_heights():
    line = outline(Line("g", [], "#000000"), torch.tensor([0.21, 0.21, 0.21, 0.99]))
    heights = dict(line.points[1:-1:2])
    assert len(heights) == BARS
    assert heights[10 / BARS] == 0.75 and heights[49 / BARS] == 0.25
    assert sum(heights.values()) == 1.0


def test_course_and_histogram_by_run_and_corpus(tmp_path):
    records = [{"step": s, "loss": 1.0, "gate": {"text": 0.5 - s / 10, "symbols": 0.1}} for s in (1, 2, 3)]
    svg = draw_gate([write_run(tmp_path / name, records=records) for name in ("zero", "two")], [])
    assert {"zero: g on text", "zero: g on symbols", "two: g on text", "steps; up: g"} <= set(words(svg))
    lines = elements(svg, "polyline", "line")
    assert len(lines) == 2 * 4
    assert len({line.get("stroke") for line in lines}) == 4


def changed_pool(run, folder, pool):
    shutil.copytree(run, folder, symlinks=True)
    path = folder / "best" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gate_pool": pool}))
    return folder


@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_g_of_the_model_one_value_for_each_thing_the_pool_has_one_for(tmp_path, mixed_run, corpus, labelled, pool):
    from chiar.data.shards import Corpus

    folder = changed_pool(mixed_run, tmp_path / "run", pool)
    (run,), _ = open_curves([folder])
    model = ChiarForCausalLM.from_pretrained(folder / "best").eval()
    # In training's own micro-batches of 4 rows of 16; documents are padded.
    for path in (corpus, labelled):
        name, found_pool, values_N = gates_of(folder, path, run, 6)
        opened = Corpus.open(path)
        rows = open_rows(opened, "valid", 16)
        wanted, expected = rows.evaluated(6), []
        for part in (wanted[:4], wanted[4:]):
            batch = rows.batch(0, part)
            with torch.no_grad():
                trace = model(batch.ids, attention_mask=batch.mask, output_routing=True).routing
            gate_BT = trace.layers[0].gate_BT
            expected += {"batch": [gate_BT[0, 0]], "sequence": list(gate_BT[:, 0])}.get(
                pool, list(gate_BT[trace.real_BT])
            )
        assert (name, found_pool) == (opened.name, pool)
        assert torch.equal(values_N, torch.stack(expected))
    assert len(values_N) == {"batch": 2, "sequence": 6}.get(pool, len(values_N))


def test_the_third_panel(mixed_run, corpus, labelled):
    svg = draw_gate([mixed_run], [corpus, labelled], rows=5)
    assert "the best model on validation text" in words(svg)
    assert "g; up: share of batches" in words(svg)


def test_bad_input(tmp_path, corpus):
    with pytest.raises(InputError, match="no MetaRouter"):
        draw_gate([write_run(tmp_path / "v2", "v2-tiny", [{"step": 1, "loss": 1.0}])], [])
    recorded = write_run(tmp_path / "only", records=[{"step": 1, "loss": 1.0, "gate": {"text": 0.9}}])
    with pytest.raises(InputError, match="without a best model yet"):
        draw_gate([recorded], [corpus])
