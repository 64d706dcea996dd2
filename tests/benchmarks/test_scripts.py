"""The other benchmarks start on a CPU with tiny sizes and print what they promise."""

import re
import runpy
from pathlib import Path

import pytest

import cpu_execution
import explore

BENCHMARKS = Path(explore.__file__).parent
SMALL = ["--size", "tiny", "--lengths", "8,32", "--rows", "2", "--fractions", "0.5", "--turns", "2", "--steps", "1"]


@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_a_cell_is_the_ratio_of_both_times(capsys, mode):
    assert cpu_execution.main([*SMALL, "--mode", mode, "--only", "routed", "--execution", "auto"]) == 0
    cells = re.findall(r"\| `routed` \| (\d+) \| 2 \| ([\d.]+) / ([\d.]+) = ([\d.]+) \|", capsys.readouterr().out)
    assert [length for length, *_ in cells] == ["8", "32"]
    assert cpu_execution.main([*SMALL, "--only", "mod"]) == 2, "it has no dense execution of its own"
    assert "mod" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["decode", "loss", "filter"])
def test_kernels_are_compared_and_timed(part, capsys):
    script = runpy.run_path(str(BENCHMARKS / "gpu" / "operations.py"))
    assert script["main"]([part, "--device", "cpu", "--small", "--repeats", "1"]) == 0
    found = capsys.readouterr().out
    assert "ok  " in found and "FAIL" not in found and re.search(r"[\d.]+ ms, ", found)


@pytest.mark.slow
def test_the_page_is_timed_as_a_user_meets_it(capsys):
    assert explore.main(["--size", "tiny", "--tokens", "32", "--repeats", "2"]) == 0
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) in (2, 5)  # without and with a browser
    assert all(int(fastest) <= int(median) <= int(slowest) for _, median, fastest, slowest, _ in rows)
