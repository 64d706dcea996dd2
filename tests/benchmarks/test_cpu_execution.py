"""Dense against sparse execution of one model on a CPU."""

import re

import pytest

import cpu_execution

SMALL = ["--size", "tiny", "--lengths", "8,32", "--rows", "2", "--fractions", "0.5", "--turns", "2", "--steps", "1"]


@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_a_cell_is_the_ratio_of_both_times(capsys, mode):
    assert cpu_execution.main([*SMALL, "--mode", mode, "--only", "routed", "--execution", "auto"]) == 0
    cells = re.findall(r"\| `routed` \| (\d+) \| 2 \| ([\d.]+) / ([\d.]+) = ([\d.]+) \|", capsys.readouterr().out)
    assert [length for length, *_ in cells] == ["8", "32"]
    assert all(float(number) > 0 for _, *numbers in cells for number in numbers)


def test_what_has_no_dense_execution_of_its_own_is_refused(capsys):
    assert cpu_execution.main([*SMALL, "--only", "mod"]) == 2
    assert "mod" in capsys.readouterr().err
