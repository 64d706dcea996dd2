"""Keys and values of decoding where rows have lengths of their own: a token that is no key takes no memory."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.decode_attention import decode_attention

BLOCK = 32  # capacities are multiples of this
ROOM = 64  # entries that are free behind a prompt's longest row, at least; a store that grows later gets an eighth more
LEAST = 16  # with less room than this a store grows


@dataclass
class Shelf:
    """The stores of all layers of a cache. They are looked at together, because looking means to wait."""

    stores: "list[RaggedStore]" = field(default_factory=list)
    slack: int = 0  # how many tokens somebody may step back
    moves: int = 0  # rises when a tensor gets another place in memory, so that whoever noted addresses can tell

    def make_room(self) -> None:
        """For one more token in every store: without a look at the device in all but few steps."""
        if any(store.most + 1 >= store.capacity for store in self.stores):
            self.look()
        for store in self.stores:
            store.most += 1

    def look(self, writing: "RaggedStore | None" = None) -> None:
        """Wait for every store's longest row. Who grows takes along who soon would: a step must be captured again. A
        store that is being written has rows longer than what it holds: it cannot slide."""
        known = [(store, store.length_B) for store in self.stores if store.length_B is not None]
        for device in {length_B.device for _, length_B in known}:
            here = {store: length_B.max() for store, length_B in known if length_B.device == device}
            for store, longest in zip(here, torch.stack(list(here.values())).tolist(), strict=True):
                store.most = longest
        if any(store.capacity - store.most < LEAST for store, _ in known):
            for store, _ in known:
                if store.capacity - store.most < ROOM // 2:
                    store.slide() if store.is_long and store is not writing else store.grow()


class RaggedStore:
    """Named tensors (B, H, L, d), L entries of which the first `length_B` of each row count, in the order of tokens.
    Lengths live on the device; the host has `most`, a bound on the longest row, and looks at the true lengths when it
    reaches the capacity. Between looks all is written in place. The last entry is never in use: of several tokens at
    once those that are no keys are written there, which needs no look at values. With a `window` only so many entries
    of a row, the last, will be seen again: when there is no more room these slide to the beginning."""

    def __init__(self, shelf: Shelf, window: int | None = None) -> None:
        self.shelf, self.window = shelf, window
        self.clear()

    def clear(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.length_B: Tensor | None = None
        self.most = self.capacity = 0
        self.shelf.moves += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever offered to it."""
        return self.length_B is None

    def begin(self, new: dict[str, Tensor]) -> Tensor:
        """Tensors without entries, like `new` (B, H, T, d), where there are none. Returns each row's length."""
        if self.length_B is None:
            some = next(iter(new.values()))
            self.length_B = torch.zeros(len(some), dtype=torch.long, device=some.device)
            self.parts = {name: part[:, :, :0] for name, part in new.items()}
        return self.length_B

    def grow(self) -> None:
        room = max(ROOM, self.capacity // 8)  # a share of the length, or long texts would be copied again and again
        capacity = -(-(self.most + room) // BLOCK) * BLOCK
        missing, self.capacity = capacity - self.capacity, capacity
        self.parts = {name: F.pad(part, (0, 0, 0, missing)).contiguous() for name, part in self.parts.items()}
        self.shelf.moves += 1

    @property
    def is_long(self) -> bool:
        """Whether a row may hold more than its window, and room for a window is there."""
        return self.window is not None and self.most > self.window + self.shelf.slack

    def slide(self) -> None:
        """Keep the last entries of each row: its window, and those it has again after steps back. The tensors stay in
        place once their room is a window's."""
        assert self.window is not None and self.length_B is not None
        window, length_B = self.window + self.shelf.slack, self.length_B
        capacity = -(-(window + max(ROOM, window // 4)) // BLOCK) * BLOCK
        kept_B = length_B.clamp(max=window)
        place_BL = (length_B - kept_B)[:, None] + torch.arange(window, device=length_B.device)
        place_BL = place_BL.clamp(max=self.capacity - 1)
        for name, part in self.parts.items():
            H, d = part.shape[1], part.shape[3]
            kept = part.gather(2, place_BL[:, None, :, None].expand(-1, H, -1, d))
            if self.capacity == capacity and may_write(part, False):
                part[:, :, :window] = kept
            else:
                self.parts[name] = F.pad(kept, (0, 0, 0, capacity - window)).contiguous()
                self.shelf.moves += 1
        self.length_B = self.rewritten(length_B, kept_B)
        self.most, self.capacity = min(self.most, window), capacity

    def append(self, new: dict[str, Tensor], key_BT: Tensor) -> Tensor:
        """Store the entries (B, H, T, d) of tokens that are keys. Returns each row's keys up to each token, (B, T)."""
        length_B = self.begin(new)
        if self.window is not None and not self.capacity:  # a prompt: what is behind its window is never seen again
            key_BT = key_BT & (key_BT.flip(1).cumsum(1).flip(1) <= self.window)
        elif self.is_long and self.most + key_BT.shape[1] >= self.capacity:
            self.slide()
            length_B = self.begin(new)
        count_BT = length_B[:, None] + key_BT.cumsum(1)
        self.length_B = self.rewritten(length_B, count_BT[:, -1])
        self.most += key_BT.shape[1]
        if self.most >= self.capacity:
            self.shelf.look(writing=self)
        slot_BT = torch.where(key_BT, count_BT - 1, self.capacity - 1)
        row_B1 = torch.arange(len(key_BT), device=key_BT.device)[:, None]
        for name, part in new.items():
            stored = self.parts[name] = self.writable(self.parts[name], part.requires_grad)
            stored[row_B1, :, slot_BT] = part.transpose(1, 2).to(stored.dtype)
        return count_BT

    def attend(self, q_BHd: Tensor, k_BHd: Tensor, v_BHd: Tensor, key_B: Tensor) -> Tensor:
        """Store one token a row where `key_B`, and what these rows see; 0 for the others. There is room."""
        assert self.length_B is not None
        key_BHLd, value_BHLd = self.parts["key"], self.parts["value"]
        new = (x.to(key_BHLd.dtype) for x in (q_BHd, k_BHd, v_BHd))
        stored = key_BHLd, value_BHLd, self.length_B, key_B
        return decode_attention(*new, *stored, window=self.window or 0).to(q_BHd.dtype)

    def make_room(self, k_BHTd: Tensor, v_BHTd: Tensor) -> None:
        """For one more token, in tensors that may be written."""
        self.begin({"key": k_BHTd, "value": v_BHTd})
        if self.most + 1 >= self.capacity:
            self.shelf.look()
        self.most += 1
        self.make_writable()

    def make_writable(self) -> None:
        if self.length_B is not None:
            self.length_B = self.writable(self.length_B)
            self.parts = {name: self.writable(part) for name, part in self.parts.items()}

    def step_back(self, tokens: int) -> None:
        """Forget the last entries of each row."""
        if self.length_B is not None and tokens:
            self.length_B = self.rewritten(self.length_B, self.length_B - tokens)
            self.most -= tokens

    def used(self, name: str) -> Tensor:
        """The entries that may count, (B, H, ≤ L, d)."""
        return self.parts[name][:, :, : self.most]

    def visible(self, count_BT: Tensor) -> Tensor:
        """Which of these a token sees, (B, 1, T, ≤ L): a key those up to itself, others anything, but never nothing."""
        entry_L = torch.arange(min(self.most, self.capacity), device=count_BT.device)
        count_B1T1 = count_BT.clamp_min(1)[:, None, :, None]
        seen = entry_L < count_B1T1
        return seen if self.window is None else seen & (entry_L >= count_B1T1 - self.window)

    def select_rows(self, rows: Tensor) -> None:
        if self.length_B is not None:
            rows = rows.to(self.length_B.device)
            self.length_B = self.rewritten(self.length_B, self.length_B.index_select(0, rows))
            self.parts = {name: self.rewritten(part, part.index_select(0, rows)) for name, part in self.parts.items()}

    def repeat_rows(self, repeats: int) -> None:
        if self.length_B is not None:
            self.length_B = self.length_B.repeat_interleave(repeats, dim=0)
            self.parts = {name: part.repeat_interleave(repeats, dim=0) for name, part in self.parts.items()}
            self.shelf.moves += 1

    def joined(self, other: "RaggedStore", rows: int, more: int) -> "RaggedStore":
        """The `more` rows of another store behind these `rows`. Where nothing was ever offered they are empty."""
        made = RaggedStore(self.shelf, self.window)
        if self.is_empty and other.is_empty:
            return made
        made.length_B = torch.cat([self.begin(other.emptied(rows)), other.begin(self.emptied(more))])
        made.capacity, made.most = max(self.capacity, other.capacity), max(self.most, other.most)

        def alike(part: Tensor) -> Tensor:
            return F.pad(part, (0, 0, 0, made.capacity - part.shape[2]))

        made.parts = {name: torch.cat([alike(part), alike(other.parts[name])]) for name, part in self.parts.items()}
        return made

    def emptied(self, rows: int) -> dict[str, Tensor]:
        return {name: part[:1, :, :0].expand(rows, -1, -1, -1) for name, part in self.parts.items()}

    def replace(self, other: "RaggedStore") -> None:
        """Hold what another store holds."""
        self.parts, self.length_B, self.most, self.capacity = other.parts, other.length_B, other.most, other.capacity
        self.shelf.moves += 1

    def writable(self, stored: Tensor, differentiable: bool = False) -> Tensor:
        """The tensor itself, or a copy where somebody may still need what was there for a gradient."""
        if may_write(stored, differentiable):
            return stored
        self.shelf.moves += 1
        return stored.clone()

    def rewritten(self, stored: Tensor, new: Tensor) -> Tensor:
        """`new`, in the place of `stored` where it fits there."""
        if stored.shape == new.shape and may_write(stored, new.requires_grad):
            return stored.copy_(new)
        self.shelf.moves += 1
        return new


def may_write(stored: Tensor, differentiable: bool) -> bool:
    needed = stored.requires_grad or differentiable
    if torch.compiler.is_compiling():  # then everything was made writable before
        return not needed
    return not needed and (torch.is_inference_mode_enabled() or not stored.is_inference())
