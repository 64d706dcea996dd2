"""Key-value stores for decoding in which every row has its own length: a token that is no key takes no memory."""

from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.decode_attention import decode_attention

BLOCK = 32  # capacities are multiples of this
ROOM = 64  # least free entries after a prompt's longest row; a store that grows later gets an eighth more
LEAST = 16  # with less room than this a store grows


@dataclass
class Shelf:
    """The stores of all layers of a cache. Their lengths are read together, because each read waits for the device."""

    # Weak, because stores know their shelf: in a reference cycle a cache would keep its memory until one is looked for.
    stores: "WeakSet[RaggedStore]" = field(default_factory=WeakSet)
    slack: int = 0  # how many tokens may be taken back
    moves: int = 0  # counts reallocations, so that holders of addresses (CUDA graphs) notice

    def make_room(self) -> None:
        """For one more token in every store; only few steps have to read lengths from the device."""
        if any(store.most + 1 >= store.capacity for store in self.stores):
            self.look()
        for store in self.stores:
            store.most += 1

    def look(self, writing: "RaggedStore | None" = None) -> None:
        """Read every store's longest row from the device. When one store must grow, those nearly full grow too, because
        a step must then be captured again. `writing` is the store being appended to: its lengths already count tokens
        it does not hold yet, so it cannot slide."""
        known = [(store, store.length_B) for store in self.stores if store.length_B is not None]
        for device in {length_B.device for _, length_B in known}:
            here = {store: length_B for store, length_B in known if length_B.device == device}
            for store, longest in zip(here, torch.stack(list(here.values())).amax(1).tolist(), strict=True):
                store.most = longest
        if any(store.capacity - store.most < LEAST for store, _ in known):
            for store, _ in known:
                if store.capacity - store.most < ROOM // 2:
                    store.slide() if store.is_long and store is not writing else store.grow()


class RaggedStore:
    """Named tensors (B, H, L, d). The first `length_B` of the L entries of each row are valid, in the order of tokens.
    Lengths live on the device. The host keeps `most`, an upper bound on the longest row, and reads the true lengths
    when that reaches the capacity, unless they are known; in between everything is written in place. The last entry is
    never valid: `append` writes tokens that are no keys there, so that no values have to be read. With a `window` only
    the last entries of a row are needed again; when there is no more room they slide to the beginning."""

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
        """Whether it has no tensors yet: neither `begin` nor `append` was called."""
        return self.length_B is None

    def begin(self, new: dict[str, Tensor]) -> Tensor:
        """Create empty tensors like `new` (B, H, T, d) if there are none. Returns each row's length."""
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
        """Whether a row may hold more than its window needs."""
        return self.window is not None and self.most > self.window + self.shelf.slack

    def slide(self) -> None:
        """Keep only the last entries of each row: its window, and what a step back would need. Once the capacity is
        that of a window the tensors stay in place."""
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

    def append(self, new: dict[str, Tensor], key_BT: Tensor, full: bool = False) -> Tensor:
        """Store the entries (B, H, T, d) of tokens that are keys. Returns each row's keys up to each token, (B, T).
        `full` says that all tokens of some longest row are keys: then its length is known without the device."""
        length_B, most_new = self.begin(new), key_BT.shape[1]
        if self.window is not None and not self.capacity:  # a prompt: entries outside its window are never seen again
            key_BT = key_BT & (key_BT.flip(1).cumsum(1).flip(1) <= self.window)
            most_new = min(most_new, self.window)
        elif self.is_long and self.most + most_new >= self.capacity:
            self.slide()
            length_B = self.begin(new)
        count_BT = length_B[:, None] + key_BT.cumsum(1)
        self.length_B = self.rewritten(length_B, count_BT[:, -1])
        self.most += most_new
        if self.most >= self.capacity and full:
            self.grow()
        elif self.most >= self.capacity:
            self.shelf.look(writing=self)
        slot_BT = torch.where(key_BT, count_BT - 1, self.capacity - 1)
        row_B1 = torch.arange(len(key_BT), device=key_BT.device)[:, None]
        for name, part in new.items():
            stored = self.parts[name] = self.writable(self.parts[name], part.requires_grad)
            stored[row_B1, :, slot_BT] = part.transpose(1, 2).to(stored.dtype)
        return count_BT

    def attend(self, q_BHd: Tensor, k_BHd: Tensor, v_BHd: Tensor, key_B: Tensor) -> Tensor:
        """Store one token in each row of `key_B` and return these rows' attention; 0 for others. There must be room."""
        assert self.length_B is not None
        key_BHLd, value_BHLd = self.parts["key"], self.parts["value"]
        new = (x.to(key_BHLd.dtype) for x in (q_BHd, k_BHd, v_BHd))
        stored = key_BHLd, value_BHLd, self.length_B, key_B
        return decode_attention(*new, *stored, window=self.window or 0).to(q_BHd.dtype)

    def make_room(self, k_BHTd: Tensor, v_BHTd: Tensor) -> None:
        """For one more token, in writable tensors."""
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
        """The first `most` entries, (B, H, ≤ L, d); `visible` masks those that are not valid."""
        return self.parts[name][:, :, : self.most]

    def visible(self, count_BT: Tensor) -> Tensor:
        """Attention mask over `used`, (B, 1, T, ≤ L): a key sees entries up to itself; other tokens see at least
        one."""
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
        """These `rows`, then the `more` rows of another store. A store without tensors counts as empty
        rows."""
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
        """The tensor itself, or a copy if a gradient may still need its values."""
        if may_write(stored, differentiable):
            return stored
        self.shelf.moves += 1
        return stored.clone()

    def rewritten(self, stored: Tensor, new: Tensor) -> Tensor:
        """`new`, written into `stored` where it fits."""
        if stored.shape == new.shape and may_write(stored, new.requires_grad):
            return stored.copy_(new)
        self.shelf.moves += 1
        return new


def may_write(stored: Tensor, differentiable: bool) -> bool:
    needed = stored.requires_grad or differentiable
    if torch.compiler.is_compiling():  # everything was made writable before
        return not needed
    return not needed and (torch.is_inference_mode_enabled() or not stored.is_inference())
