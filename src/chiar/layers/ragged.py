"""Keys and values of decoding where rows have lengths of their own: a token that is no key takes no memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Capacities are multiples of this."""
ROOM = 16
"""Entries that are free behind the longest row after the lengths were looked at."""


class RaggedStore:
    """Named tensors (B, H, L, d), L entries of which the first `length_B` of each row count, in the order of tokens.

    The lengths live on the device. The host only has `most`, a bound on the longest row that grows by every token seen.
    When it reaches the capacity the host waits for the true lengths, of all stores of a model at once, and lets those
    grow that have less than ROOM entries left. So decoding on a GPU waits at most once in ROOM − 1 steps, and a
    prefill once for each store. The last entry is never in use: tokens that are no keys are written there, which needs
    no look at values.
    """

    def __init__(self, together: "list[RaggedStore]") -> None:
        """`together` are all stores of a model, this one among them."""
        self.together = together
        self.clear()

    def clear(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.length_B: Tensor | None = None
        self.most = 0

    @property
    def capacity(self) -> int:
        return min((part.shape[2] for part in self.parts.values()), default=0)

    def append(self, new: dict[str, Tensor], key_BT: Tensor) -> Tensor:
        """Store the entries (B, H, T, d) of the tokens that are keys. Returns how many keys the row has up to and with
        each token, (B, T)."""
        if self.length_B is None:
            self.length_B = torch.zeros(len(key_BT), dtype=torch.long, device=key_BT.device)
            self.parts = {name: part[:, :, :0] for name, part in new.items()}
        count_BT = self.length_B[:, None] + key_BT.cumsum(1)
        self.length_B = count_BT[:, -1]
        self.most += key_BT.shape[1]
        if self.most >= self.capacity:
            self._look()
        slot_BT = torch.where(key_BT, count_BT - 1, self.capacity - 1)
        row_B1 = torch.arange(len(key_BT), device=key_BT.device)[:, None]
        for name, part in new.items():
            self.parts[name] = put(self.parts[name], (row_B1, slot_BT), part)
        return count_BT

    def visible(self, count_BT: Tensor) -> Tensor:
        """Which entries a token sees, (B, 1, T, L): a key those up to itself, others anything, but never nothing."""
        entry_L = torch.arange(self.capacity, device=count_BT.device)
        return entry_L < count_BT.clamp_min(1)[:, None, :, None]

    def _look(self) -> None:
        """Wait for the longest row of every store, and grow where there is little room."""
        assert self.length_B is not None
        lengths = {
            store: store.length_B
            for store in self.together
            if store.length_B is not None and store.length_B.device == self.length_B.device
        }
        longest = torch.stack([length_B.max() for length_B in lengths.values()]).tolist()
        for store, most in zip(lengths, longest, strict=True):
            store.most = most
            missing = store.most + ROOM - store.capacity
            if missing > 0:
                missing += -(store.capacity + missing) % BLOCK
                store.parts = {name: F.pad(part, (0, 0, 0, missing)) for name, part in store.parts.items()}

    def select_rows(self, rows: Tensor) -> None:
        if self.length_B is not None:
            rows = rows.to(self.length_B.device)
            self.length_B = self.length_B.index_select(0, rows)
            self.parts = {name: part.index_select(0, rows) for name, part in self.parts.items()}

    def repeat_rows(self, repeats: int) -> None:
        if self.length_B is not None:
            self.length_B = self.length_B.repeat_interleave(repeats, dim=0)
            self.parts = {name: part.repeat_interleave(repeats, dim=0) for name, part in self.parts.items()}


def put(stored_BHLd: Tensor, place: tuple[Tensor, Tensor], new_BHTd: Tensor) -> Tensor:
    """Write into rows and entries: in place, unless somebody may still need what was there for a gradient."""
    needed = stored_BHLd.requires_grad or new_BHTd.requires_grad
    if needed or (stored_BHLd.is_inference() and not torch.is_inference_mode_enabled()):
        stored_BHLd = stored_BHLd.clone()
    row_B1, slot_BT = place
    stored_BHLd[row_B1, :, slot_BT] = new_BHTd.transpose(1, 2)
    return stored_BHLd
