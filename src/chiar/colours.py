"""The one colour language of pictures, terminals and the page (its marks.js and style.css, compared by a test)."""

from collections.abc import Sequence

Colour = tuple[int, int, int]
# Yellow against blue stays apart under the common colour blindnesses, and in grey all light cells are paler than any
# dark one. Each pair goes from at the threshold to far from it.
LIGHT: tuple[Colour, Colour] = (255, 247, 205), (250, 205, 50)
RAMPS: dict[str, tuple[Colour, Colour]] = {
    "temporal": ((218, 243, 236), (90, 205, 180)),
    "rbf": ((221, 160, 195), (204, 121, 167)),
    "attention": ((120, 170, 215), (8, 40, 100)),
}
NAMES = {"spectral": "light: spectral filter", "temporal": "light: filter along time", "rbf": "between: RBF mixing"}
NAMES |= {"attention": "dark: attention", "carry": "light: what the stack said last"}


def between(near: Colour, far: Colour, share: float) -> str:
    mixed = (round(a + (b - a) * min(share, 1.0)) for a, b in zip(near, far, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def operator_colour(operator: str, strength: float = 1.0) -> str:
    return between(*RAMPS.get(operator, LIGHT), strength)


def route_colour(dark: float) -> str:
    """Of a token that this share of the layers sent to attention."""
    return between(LIGHT[1], RAMPS["attention"][1], dark)


def entropy_colours(share: float) -> tuple[str, str]:
    """Background and letter of a token so uncertain: the light ramp, at ½ palest, then the dark one."""
    back = between(*LIGHT, 1 - 2 * share) if share <= 0.5 else between(*RAMPS["attention"], 2 * share - 1)
    return back, "black" if share < 0.7 else "white"


def uncertainty(score: float, cut: float | None, low: float = 0.0, high: float = 1.0) -> float:
    """Where a score lies between light (0) and dark (1): in the light half up to the threshold, where there is one."""
    if cut is None:
        share = (score - low) / max(high - low, 1e-9)
    else:
        share = 0.5 + (score - cut) / max(cut - low if score <= cut else high - cut, 1e-9) / 2
    return min(max(share, 0.0), 1.0)


def layer_numbers(layers: Sequence[int]) -> str:
    """As people count them: 3, or 3–14 for a dark stack."""
    return str(layers[0] + 1) if len(layers) == 1 else f"{layers[0] + 1}–{layers[-1] + 1}"
