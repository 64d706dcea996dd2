"""Loss against size: which line a report is on, how large its model is, what it loses to its own baseline."""

import math

import pytest
from recorded import save_report, words, write_run

from chiar import presets
from chiar.analysis.chart import size_name, size_ticks
from chiar.errors import InputError
from chiar.evaluation.report import ClassScores
from chiar.figures.scaling import draw_scaling, gap, lines, read_points
from chiar.model.load import count_parameters


def pair(folder):
    """Two sizes, each dense and routed, the large routed one with two seeds."""
    made = {
        "small": {"loss": 4.0, "flops": 100.0, "baseline": 100.0},
        "large": {"loss": 3.0, "flops": 1000.0, "baseline": 1000.0},
        "small-routed": {"loss": 4.25, "flops": 90.0, "baseline": 100.0, "routed": True},
        "large-routed": {"loss": 3.125, "flops": 800.0, "baseline": 1000.0, "routed": True},
        "large-routed-1": {"loss": 3.375, "flops": 800.0, "baseline": 1000.0, "routed": True},
    }
    return [str(save_report(folder / f"{name}.json", **known)) for name, known in made.items()]


def test_lines_go_through_the_mean_of_each_size(tmp_path):
    points = read_points(pair(tmp_path), "flops")
    dense, _, routed, dots = lines(points, lambda point: point.loss)
    assert (dense.label, routed.label, dots.label) == ("dense", "CHIAR", "")
    assert dense.points == [(2.0, 4.0), (3.0, 3.0)]
    assert routed.points == [(math.log10(90), 4.25), (math.log10(800), 3.25)]
    assert [loss for _, loss in dots.points] == [4.25, 3.125, 3.375]


def test_a_gap_is_to_the_dense_model_of_the_same_shape(tmp_path):
    points = read_points(pair(tmp_path), "flops")
    assert [gap(point, points) for point in points] == [None, None, 0.25, 0.125, 0.375]
    assert gap(points[2], points[1:]) is None  # its baseline is not there
    drawn = draw_scaling(pair(tmp_path), "flops")
    assert "loss − that of the dense model of its shape, nats" in words(drawn)
    alone = draw_scaling(pair(tmp_path)[:2], "flops")
    assert not any("that of the dense" in word for word in words(alone))


def test_lines_can_be_named(tmp_path):
    first, second, *_ = pair(tmp_path)
    named = read_points([f"ours={first}", second], "flops")
    assert [point.series for point in named] == ["ours", "dense"]


def test_parameters_are_counted(tmp_path):
    run = write_run(tmp_path / "run", "v3-tiny")
    save_report(run / "evaluation.json", routed=True, model="gone")
    beside = save_report(tmp_path / "preset.json", model="baseline-tiny")
    points = read_points([str(run), str(beside)], "parameters")
    assert [point.size for point in points] == [
        count_parameters(presets.get(name)) for name in ("v3-tiny", "baseline-tiny")
    ]
    lost = save_report(tmp_path / "lost.json", model="runs/gone/best")
    with pytest.raises(InputError, match="--against flops"):
        read_points([str(lost)], "parameters")
    assert read_points([str(lost)], "flops")[0].size == 100.0


def test_bad_input(tmp_path):
    good = str(save_report(tmp_path / "good.json"))
    other = save_report(tmp_path / "other.json", length=16)
    classes = ClassScores(2, 4, 0, 0.5, ["a", "b"], [[1, 0], [0, 1]])
    labelled = save_report(tmp_path / "labelled.json", scores=classes)
    for arguments, sentence in (
        ([good, str(other)], "another length"),
        ([str(labelled)], "a classifier"),
        ([str(write_run(tmp_path / "run", records=[{"step": 1}]))], "was not evaluated: chiar eval"),
        ([str(tmp_path / "missing.json")], "there is no file"),
    ):
        with pytest.raises(InputError, match=sentence):
            draw_scaling(arguments, "flops")
    with pytest.raises(InputError, match="unknown size"):
        draw_scaling([good], "price")


def test_sizes_have_short_names():
    assert [size_name(value) for value in (999, 1e3, 15.8e6, 4e8, 1.1e9, 2e12)] == [
        *("999", "1k", "15.8M", "400M", "1.1G", "2T")
    ]
    assert size_ticks(7.1, 9.2) == [(math.log10(value), size_name(value)) for value in (2e7, 5e7, 1e8, 2e8, 5e8, 1e9)]
    assert [name for _, name in size_ticks(5.5, 5.9)] == ["400k", "500k", "600k"]
    narrow = [32.0e6, 32.2e6, 32.4e6, 32.6e6]
    assert size_ticks(7.505, 7.514) == [(pytest.approx(math.log10(value)), size_name(value)) for value in narrow]
