"""Small charts under one title and legend: nothing may lie on anything else."""

from xml.etree import ElementTree

from chiar.analysis.chart import Line
from chiar.analysis.panels import SmallPanel, draw_grid

SVG = "{http://www.w3.org/2000/svg}"


def texts(title, lines):
    """Every text with the height it stands at."""
    panels = [SmallPanel(name, lines) for name in ("left panel", "right panel")]
    root = ElementTree.fromstring(draw_grid(title, panels, lines, "", ""))
    return {element.text: float(element.get("y")) for element in root.iter(f"{SVG}text")}


def test_a_long_legend_pushes_the_panels_down():
    few, many = ([Line(f"run {n}: g on a corpus", [(0, 0), (1, 1)], "#000000") for n in range(k)] for k in (2, 12))
    assert texts("t", few)["left panel"] < texts("t", many)["left panel"]
    for lines in (few, many):
        found = texts("t", lines)
        assert max(found[line.label] for line in lines) + 12 <= found["left panel"]


def test_a_long_title_is_cut_to_the_picture():
    found = texts("a run with a name " * 20, [Line("x", [(0, 0), (1, 1)], "#000000")])
    (title,) = (text for text in found if text and "a run" in text)
    assert title.endswith("…") and len(title) < 100
