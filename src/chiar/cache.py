"""What a model remembers between decoding steps."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from chiar.layers.ragged import RaggedStore


class LayerState(DynamicLayer):
    """Named tensors of one layer, all with the batch first: keys, values, key marks, RBF features, gate sums.

    Under keys="routed" a routed layer stores the tokens sent to an operator only, in a ragged store for each.
    """

    is_croppable = False

    def __init__(self, together: list[RaggedStore]) -> None:
        """`together` collects the ragged stores of all layers."""
        super().__init__()
        self.state: dict[str, Tensor] = {}
        self.stores: dict[str, RaggedStore] = {}
        self.together = together

    def append(self, name: str, new: Tensor, time_axis: int) -> Tensor:
        self.state[name] = torch.cat([self.state[name], new], dim=time_axis) if name in self.state else new
        return self.state[name]

    def get(self, name: str) -> Tensor | None:
        return self.state.get(name)

    def put(self, name: str, value: Tensor) -> None:
        self.state[name] = value

    def ragged(self, name: str) -> RaggedStore:
        if name not in self.stores:
            self.stores[name] = RaggedStore(self.together)
            self.together.append(self.stores[name])
        return self.stores[name]

    def _select_rows(self, rows: Tensor) -> None:
        for store in self.stores.values():
            store.select_rows(rows)
        self.state = {name: value.index_select(0, rows.to(value.device)) for name, value in self.state.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for store in self.stores.values():
            store.repeat_rows(repeats)
        self.state = {name: value.repeat_interleave(repeats, dim=0) for name, value in self.state.items()}

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("a CHIAR cache cannot be cropped: its causal gate keeps sums, not tokens")

    def reset(self) -> None:
        self.state = {}
        for store in self.stores.values():
            store.clear()


class ChiarCache(Cache):
    """One LayerState a layer. Its length is the number of tokens seen: a spectral layer stores no keys at all."""

    def __init__(self, layers: int) -> None:
        together: list[RaggedStore] = []
        super().__init__(layers=[LayerState(together) for _ in range(layers)])
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reset(self) -> None:
        super().reset()
        self.seen = 0


def check_cache(cache: Any) -> ChiarCache:
    """The cache as ours, or a TypeError: transformers' general ones have no place for key marks and gate sums."""
    if isinstance(cache, ChiarCache):
        return cache
    raise TypeError(
        f"CHIAR-Former needs a chiar.cache.ChiarCache, got {type(cache).__name__}: pass none to have one made."
    )
