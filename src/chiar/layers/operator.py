"""Operators: a dense definition each, and how sparse execution runs it on packed tokens."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.kernels.packing import pack, unpack, used
from chiar.layers.context import LayerMemory, Maybe, Memory, TokenContext
from chiar.layers.routers import Route
from chiar.registry import Work, is_light, own_tensors

if TYPE_CHECKING:
    from chiar.layers.block import Block
    from chiar.layers.sparse import PackedTokens


class Operator(nn.Module):
    """Built from the configuration alone. It may read other tokens, so by default sparse execution runs it on all
    tokens and keeps the outputs it needs."""

    looks_back = False  # whether it must see every token to keep its memory up to date
    sets_own_weights = True

    def reset_parameters(self) -> None:
        """Initialise its own weights with transformers' `initialization`, which leaves loaded ones alone. Linear maps,
        embeddings and norms inside are initialised like all others of the model."""
        if own := own_tensors(self):
            what = f"{type(self).__name__} has weights of its own ({own[0]})"
            raise NotImplementedError(f"{what}: define reset_parameters.")

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        """FLOPs per token of the text, by part."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe = None, memory: Memory = None, /) -> Any:
        """The definition: the output for every token. `key_BT` marks the tokens that are keys (None: all). With a
        memory the output of other tokens is arbitrary but finite, and nothing of them is stored. Eager attention also
        returns its weights."""
        raise NotImplementedError

    def begin(self, memory: LayerMemory, rows: int) -> None:
        """Create what a fixed decoding step writes to, if the prompt did not."""

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        """Packed outputs of the tokens sent to it; or, if it works in place, (N, D), valid where it was chosen."""
        y_ND = tokens.run_all(self, name).flatten(0, 1)
        return y_ND if tokens.in_place(name) else pack(y_ND, tokens.packing(name))


class TokenOperator(Operator):
    """An operator that treats each token alone, so it can run on any selection of tokens."""

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        if not tokens.in_place(name):
            return self(tokens.seen(name, tokens.view(name)), tokens.context)
        packing, seen_ND = tokens.packing(name), tokens.seen(name, tokens.x)
        y_PD = used(self(used(pack(seen_ND, packing), packing), tokens.context), packing)
        return unpack(y_PD, None, packing)


NEEDED = "it must map (…, D) to (…, D), whatever the number of tokens"


class Adopted:
    """Wraps a user's operator, any module that maps (…, D) to (…, D), as a TokenOperator for one use."""

    looks_back = False
    begin, run_packed = Operator.begin, TokenOperator.run_packed

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x_BTD: Tensor, context: TokenContext, *_: object) -> Tensor:
        y_BTD = self.module(x_BTD)
        if not isinstance(y_BTD, Tensor) or y_BTD.shape != x_BTD.shape:
            got = tuple(y_BTD.shape) if isinstance(y_BTD, Tensor) else type(y_BTD).__name__
            raise InputError(f"the operator {type(self.module).__name__} made {got} of {tuple(x_BTD.shape)}: {NEEDED}.")
        return y_BTD


class Tokens:
    """A layer's tokens as an execution arranges them: all together, and for each operator."""

    x: Tensor  # the layer's input, all tokens together

    def __init__(self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route | None, memory: Memory):
        self.block, self.context, self.route, self.memory = block, context, route, memory
        self.x = self.x_BTD = x_BTD

    def view(self, name: str) -> Tensor:
        """x of the tokens of an operator."""
        return self.x

    def operate(self, name: str) -> Tensor:
        """op(x), or op(LN_op(x)) under pre-norm, for these tokens."""
        raise NotImplementedError

    def norm(self, norm: nn.Module, y: Tensor, name: str) -> Tensor:
        return norm(y)

    def feed(self, y: Tensor, name: str) -> Tensor:
        """The feed-forward network on these tokens."""
        return self.block.ffn(y)

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        """Σ w_k part_k for all tokens."""
        raise NotImplementedError

    def fused_ends(self) -> Maybe:
        """The whole layer in fewer kernels, if light tokens skip the FFN; None where that is not possible."""
        return None

    def seen(self, name: str, x: Tensor) -> Tensor:
        """The operator's input: x, or LN_op(x) under pre-norm."""
        return self.block.norms[name](x) if self.block.pre_norm else x

    def sent_to(self, name: str) -> Tensor:
        """Real tokens sent to an operator, (B, T)."""
        assert self.route is not None
        chosen_BT = self.route.choice_BT == self.block.names.index(name)
        return chosen_BT if self.context.real_BT is None else chosen_BT & self.context.real_BT

    def run_all(self, operator: Operator | Adopted, name: str) -> Any:
        """The definition, for every token, (B, T, D)."""
        own_keys = self.block.routed_keys and not is_light(name)
        key_BT = self.sent_to(name) if own_keys else self.context.real_BT
        return operator(self.seen(name, self.x_BTD), self.context.of(name, self.memory), key_BT, self.memory)
