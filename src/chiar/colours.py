"""Colours of figures, terminal output and the explore page, whose marks.js and style.css a test compares with these."""

from collections.abc import Sequence

Colour = tuple[int, int, int]
# Yellow and blue are distinct under the common kinds of colour blindness, and in grey every light cell is paler than
# every dark one. Each pair is the colour at the threshold and the colour far from it.
LIGHT: tuple[Colour, Colour] = (255, 247, 205), (250, 205, 50)
RAMPS: dict[str, tuple[Colour, Colour]] = {
    "temporal": ((218, 243, 236), (90, 205, 180)),
    "rbf": ((221, 160, 195), (204, 121, 167)),
    "attention": ((120, 170, 215), (8, 40, 100)),
}
NAMES = {"spectral": "light: spectral filter", "temporal": "light: temporal filter", "rbf": "between: RBF mixing"}
NAMES |= {"attention": "dark: attention", "carry": "light: last change of the stack"}


def mix(near: Colour, far: Colour, share: float) -> str:
    mixed = (round(a + (b - a) * min(share, 1.0)) for a, b in zip(near, far, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def operator_colour(operator: str, strength: float = 1.0) -> str:
    return mix(*RAMPS.get(operator, LIGHT), strength)


def route_colour(dark: float) -> str:
    """Colour of a token that this share of the layers sent to attention."""
    return mix(LIGHT[1], RAMPS["attention"][1], dark)


def entropy_colours(share: float) -> tuple[str, str]:
    """Background and text colour of a token by `uncertainty`: the light ramp, palest at ½, then the dark one."""
    background = mix(*LIGHT, 1 - 2 * share) if share <= 0.5 else mix(*RAMPS["attention"], 2 * share - 1)
    return background, "black" if share < 0.7 else "white"


def uncertainty(score: float, cut: float | None, low: float = 0.0, high: float = 1.0) -> float:
    """Maps a score to light (0) … dark (1), with the threshold, if there is one, at ½."""
    if cut is None:
        share = (score - low) / max(high - low, 1e-9)
    else:
        share = 0.5 + (score - cut) / max(cut - low if score <= cut else high - cut, 1e-9) / 2
    return min(max(share, 0.0), 1.0)


def layer_numbers(layers: Sequence[int]) -> str:
    """Numbers from 1, for display: 3, or 3–14 for a dark stack."""
    return str(layers[0] + 1) if len(layers) == 1 else f"{layers[0] + 1}–{layers[-1] + 1}"
