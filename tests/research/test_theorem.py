"""The DCT and the KLT of an autoregression, against values known in closed form."""

import itertools
import json
import math

import pytest
from typer.testing import CliRunner

from chiar.errors import InputError
from research import theorem
from research.theorem import DCT, IDENTITY, KLT, RANDOM, SHUFFLED, check_theorem


def checks_of(width, rho):
    return {check.basis: check for check in check_theorem([width], [rho])}


@pytest.mark.parametrize(("width", "rho"), [(2, 0.5), (33, -0.7)])
def test_the_gain_of_the_klt_follows_from_the_determinant(width, rho):
    """det R = (1 − ρ²)^(D−1), and the eigenvalues' arithmetic mean is 1."""
    exact, found = -10 * (width - 1) / width * math.log10(1 - rho**2), checks_of(width, rho)
    assert found[KLT].gain_db == pytest.approx(exact, abs=1e-9)
    assert found[DCT].gain_db <= exact + 1e-9 and found[IDENTITY].gain_db == pytest.approx(0, abs=1e-9)


def test_the_dct_at_the_textbook_point_and_as_width_grows():
    """D = 8, ρ = 0.95: 8.826 dB against the KLT's 8.846, as textbooks on transform coding print."""
    found = checks_of(8, 0.95)
    assert (found[DCT].gain_db, found[KLT].gain_db) == pytest.approx((8.8259, 8.8462), abs=5e-5)
    ordered, shuffled = [], []  # the DCT approaches the KLT as width grows, unless features are shuffled
    for width in (16, 64, 256):
        found = checks_of(width, 0.9)
        ordered.append(found[KLT].gain_db - found[DCT].gain_db)
        shuffled.append(found[SHUFFLED].gain_db / found[KLT].gain_db)
        low, high = found[SHUFFLED].gain_range
        assert low <= found[SHUFFLED].gain_db <= high < found[DCT].gain_db
        assert found[SHUFFLED].correlation > found[DCT].correlation
    assert 0 < ordered[2] < ordered[1] < ordered[0] < 0.05
    assert shuffled[2] < 0.1 < shuffled[1] < shuffled[0]
    # Entropy is low only where the basis fits the order.
    dct, shuffled, random = (found[name].entropy_effect for name in (DCT, SHUFFLED, RANDOM))
    assert dct < -20 < -4 < shuffled and abs(random) < 0.5


def test_the_command(tmp_path):
    def run(*arguments):
        options = ["--width", "4,8", "--rho", "0.5,0.9", "--shuffles", "2", *map(str, arguments)]
        return CliRunner().invoke(theorem.app, options)

    result = run("--json", tmp_path / "t.json", "--out", tmp_path / "t.svg")
    assert result.exit_code == 0 and "DCT, features shuffled" in result.output and (tmp_path / "t.svg").is_file()
    assert all(f"wrote {tmp_path / name}\n" in result.output for name in ("t.svg", "t.json"))
    stored = json.loads((tmp_path / "t.json").read_text())
    found = [(check["rho"], check["width"], check["basis"]) for check in stored["checks"]]
    assert found == list(itertools.product((0.5, 0.9), (4, 8), theorem.BASES))
    drawn = theorem.draw_theorem(check_theorem([4, 8], [0.5, 0.9]))
    assert sum(len(axes.lines) for axes in drawn.axes) == 2 * 2 * len(theorem.BASES)
    assert json.loads(run("--json", "-").output) == stored
    for arguments, sentence in (
        (("--out", tmp_path / "t.svg"), "exists already"),
        (("--width", "8,x"), "--width takes whole numbers"),
        (("--width", "5000"), "widths must be from 2 to 4096"),
        (("--rho", "1"), "between −1 and 1"),
        (("--rho", ""), "--rho takes numbers"),
    ):
        found = run(*arguments).exception
        assert isinstance(found, InputError) and sentence in str(found)
