"""A dark stack: consecutive layers that only dark tokens pass, the router before them and the carry after them.

    H_t = entropy(softmax(U · norm(x_t))) / log V, in [0, 1]
    dark_t = H_t − H_{t−1} > τ                                      or another router's score
    z = layers(x[dark]);   δ = z − x[dark]                          dark tokens only, at their true positions
    x_t += dark_t · δ_t + W · δ_last(t)                             last(t): the latest dark token at or before t

Tokens are packed once, so the stack runs as an ordinary model on a shorter text (`PackedLayout`). The definition
(`DenseLayout`) runs every layer on every token and treats light ones as padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.kernels.carry import carry_packed, last_marked, smoothed
from chiar.kernels.flash import has_flash
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.kernels.packing import Packing, pack, unpack
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.layers.attention import rotary_tables
from chiar.layers.block import make_norm
from chiar.layers.context import Maybe, Memory, TokenContext, stored_in
from chiar.layers.routers import ChoiceRouter, Route, check_route
from chiar.layers.stack_routers import DARK, BoundaryRouter, ForecastRouter, predictive_entropy, ratio_loss

BLOCK = 128  # packed places are a multiple of this where their number is fixed
RunLayers = Callable[[Tensor, TokenContext], Tensor]  # runs the layers of a stack


class Carry(nn.Linear):
    """W: maps the stack's latest change to what later tokens receive. It starts at 0."""

    sets_own_weights = True

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)


@dataclass
class Decision:
    """Which tokens pass a stack."""

    route: Route
    entropy_BT: Maybe  # H, where the router reads it or a trace asks for it
    router_input_BTD: Tensor  # what the early head and the router read
    dark_BT: Tensor  # real tokens the router chose


@dataclass
class StackOutput(Decision):
    """The decision, and how many dark tokens the packed layout had no room for."""

    dropped: Tensor


class DarkStack(nn.Module):
    """Early head and router before the dark layers that begin at `first`, and the carry after them. The layers
    themselves belong to the decoder."""

    def __init__(self, config: ChiarConfig, first: int) -> None:
        super().__init__()
        kind, D, inner = config.router_kind, config.hidden_size, config.inner_size
        number = config.routed_layers.index(first)
        fractions = config.layer_fractions()
        self.share = kind.fraction(config) if kind.fraction else fractions[number] if fractions else 1.0
        self.room, self.follows = kind.room, config.follows_quantile
        self.gap = config.temporal_window - 1 if config.temporal_everywhere else 0
        self.entropy_eps, self.entropy_dc_weight = config.entropy_eps, config.entropy_dc_weight
        self.reads_entropy, self.reads_prediction = kind.reads_entropy, kind.reads_prediction
        self.early_weight, self.head_size = config.early_weight, config.head_size
        wanted = config.early_weight > 0 or kind.reads_prediction
        self.norm = make_norm(config) if wanted or kind.reads_state else None
        self.trains_outer_layers = config.early_weight > 0  # else the early head's loss stops at its input
        self.early = nn.Linear(D, config.vocab_size, bias=False) if wanted else None
        self.router = kind.make(config, first)
        self.widen = nn.Linear(D, inner, bias=False) if inner else None
        self.narrow = nn.Linear(inner, D, bias=False) if inner else None
        self.carry = Carry(D, D, bias=False) if config.carry == "linear" else None
        self.smooth = config.carry == "smoothed"

    def forward(
        self, x_BTD: Tensor, context: TokenContext, memory: Memory, forced_BT: Maybe, run_layers: RunLayers
    ) -> tuple[Tensor, StackOutput]:
        decided = self.decide(x_BTD, context, memory, forced_BT)
        layout = self.make_layout(x_BTD, decided.dark_BT, context, memory)
        change = None if layout.is_empty else self.run(layout, x_BTD, decided.route, run_layers)
        y_BTD = self.combine(layout, x_BTD, change, decided.route, memory)
        return y_BTD, StackOutput(**vars(decided), dropped=layout.dropped)

    def compile(self, *how: Any, **options: Any) -> None:
        """Compile routing and combining; the layers are compiled by themselves. `uncompile` undoes it."""
        for step in ("decide", "combine"):
            setattr(self, step, torch.compile(getattr(self, step), *how, **options))

    def uncompile(self) -> None:
        for step in ("decide", "combine"):
            vars(self).pop(step, None)

    def decide(self, x_BTD: Tensor, context: TokenContext, memory: Memory, forced_BT: Maybe) -> Decision:
        router_input_BTD = x_BTD if self.trains_outer_layers or not self.reads_prediction else x_BTD.detach()
        router_input_BTD = router_input_BTD if self.norm is None else self.norm(router_input_BTD)
        entropy_BT = self.entropy(x_BTD, router_input_BTD, context)
        route = self.choose(router_input_BTD, entropy_BT, context.of("router", memory), forced_BT)
        dark_BT = route.choice_BT == DARK
        if context.real_BT is not None:
            dark_BT = dark_BT & context.real_BT
        return Decision(route, entropy_BT, router_input_BTD, dark_BT)

    def entropy(self, x_BTD: Tensor, router_input_BTD: Tensor, context: TokenContext) -> Maybe:
        if self.early is not None and (self.reads_prediction or (context.keep_entropy and not self.reads_entropy)):
            with torch.no_grad():
                return predictive_entropy(self.early(router_input_BTD))
        if not self.reads_entropy:
            return None
        with torch.no_grad():
            return spectral_entropy(x_BTD, context.transform, self.entropy_eps, self.entropy_dc_weight)

    def choose(self, router_input_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        if self.training and self.follows:
            context.share = self.share
        route = self.router(router_input_BTD, entropy_BT, context, forced_BT)
        if not isinstance(self.router, ChoiceRouter):
            check_route(self.router, route, router_input_BTD, 2, context)
        return route

    def make_layout(self, x_BTD: Tensor, dark_BT: Tensor, context: TokenContext, memory: Memory) -> "Layout":
        """How the tokens are laid out for the stack. Only decoding skips a stack without dark tokens: in training every
        process must run its layers, or the others would wait for their gradients."""
        inner = replace(context, keep_entropy=False, threshold=None, share=None)
        looks = not (context.room_is_made or torch.compiler.is_compiling()) and host_looks(x_BTD, self.training)
        texts = has_flash(x_BTD) and memory is None  # rows concatenated, for flash attention
        if looks and (context.sparse or memory is not None):
            count_B = dark_BT.sum(1)
            total, longest = torch.stack([count_B.sum(), count_B.max()]).tolist()
            if total == 0 and memory is not None and not torch.is_grad_enabled():
                return DenseLayout(dark_BT, inner, is_empty=True)
            if context.sparse:
                return PackedLayout(dark_BT, inner, self, total if texts else longest, longest, in_rows=not texts)
        elif context.sparse and texts:
            share = self.room * self.share if self.training else 1.0
            return PackedLayout(dark_BT, inner, self, int(share * dark_BT.numel()) + 1)
        return DenseLayout(dark_BT, inner)

    def run(self, layout: "Layout", x_BTD: Tensor, route: Route, run_layers: RunLayers) -> Tensor:
        """δ times the router's weight, in the layout's shape."""
        z_in = self.stack_input(layout, x_BTD)
        return self.stack_change(layout, z_in, run_layers(z_in, layout.context), route)

    def stack_input(self, layout: "Layout", x_BTD: Tensor) -> Tensor:
        """What the first dark layer reads."""
        z_in = layout.gather(x_BTD)
        return z_in if self.widen is None else self.widen(z_in)

    def stack_change(self, layout: "Layout", z_in: Tensor, z_out: Tensor, route: Route) -> Tensor:
        """δ times the router's weight, in the layout's shape; 0 in places without a dark token."""
        change = z_out - z_in
        if self.narrow is not None:
            change = self.narrow(change)
        if not self.smooth:
            change = change * layout.gather(route.weights_BTK[..., DARK:].to(change.dtype))
        return layout.mask(change)

    def combine(self, layout: "Layout", x_BTD: Tensor, change: Maybe, route: Route, memory: Memory) -> Tensor:
        """Adds the stack's change, and the carried one, to x. `change` is None if the stack did not run. A cache keeps
        the latest carried value."""
        carried_B1D = None if memory is None else memory.get("stack")
        if self.smooth:
            weight_BT = layout.dark_BT.to(stored_in(x_BTD.dtype))
            if route.probabilities_BTK is not None:
                weight_BT = weight_BT * route.probabilities_BTK[..., DARK].to(weight_BT.dtype).clamp(1e-4, 1 - 1e-4)
            new_BTD = torch.zeros_like(x_BTD) if change is None else layout.scatter(change)
            last_BTD = smoothed(new_BTD, weight_BT, carried_B1D)
            y_BTD = x_BTD + last_BTD * route.weights_BTK.sum(-1, keepdim=True).to(x_BTD.dtype)
        elif self.carry is None:
            return x_BTD if change is None else x_BTD + layout.scatter(change)
        elif change is None:
            last_BTD = torch.zeros_like(x_BTD[:, :1]) if carried_B1D is None else carried_B1D
            y_BTD = x_BTD + last_BTD
        else:
            last_BTD = layout.latest(self.carry(change), carried_B1D)
            y_BTD = x_BTD + layout.scatter(change) + last_BTD
        if memory is not None and (change is not None or carried_B1D is None or self.smooth):
            memory.put("stack", last_BTD[:, -1:])
        return y_BTD

    def loss(self, done: StackOutput, targets_BT: Tensor, final_BTD: Tensor, head: nn.Linear) -> Tensor:
        """The early head's cross-entropy, and the forecast router's regression. Targets are the next tokens, −100 where
        there is none."""
        total = final_BTD.new_zeros((), dtype=torch.float32)
        if self.early is not None:
            early = linear_cross_entropy(done.router_input_BTD.flatten(0, 1), self.early.weight, targets_BT.flatten())
            total = total + (self.early_weight or 1.0) * early
        if isinstance(self.router, ForecastRouter):
            assert done.route.score_BT is not None
            with torch.no_grad():
                target_BT = self.forecast_target(done, head(final_BTD))
            off_BT = (done.route.score_BT - target_BT).square()
            there_BT = targets_BT != -100
            total = total + torch.where(there_BT, off_BT, 0).sum() / there_BT.sum().clamp_min(1)
        return total

    def forecast_target(self, done: StackOutput, final_BTV: Tensor) -> Tensor:
        """What the forecast router learns to predict: the entropy of the final logits. Subclasses may use `done`."""
        return predictive_entropy(final_BTV)

    def ratio_loss(self, done: StackOutput, real_BT: Maybe) -> Maybe:
        """0.03 times H-Net's ratio loss, which keeps f near its target without a threshold."""
        return 0.03 * ratio_loss(done.route, real_BT, self.share) if isinstance(self.router, BoundaryRouter) else None


class Layout:
    """How the tokens of a stack are arranged while its layers run."""

    context: TokenContext  # for the stack's layers
    dark_BT: Tensor
    is_empty = False  # no token is dark, and nothing needs to run

    @property
    def dropped(self) -> Tensor:
        """Number of dark tokens left out for lack of room."""
        return torch.zeros((), dtype=torch.long, device=self.dark_BT.device)

    def gather(self, x_BTD: Tensor) -> Tensor:
        """x in this layout."""
        raise NotImplementedError

    def mask(self, change: Tensor) -> Tensor:
        """The change, with 0 in places without a dark token."""
        raise NotImplementedError

    def scatter(self, change: Tensor) -> Tensor:
        """The change at every token, (B, T, D); 0 at light ones."""
        raise NotImplementedError

    def latest(self, change: Tensor, before_B1D: Maybe) -> Tensor:
        """The change of the latest dark token at or before each token, (B, T, D): at first `before_B1D`, or 0."""
        raise NotImplementedError


class DenseLayout(Layout):
    """The definition: every token is computed, light ones as padding."""

    def __init__(self, dark_BT: Tensor, context: TokenContext, is_empty: bool = False) -> None:
        self.dark_BT, self.is_empty = dark_BT, is_empty
        self.context = replace(context, real_BT=dark_BT, sparse=False)

    def gather(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def mask(self, change: Tensor) -> Tensor:
        return torch.where(self.dark_BT[..., None], change, 0)

    def scatter(self, change: Tensor) -> Tensor:
        return change

    def latest(self, change: Tensor, before_B1D: Maybe) -> Tensor:
        return last_marked(change, self.dark_BT, before_B1D)


class PackedLayout(Layout):
    """Dark tokens packed in order: with `in_rows` each row padded to `room` places, else all rows concatenated, in
    `room` places and a gap after each row for temporal filters to look back on. If the `longest` row is known, all have
    room. Otherwise some dark tokens, evenly spread, may have to be light in this pass; `dropped` counts them."""

    def __init__(
        self, dark_BT: Tensor, context: TokenContext, stack: DarkStack, room: int, longest: int | None = None,
        in_rows: bool = False,
    ):  # fmt: skip
        (B, T), device = dark_BT.shape, dark_BT.device
        self.shape, numbers_N = (B, T), torch.arange(B * T, device=device)
        self.left_out: Maybe = None
        room = max(1, min(room, B * T))  # at least 1: every process must give the layers' weights a gradient
        if longest is None:
            dark_BT, self.left_out = thinned(dark_BT, room)
        self.dark_BT, rank_BT, count_B = dark_BT, dark_BT.cumsum(1) - 1, dark_BT.sum(1)
        if in_rows:
            places, start_B = B * room, torch.arange(0, B * room, room, device=device)
        else:
            places = -(-(room + B * stack.gap) // BLOCK) * BLOCK
            end_B = (count_B + stack.gap).cumsum(0)
            start_B = end_B - count_B - stack.gap
        slot_N = (start_B[:, None] + rank_BT).flatten()
        dark_N = dark_BT.flatten()
        place_or_end_N = torch.where(dark_N, slot_N, places)
        token_P = numbers_N.new_zeros(places + 1).scatter_(0, place_or_end_N, numbers_N)[:places]
        used_P = torch.zeros(places + 1, dtype=torch.bool, device=device).scatter_(0, place_or_end_N, dark_N)[:places]
        self.has_value_N, self.used_P = (rank_BT >= 0).flatten(), used_P
        self.last_N = torch.where(self.has_value_N, slot_N, 0)
        unused = count_B[:1].int()  # pack and unpack read neither rows nor counts
        self.packing = Packing(dark_N, torch.where(dark_N, slot_N, 0), token_P, unused, unused, unused)
        shape = (B, room) if in_rows else (1, places)
        positions_BC = context.positions_BT.flatten()[token_P].view(shape)
        ids_BC = None if context.token_ids_BT is None else context.token_ids_BT.flatten()[token_P].view(shape)
        rope = None if context.rope is None else rotary_tables(positions_BC, stack.head_size)
        self.context = replace(
            context, positions_BT=positions_BC, token_ids_BT=ids_BC, rope=rope, real_BT=None, sparse=False
        )
        self.places = shape
        if in_rows:
            self.context.padding_behind = True
            self.context.real_BT = used_P.view(shape) if B > 1 or torch.is_grad_enabled() else None
        else:
            # Free places at the end become texts no longer than the others; nobody reads their output.
            size, free = (T, places) if longest is None else (max(longest, 1), BLOCK)
            size += stack.gap
            rest = end_B[-1:] + size * torch.arange(-(-free // size) + 1, device=device)
            self.context.rows = torch.cat([start_B, rest.clamp(max=places)]).int()
            self.context.longest, self.context.used_BT = size, used_P.view(shape)

    @property
    def dropped(self) -> Tensor:
        return super().dropped if self.left_out is None else self.left_out

    def gather(self, x_BTD: Tensor) -> Tensor:
        x_PD = torch.where(self.used_P[:, None], pack(x_BTD.flatten(0, 1), self.packing), 0)
        return x_PD.view(*self.places, -1)

    def mask(self, change: Tensor) -> Tensor:
        return torch.where(self.used_P.view(*self.places, 1), change, 0)

    def scatter(self, change: Tensor) -> Tensor:
        return unpack(change.flatten(0, 1), None, self.packing).view(*self.shape, -1)

    def latest(self, change: Tensor, before_B1D: Maybe) -> Tensor:
        assert before_B1D is None
        packed = self.packing.token_P, self.used_P, self.has_value_N, self.last_N
        return carry_packed(change.flatten(0, 1), *packed).view(*self.shape, -1)


def host_looks(x_BTD: Tensor, training: bool) -> bool:
    """Whether the host may read the number of dark tokens: not in training on a GPU, where every step would wait for
    it, and not while a CUDA graph is captured."""
    return not (x_BTD.is_cuda and (training or torch.cuda.is_current_stream_capturing()))


def thinned(dark_BT: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """At most `room` of the dark tokens, evenly spread, and how many are left out."""
    number_N, count = dark_BT.flatten().cumsum(0), dark_BT.sum()
    most = count.clamp_min(room)
    keep_N = number_N * room // most > (number_N - 1) * room // most
    return dark_BT & keep_N.view(dark_BT.shape), (count - room).clamp_min(0)
