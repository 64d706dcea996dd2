"""The page's benchmark serves a model and times it as a user meets it."""

import re

import pytest

import explore


@pytest.mark.slow
def test_rows_have_times(capsys):
    assert explore.main(["--size", "tiny", "--tokens", "32", "--repeats", "2"]) == 0
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) in (2, 5)  # without and with a browser
    assert all(int(fastest) <= int(median) <= int(slowest) for _, median, fastest, slowest, _ in rows)
