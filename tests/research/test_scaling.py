"""Loss and counted savings against model size."""

import pytest
from typer.testing import CliRunner

from chiar import presets
from chiar.errors import InputError
from chiar.evaluation.report import EvaluationReport, LanguageScores, LayerUse, RoutingUse
from chiar.model.load import count_parameters
from research.scaling import app, draw_savings, draw_scaling


def save_report(path, loss=3.0, flops=100.0, baseline=100.0, routed=False, **changes):
    layers = [LayerUse(1, {"spectral": 0.5, "attention": 0.5})] if routed else []
    known = {"model": "baseline-tiny", "corpus": "text", "fingerprint": "f1", "split": "test", "precision": "fp32"}
    known |= {"length": 8, "batch_size": 1, "device": "cpu", "flops": flops, "baseline_flops": baseline}
    known |= {"scores": LanguageScores(10, loss, 5, 1, 20), "routing": RoutingUse(layers, None, None)}
    known |= {"flops_length": 8, **dict.fromkeys(("run", "stride", "rows"))}
    path.write_text(EvaluationReport(**{**known, **changes}).to_json())
    return str(path)


def lines_of(figure):
    return [[(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] for axes in figure.axes]


def test_comparable_reports_are_drawn(tmp_path):
    dense, large = save_report(tmp_path / "small.json", 4.0), save_report(tmp_path / "large.json", 3.0, 1000.0, 1000.0)
    routed = save_report(tmp_path / "routed.json", 3.125, 800.0, 1000.0, True)
    (losses,) = lines_of(draw_scaling([large, dense, routed, "ours=" + routed], "flops"))
    assert losses[:2] == [("dense", [[100, 4], [1000, 3]]), ("CHIAR", [[800, 3.125]])] and losses[2][0] == "ours"
    assert lines_of(draw_scaling([dense]))[0][0][1] == [[count_parameters(presets.get("baseline-tiny")), 4.0]]
    for arguments, against, sentence in (
        ([dense, save_report(tmp_path / "other.json", length=16)], "flops", "another length"),
        ([save_report(tmp_path / "lost.json", model="runs/gone/best")], "parameters", "runs/gone/best"),
        ([dense], "price", "unknown size"),
    ):
        with pytest.raises(InputError, match=sentence):
            draw_scaling(arguments, against)
    for out, exit_code in (("one.svg", 0), ("one.svg", 1), ("one.txt", 1)):  # nothing is overwritten
        drawn = CliRunner().invoke(app, ["loss", dense, "--out", str(tmp_path / out)])
        assert drawn.exit_code == exit_code and (exit_code == 1 or drawn.output == f"wrote {tmp_path / out}\n")
    drawn = CliRunner().invoke(app, ["savings", "v3-tiny", "--out", str(tmp_path / "savings.svg")])
    assert drawn.output == f"wrote {tmp_path / 'savings.svg'}\n"


def test_savings_match_the_documents():
    total, layers, attention = lines_of(draw_savings(["v3-400m"], 256, 0.5, "routed"))
    # docs/execution.md: 400M, T 256, f = ½, routed keys. The last line marks the paper's claim.
    assert [round(points[0][1], 1) for _, points in total[:-1]] == [15.6, 8.7, 1.8]
    assert attention[0][1][0][1] == pytest.approx(51.5, abs=0.05) and len(layers) == 3
    assert attention[-1][0].endswith("62.5%")
    with pytest.raises(InputError, match="without routed layers"):
        draw_savings(["baseline-tiny"])
