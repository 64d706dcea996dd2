"""The cache: what each layer keeps between decoding steps."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from chiar.errors import InputError, require
from chiar.layers.ragged import RaggedStore, Shelf, may_write

Joined = tuple[dict[str, RaggedStore], dict[str, Tensor]]  # the stores and named tensors of a layer


class LayerState(DynamicLayer):
    """The state of one layer: a ragged key-value store for each operator with keys, and named tensors (gate sums), all
    with the batch first. Neither padding nor, under keys="routed", tokens sent to other operators are stored."""

    is_croppable = False

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {}
        self.lines: set[str] = set()  # names of tensors that hold values of the latest tokens, in order
        self.stores: dict[str, RaggedStore] = {}
        self.shelf = shelf

    def get(self, name: str) -> Tensor | None:
        return self.state.get(name)

    def put(self, name: str, value: Tensor) -> None:
        before = self.state.get(name)
        if before is not None and before.shape == value.shape and may_write(before, value.requires_grad):
            before.copy_(value)
        else:
            self.state[name] = value.clone()
            self.shelf.moves += 1

    @property
    def slack(self) -> int:
        return self.shelf.slack

    def put_line(self, name: str, line_BSC: Tensor) -> None:
        if self.slack:
            self.lines.add(name)
        self.put(name, line_BSC)

    def step_back(self, tokens: int, decided: int | None = None) -> None:
        """Take back the last tokens, at most the shelf's `slack`. `decided` is their number for a router that decided
        about more tokens than the layer saw. Only stores and lines change."""
        for store in self.stores.values():
            store.step_back(tokens)
        for name in self.lines:
            if back := tokens if decided is None or not name.startswith("router.") else decided:
                self.put(name, self.state[name][:, :-back])

    def ragged(self, name: str, window: int | None = None) -> RaggedStore:
        if name not in self.stores:
            self.stores[name] = RaggedStore(self.shelf, window)
            self.shelf.stores.add(self.stores[name])
        return self.stores[name]

    def make_writable(self) -> None:
        """Copy tensors that a step could not write into: inference tensors, and those that a gradient needs."""
        for store in self.stores.values():
            store.make_writable()
        for name, value in self.state.items():
            if not may_write(value, False):
                self.state[name] = value.detach().clone()
                self.shelf.moves += 1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for store in self.stores.values():
            store.select_rows(beam_idx)
        for name, value in list(self.state.items()):
            self.put(name, value.index_select(0, beam_idx.to(value.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        for store in self.stores.values():
            store.repeat_rows(repeats)
        for name, value in list(self.state.items()):
            self.put(name, value.repeat_interleave(repeats, dim=0))

    def joined(self, other: "LayerState", rows: int, more: int) -> Joined:
        """These `rows`, then the `more` rows of another state. A store that only one has is empty in the other."""
        require(self.state.keys() == other.state.keys(), "caches of different models cannot be joined.")
        names = dict.fromkeys([*self.stores, *other.stores])
        stores = {name: self.ragged(name).joined(other.ragged(name), rows, more) for name in names}
        return stores, {name: torch.cat([self.state[name], value]) for name, value in other.state.items()}

    def replace(self, joined: Joined) -> None:
        stores, self.state = joined
        for name, store in stores.items():
            self.stores[name].replace(store)
        self.shelf.moves += 1

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("a CHIAR cache cannot be cropped: its causal gate keeps sums, not tokens")

    def reset(self) -> None:
        self.state, self.lines = {}, set()
        for store in self.stores.values():
            store.clear()


class ChiarCache(Cache):
    """One LayerState per layer. Its length is the number of tokens seen: layers may store fewer keys, or none."""

    def __init__(self, layers: int) -> None:
        self.shelf = Shelf()
        super().__init__(layers=[LayerState(self.shelf) for _ in range(layers)])
        self.seen = 0  # tokens of the longest row; rows that were joined later may have fewer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def check_rows(self, rows: int) -> None:
        """Raise if the batch size is not that of the stored rows."""
        held = {len(store.length_B) for store in self.shelf.stores if store.length_B is not None}
        if other := held - {rows}:
            found = f"the cache holds {other.pop()} rows and the input has {rows}"
            raise InputError(f"{found}: a cache can only be used with the batch it began with.")

    def join(self, other: "ChiarCache", rows: int, more: int) -> None:
        """Append the `more` rows of another cache to these `rows`. Each row keeps its own length, so decoding them
        together needs `position_ids` and no mask. If memory runs out, nothing has changed."""
        joined = [mine.joined(theirs, rows, more) for mine, theirs in zip(self.layers, other.layers, strict=True)]
        for layer, new in zip(self.layers, joined, strict=True):
            layer.replace(new)
        self.seen = max(self.seen, other.seen)

    def reset(self) -> None:
        super().reset()
        self.seen = 0
