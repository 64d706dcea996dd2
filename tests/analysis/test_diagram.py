"""Diagrams come from configurations; the ones in docs are what the code draws today."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from chiar import presets
from chiar.analysis.diagram import draw

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.parametrize("name", ["baseline-16m", "v1-16m", "v2-16m", "v3-400m", "v4-400m"])
def test_committed_diagrams_are_current(name):
    assert (FIGURES / f"{name}.svg").read_text() == draw(presets.get(name), title=name), "run 'make figures'"


def words(config):
    root = ElementTree.fromstring(draw(config, title="t <&> t"))
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_diagram_shows_what_the_configuration_says():
    v3 = words(presets.get("v3-400m"))
    assert {"MetaRouter", "layer 1", "layers 2–27 (×26)", "layer 28", "light: H ≤ τ", "dark: H > τ"} <= set(v3)
    assert "RBF mixing" in words(presets.get("v1-16m"))
    assert "MetaRouter" not in words(presets.get("v2-16m"))
    normed = "RoPE turns queries and keys instead; then RMS norm"
    assert normed in words(presets.get("v3-16m", embedding_norm=True)) and normed not in v3
    assert "light tokens skip it" in words(presets.get("v3-16m", light_ffn=False))
    assert {"layers 1, 3, … 27 (×14)", "layers 2, 4, … 28 (×14)"} <= set(words(presets.get("v4-400m")))
    assert "feed-forward, one for light tokens, one for the others" in words(presets.get("v3-16m", own_ffn=True))
    assert "layers 1–4 (×4)" in words(presets.get("baseline-16m"))
    assert {"layer 1", "layer 4"} <= set(words(presets.get("v4-16m")))
    assert v3[0] == "t <&> t"
    along = words(
        presets.get("v3-16m", operators=["temporal", "attention"], signal="temporal", temporal_everywhere=True)
    )
    assert along.count("temporal filter") == 4
    assert "H of the last 16 tokens along time, cut at τ" in along
