"""How light or dark the tokens of a text are, while it is written."""

from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from chiar.model.cache import ChiarCache

SHADES = "░▒▓█"
# From yellow (light) to blue (dark), which either common colour blindness keeps apart; text turns from black to white.
LIGHT, DARK = (255, 221, 87), (0, 60, 130)


class RouteReader:
    """Reads the tokens a second time, beside generate, with a cache of its own; a frozen gate freezes here alike.

    generate hands on no routes, and it reads a token only when it looks for the next one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = ChiarCache(len(model.model.layers))

    @torch.no_grad()
    def read(self, tokens: list[int]) -> list[float]:
        """For each token the weight of attention, averaged over the routed layers."""
        ids = torch.tensor([tokens], device=self.model.device)
        trace = self.model.model(ids, past_key_values=self.cache, output_routing=True).routing
        layers = [trace.layers[layer] for layer in trace.routed_layers]
        weights_BT = [layer.weights_BTK[..., layer.operators.index("attention")].float() for layer in layers]
        return torch.stack(weights_BT).mean(0)[0].tolist()


def marked(text: str, dark: float, console: Console) -> Text:
    """The text on a background between yellow and blue, or behind a shade where there is no colour."""
    if colourful(console):
        return Text(text, style(dark))
    return Text(SHADES[min(int(dark * len(SHADES)), len(SHADES) - 1)] + text)


def legend(console: Console) -> Text:
    meaning = "share of the routed layers that sent the token to attention"
    if colourful(console):
        steps = [Text(f" {share:.0%} ", style(share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        return Text.assemble("light ", *steps, f" dark: {meaning}")
    return Text(f"{SHADES[0]} light … {SHADES[-1]} dark, before each token: {meaning}")


def colourful(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def style(dark: float) -> str:
    red, green, blue = (round(a + (b - a) * dark) for a, b in zip(LIGHT, DARK, strict=True))
    return f"{'black' if dark < 0.5 else 'white'} on rgb({red},{green},{blue})"
