"""A saved null test reads back as it was."""

import json

import pytest

from chiar.errors import InputError
from chiar.nulltest.compaction import Compaction
from chiar.nulltest.flips import Flip, Mean, Worth
from chiar.nulltest.information import Information
from chiar.nulltest.reading import read_report
from chiar.nulltest.report import ClassMean, Contrast, LayerNull, NullTest, Signal
from chiar.nulltest.white import PERCENTILES, Whiteness


def make_report(**changes):
    import torch

    half = {str(p): p / 100 for p in PERCENTILES}
    information = Information(0.5, 0.1, 0.01, 1.0, 7, None)
    worth = Worth(*[Mean(2, 0.1, None)] * 4, [Mean(1, 0.5, 0.25), Mean(0, None, None)], 0.1, None, 0.5)
    layer = LayerNull(
        1, "routed", ["spectral", "attention"], [0.8], 0.5, [Whiteness("dct", 0.8, 0.1, half, *[0.5] * 7)],
        [Signal("route", 0.5, information, information, information)],
        [ClassMean("determiner", True, 3, 0.8, 0.1, None, 0.5)], [Contrast("all", 3, 4, 0.1, 0.2, 0.5)], worth,
        [Compaction("klt", False, 4, [0.5, None], [0.75, 0.5])], {"dct": torch.ones(3)},
    )  # fmt: skip
    known = {
        "model": "m", "run": None, "corpus": "c", "fingerprint": "f", "split": "valid", "tokens": 3, "rows": 1,
        "length": 3, "batch_size": 1, "seed": 0, "device": "cpu", "width": 16, "shuffles": 2, "null_mean": 0.8,
        "null_deviation": 0.1, "null_exact": True, "null_percentiles": half, "bins": 2, "layers": [layer],
        "worth": worth, "flips": [Flip(1, 0, 2, 0.8, True, 0.1, 0.2)], "remarks": ["r"],
        "null_sample": torch.ones(2),
    }  # fmt: skip
    return NullTest(**{**known, **changes})


def test_what_is_read_is_what_was_written(tmp_path):
    for name, report in (("whole", make_report()), ("bare", make_report(worth=None, flips=[]))):
        path = tmp_path / name / "nulltest.json"
        path.parent.mkdir()
        path.write_text(report.to_json())
        assert read_report(path).to_json() == report.to_json()
        assert read_report(path.parent).to_json() == report.to_json()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda record: "{", "is not a null test"),
        (lambda record: json.dumps({**record, "format": "other"}), "does not say format"),
        (lambda record: json.dumps({**record, "layers": []}), "it has no layers"),
        (lambda record: json.dumps({k: v for k, v in record.items() if k != "width"}), "it has no 'width'"),
        (lambda record: json.dumps({**record, "layers": [7]}), "is damaged"),
    ],
    ids=["not JSON", "another format", "no layers", "a field is missing", "a layer is a number"],
)
def test_damaged_files_are_named(tmp_path, damage, sentence):
    path = tmp_path / "n.json"
    path.write_text(damage(json.loads(make_report().to_json())))
    with pytest.raises(InputError, match=sentence):
        read_report(path)
    with pytest.raises(InputError, match="there is no file"):
        read_report(tmp_path)
