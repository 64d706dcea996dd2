"""A text continued token by token, with the route of each token as it is read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chiar.errors import InputError
from chiar.explore.loaded import LoadedModel
from chiar.explore.pieces import Pieces
from chiar.explore.steering import Steering, moved_thresholds, steered
from chiar.explore.view import describe_layer, describe_tokens, describe_view, encode_text, token_nats
from chiar.generation.stream import GREEDY_BELOW
from chiar.model.cache import ChiarCache
from chiar.model.trace import RoutingTrace


@dataclass(frozen=True)
class Wish:
    """How a text is continued; a temperature of 0, or nearly so, takes the likeliest token."""

    tokens: int = 40
    temperature: float = 0.7
    seed: int = 0


class Continuation:
    """One text being continued. Each call is one pass of the model, so others get their turn in between."""

    def __init__(self, loaded: LoadedModel, text: str, wish: Wish, steering: Steering | None, most: int) -> None:
        self.loaded, self.wish, self.steering = loaded, wish, steering
        self.prompt = encode_text(loaded, text, most)
        room = min(most, loaded.most_tokens or most) - len(self.prompt)
        if room < 1:
            raise InputError(f"the text fills all {len(self.prompt):,} tokens there is room for: shorten it.")
        self.left = min(wish.tokens, room)
        self.ids: list[int] = []
        self.pieces = Pieces(loaded.codec)
        self.cache = ChiarCache(len(loaded.model.model.layers))
        self.generator = torch.Generator().manual_seed(wish.seed)
        self.logits_V: Tensor | None = None

    def begin(self) -> dict[str, Any]:
        """Read the text: the same view as routing it."""
        ids_BT = torch.tensor([self.prompt])
        states_BTD, trace = self.read(ids_BT)
        nats = token_nats(self.loaded.model, states_BTD, ids_BT)
        return describe_view(self.loaded, [self.pieces.next(token) for token in self.prompt], trace, nats)

    def step(self) -> dict[str, Any] | None:
        """Choose a token and read it: itself, its route in every layer, all that was written. None at the end."""
        if self.left == 0:
            return None
        chosen, nats = self.choose()
        if chosen in ends_of_text(self.loaded.config):
            self.left = 0
            return None
        self.left -= 1
        self.ids.append(chosen)
        _, trace = self.read(torch.tensor([[chosen]]))
        token = describe_tokens([self.pieces.next(chosen)], trace, [nats])[0]
        layers = [describe_layer(trace, layer) for layer in trace.layers]
        return {"token": token, "layers": layers, "text": self.loaded.codec.decode(self.ids)}

    @torch.no_grad()
    def read(self, ids_BT: Tensor) -> tuple[Tensor, RoutingTrace]:
        model = self.loaded.model
        with steered(model.model, self.steering):
            output = model.model(ids_BT, past_key_values=self.cache, output_routing=True)
        if self.steering is not None:
            moved_thresholds(self.loaded.config, self.steering, output.routing)
        self.logits_V = model.lm_head(output.last_hidden_state[0, -1]).float()
        return output.last_hidden_state, output.routing

    def choose(self) -> tuple[int, float]:
        assert self.logits_V is not None
        if self.wish.temperature < GREEDY_BELOW:
            chosen = int(self.logits_V.argmax())
        else:
            p_V = (self.logits_V / self.wish.temperature).softmax(-1)
            chosen = int(torch.multinomial(p_V, 1, generator=self.generator))
        return chosen, -float(self.logits_V.log_softmax(-1)[chosen])


def ends_of_text(config: Any) -> list[int]:
    end = config.eos_token_id
    return [] if end is None else list(end) if isinstance(end, list) else [end]
