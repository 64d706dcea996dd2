"""Routing pictures: a cell for every layer and token, coloured by route and distance from the threshold."""

from xml.etree import ElementTree

import pytest
import torch

from chiar.analysis.trace_picture import distance, draw_routing, mix
from chiar.layers.context import LIGHT_OPERATORS
from chiar.routing.tables import RoutedText, route_text

SVG = "{http://www.w3.org/2000/svg}"


def routed(lively, option, pieces, heading="model"):
    ids = torch.arange(len(pieces))[None]
    with torch.no_grad():
        return RoutedText(heading, pieces, lively(option)(ids, output_routing=True).routing)


def cells(root):
    return [element for element in root.iter(f"{SVG}rect") if element.get("class") == "cell"]


def luminance(colour):
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_cell_for_every_layer_and_token(lively, router_option):
    text = routed(lively, router_option, ["token"] * 40)
    found = cells(ElementTree.fromstring(draw_routing(text)))
    assert len(found) == 4 * 40
    assert all(float(cell.get("x")) + float(cell.get("width")) <= 960 for cell in found)


def test_colours_are_the_routes(lively):
    text = routed(lively, {}, [f"t{n}" for n in range(10)])
    found = cells(ElementTree.fromstring(draw_routing(text)))
    layers = text.trace.layers
    for number, cell in enumerate(found):
        token, layer = divmod(number, 4)
        operator = layers[layer].operators[int(layers[layer].choice_BT[0, token])]
        assert f"layer {layer + 1}: {operator}" in cell[0].text
        gap = distance(layers[layer], token)
        if gap is not None:
            assert (gap > 0) == (operator == "attention")
        assert (luminance(cell.get("fill")) < 180) == (operator == "attention")


def test_light_is_paler_than_dark_at_any_distance():
    darkest = min(luminance(mix(light, s)) for light in (*LIGHT_OPERATORS, "your own") for s in (0, 0.5, 1))
    assert darkest > max(luminance(mix("attention", s)) for s in (0, 0.5, 1))


def test_hostile_text_is_text(lively):
    hostile = ["</text><script>", "&amp;", "\x00\x1b", "\n\t", "", "\udc80", "]]>", '"', "x" * 500]
    root = ElementTree.fromstring(draw_routing(routed(lively, {}, hostile, heading="<b>&\x07")))
    assert not list(root.iter(f"{SVG}script"))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"</text><script>", "&amp;", "\\x00\\x1b", "⏎⇥", "<b>&\\x07"} <= set(words)


@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v2-tiny"])
def test_other_presets(preset):
    ElementTree.fromstring(draw_routing(route_text(preset, "light", None, 0)))
