"""Many marks, a few far above: they stay in the picture at its upper edge, with their values in the legend."""

from xml.etree import ElementTree

from chiar.analysis.pareto import Mark, Scatter, draw_scatters

NEAR = [Mark(n, f"near-{n}", "control", n, 4.0 + n / 100) for n in range(1, 10)]
FAR = Mark(10, "far", "candidate", 5.0, 9.0)


def drawn(marks):
    root = ElementTree.fromstring(draw_scatters("title", [Scatter("loss", "cost", marks)]))
    shapes = [e for e in root.iter() if (e.get("class") or "").startswith("mean")]
    return shapes, [e.text or "" for e in root.iter() if e.tag.endswith("text")]


def test_what_lost_by_far_does_not_press_the_others_together():
    shapes, words = drawn([*NEAR, FAR])
    heights = [float(e.get("y")) for e in shapes if e.get("y")]
    assert len(shapes) == 10 and max(heights) - min(heights) > 150
    assert "10 far ↑9.00" in words and "↑ above the picture" in words
    (edge,) = [float(e.get("cy")) for e in shapes if e.get("cy")]
    assert edge < min(heights)


def test_of_few_all_are_drawn_to_scale():
    shapes, words = drawn([*NEAR[:3], FAR])
    heights = [float(e.get("y")) for e in shapes if e.get("y")]
    assert max(heights) - min(heights) < 10 and not any("↑" in word for word in words)


def test_numbers_stand_apart():
    crowd = [Mark(n, "x", "control", 1.0, 4.0) for n in range(1, 9)]
    root = ElementTree.fromstring(draw_scatters("title", [Scatter("loss", "cost", crowd)]))
    places = [(float(e.get("x")), float(e.get("y"))) for e in root.iter() if e.tag.endswith("text") and is_number(e)]
    assert len(places) == 8
    for n, (x, y) in enumerate(places):
        assert all(abs(x - a) > 12 or abs(y - b) > 8 for a, b in places[:n])


def test_a_frontier_that_begins_far_above_stays_in_the_picture():
    cheap = Mark(10, "cheap", "candidate", 0.5, 9.0)
    root = ElementTree.fromstring(draw_scatters("title", [Scatter("loss", "cost", [*NEAR, cheap])]))
    (line,) = [e for e in root.iter() if e.get("class") == "frontier"]
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert len(heights) == 2 and all(50 < height < 500 for height in heights)


def is_number(element):
    return (element.text or "") in {str(n) for n in range(1, 9)} and element.get("font-size") == "10"
