"""Tables fit the terminal: headings and texts fold, further columns go below, and nothing is truncated."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from chiar.console import fit_to_width
from commands import run

ROOT = Path(__file__).parents[1]
LONG = "f = 1/3 between full layers, light tokens skip the FFN"


def printed(table):
    console = Console(width=400, markup=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize(("numbers", "width", "parts"), [(4, 100, 1), (12, 100, 2), (12, 60, 4), (1, 50, 1)])
def test_every_cell_is_shown_within_the_width(numbers, width, parts):
    headings = [f"attention saved in layer {n}" for n in range(numbers)]
    table = Table("variant", *headings, "what", box=None)
    table.add_row("[sandwich]", *(f"{n}.123456" for n in range(numbers)), LONG)
    found = [printed(part) for part in fit_to_width(table, width)]
    assert len(found) == parts
    assert max(len(line) for lines in found for line in lines) <= width
    words = " ".join(line for lines in found for line in lines).split()
    assert {f"{n}.123456" for n in range(numbers)} | {"[sandwich]", *LONG.split()} <= {*words}
    assert sum("variant" in line for lines in found for line in lines) == parts


@pytest.mark.parametrize(
    "command",
    [
        ("models",),
        ("flops", "v3-400m", "--length", "256,2048,8192", "--fraction", "0.5", "--keys", "routed"),
        ("data", "show"),
        ("calibrate", "v3-tiny", "--text-file", ROOT / "README.md", "--length", "64", "--rows", "4"),
        ("study", "table", ROOT / "docs" / "results" / "routers40m_long"),
    ],
    ids=lambda command: command[0],
)
def test_tables_of_commands_fit_100_columns(command):
    code, output = run(*command)
    assert code == 0
    assert max(len(line.rstrip()) for line in output.splitlines() if not line.startswith("note: ")) <= 100
