"""Published designs that give attention to some tokens only, rebuilt from our layers, and external models.

The rebuilt ones share our widths, norms (pre-norm RMSNorm), FFN, RoPE and SDPA, so that a difference in speed is due to
the routing idea. The published models alternate routed and full layers; here the first and the last layer are full and
all others routed, as in CHIAR, so that f means the same for all.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar import presets
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.kernels.transform import Transform
from chiar.layers.attention import rotate
from chiar.layers.block import Block, FeedForward, make_norm
from chiar.layers.context import TokenContext, visible_keys
from chiar.model.decoder import FIRST_WEIGHTS
from chiar.model.inputs import make_context
from chiar.routing.flops import visible_pairs
from models import ForwardFlops, Routes, Setting, TimedModel

PEER_FILE = "peer.py"


def select(score_BT: Tensor, forced_BT: Tensor | None, capacity: int) -> Tensor:
    """The positions of the `capacity` highest scores of each row, ascending, (B, K). Forced tokens rank first, so that
    the top-k costs the same."""
    rank_BT = score_BT.detach().float()
    if forced_BT is not None:
        rank_BT = rank_BT.sigmoid() + 2.0 * forced_BT
    return rank_BT.topk(capacity, dim=1, sorted=False).indices.sort(1).values


def mask_of(index_BK: Tensor, tokens: int) -> Tensor:
    """The selected positions as a boolean (B, T) mask."""
    chosen_BT = torch.zeros(len(index_BK), tokens, dtype=torch.bool, device=index_BK.device)
    return chosen_BT.scatter(1, index_BK, True)


def gather(x_BTD: Tensor, index_BK: Tensor) -> Tensor:
    return x_BTD.gather(1, index_BK[..., None].expand(-1, -1, x_BTD.shape[-1]))


def scatter(x_BTD: Tensor, index_BK: Tensor, new_BKD: Tensor) -> Tensor:
    return x_BTD.scatter(1, index_BK[..., None].expand(-1, -1, x_BTD.shape[-1]), new_BKD.to(x_BTD.dtype))


def packed_rope(context: TokenContext, index_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The RoPE tables at the original positions of the tokens, (B, 1, K, head size)."""
    assert context.rope is not None
    cos, sin = (table[0, 0][index_BK][:, None] for table in context.rope)
    return cos, sin


def output(block: nn.Module, x_BTD: Tensor, context: TokenContext) -> Tensor:
    """The output of one of our layers, which return it as one or two summands."""
    (y_BTD, more_BTD), _ = block(x_BTD, context)
    return y_BTD if more_BTD is None else y_BTD + more_BTD


class MixtureOfDepthsBlock(nn.Module):
    """y = x + r · (block(x) − x) for the `capacity` tokens of a row with the largest scores r, y = x for the others
    (Raposo et al., arXiv 2404.02258). The selected tokens attend to each other only.

    As published, the top-k over a row is not causal; forced routes are.
    """

    def __init__(self, config: ChiarConfig, capacity: int, sparse: bool) -> None:
        super().__init__()
        self.capacity, self.sparse = capacity, sparse
        self.score = nn.Linear(config.hidden_size, 1)
        self.block = Block(config, 0)

    def forward(self, x_BTD: Tensor, context: TokenContext, forced_BT: Tensor | None) -> Tensor:
        score_BT1 = self.score(x_BTD)
        index_BK = select(score_BT1[..., 0], forced_BT, self.capacity)
        if self.sparse:
            packed_BKD = gather(x_BTD, index_BK)
            inner = replace(context, rope=packed_rope(context, index_BK))
            change_BKD = output(self.block, packed_BKD, inner) - packed_BKD
            return scatter(x_BTD, index_BK, packed_BKD + gather(score_BT1, index_BK) * change_BKD)
        chosen_BT = mask_of(index_BK, x_BTD.shape[1])
        # Tokens outside `real_BT` are not keys, which is all that a masked block needs.
        change_BTD = output(self.block, x_BTD, replace(context, real_BT=chosen_BT)) - x_BTD
        return torch.where(chosen_BT[..., None], x_BTD + score_BT1 * change_BTD, x_BTD)

    @staticmethod
    def flops(config: ChiarConfig, length: int, share: float) -> float:
        D, inner = config.hidden_size, config.intermediate_size or 0
        return share * (8 * D * D + 4 * D * inner) + visible_pairs(length, share, share) * 4 * D + 2 * D


class BypassBlock(nn.Module):
    """Routed tokens attend to each other; the others only pass the value and output projections, as if they attended to
    themselves alone; the FFN is for all (DTRNet, arXiv 2509.00925). Each path is weighted by its probability, which
    trains the router.

    Its own choice is p > ½ for each token: causal, but of a varying number of tokens, so it runs densely. Under forced
    routes exactly `capacity` tokens of a row attend, packed.
    """

    def __init__(self, config: ChiarConfig, capacity: int, sparse: bool) -> None:
        super().__init__()
        D = config.hidden_size
        self.heads, self.capacity, self.sparse = config.num_attention_heads, capacity, sparse
        self.score = nn.Linear(D, 2)
        self.query_key, self.value, self.out = nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.ffn = FeedForward(D, 4 * D if config.intermediate_size is None else config.intermediate_size, 0.0)
        self.norm, self.ffn_norm = make_norm(config), make_norm(config)

    def forward(self, x_BTD: Tensor, context: TokenContext, forced_BT: Tensor | None) -> Tensor:
        normed_BTD = self.norm(x_BTD)
        p_BT2 = self.score(normed_BTD).float().softmax(-1).to(normed_BTD.dtype)
        value_BTD = self.value(normed_BTD)
        bypass_BTD, weight_BT1 = p_BT2[..., :1] * value_BTD, p_BT2[..., 1:]
        if self.sparse and forced_BT is not None:
            index_BK = select(p_BT2[..., 1], forced_BT, self.capacity)
            attended_BKD = self.attend(
                gather(normed_BTD, index_BK), gather(value_BTD, index_BK), packed_rope(context, index_BK), None
            )
            mixed_BTD = scatter(bypass_BTD, index_BK, gather(weight_BT1, index_BK) * attended_BKD)
        else:
            chosen_BT = weight_BT1[..., 0] > 0.5 if forced_BT is None else forced_BT == 1
            assert context.rope is not None
            visible = visible_keys(chosen_BT, x_BTD.shape[1])
            attended_BTD = self.attend(normed_BTD, value_BTD, context.rope, visible)
            mixed_BTD = torch.where(chosen_BT[..., None], weight_BT1 * attended_BTD, bypass_BTD)
        x_BTD = x_BTD + self.out(mixed_BTD)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))

    def attend(
        self, normed_BTD: Tensor, value_BTD: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor | None
    ) -> Tensor:
        B, T, D = normed_BTD.shape
        q, k = self.query_key(normed_BTD).view(B, T, 2, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        v = value_BTD.view(B, T, self.heads, D // self.heads).transpose(1, 2)
        q, k = rotate(q, rope), rotate(k, rope)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)
        return mixed.transpose(1, 2).reshape(B, T, D)

    @staticmethod
    def flops(config: ChiarConfig, length: int, share: float) -> float:
        D, inner = config.hidden_size, config.intermediate_size or 0
        products = 4 * D * D + share * 4 * D * D + 4 * D * inner
        return products + visible_pairs(length, share, share) * 4 * D + 4 * D


class PeerModel(TimedModel):
    """A decoder with a full first and last layer and blocks of this kind between them."""

    def __init__(self, kind: type[MixtureOfDepthsBlock] | type[BypassBlock], setting: Setting, execution: str) -> None:
        super().__init__()
        depth = {} if setting.layers is None else {"num_hidden_layers": setting.layers}
        config = presets.get(f"baseline-{setting.size}", norm="rmsnorm", norm_position="pre", dropout=0.0, **depth)
        assert config.num_hidden_layers is not None
        last = config.num_hidden_layers - 1
        self.config, self.kind = config, kind
        self.routed_layers = list(range(1, last))
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        sparse = execution == "sparse"
        self.layers = nn.ModuleList(
            kind(config, setting.attending, sparse) if 0 < i < last else Block(config, i) for i in range(last + 1)
        )
        self.norm = make_norm(config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=FIRST_WEIGHTS)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def states(self, ids_BT: Tensor, routes: Routes | None) -> tuple[Tensor, Tensor | None]:
        """Without routes the layers choose."""
        x_BTD = self.embed(ids_BT)
        context = make_context(self.config, Transform(), x_BTD, ids_BT, None, None, 0)
        for i, layer in enumerate(self.layers):
            if i in self.routed_layers:
                x_BTD = layer(x_BTD, context, None if routes is None else routes[i])
            else:
                x_BTD = output(layer, x_BTD, context)
        return self.norm(x_BTD), None

    def output_weight(self) -> Tensor:
        return self.embed.weight

    def compile_parts(self) -> bool:
        for part in (*self.layers, self.norm):
            part.compile(dynamic=False)
        return True

    def flops(self, setting: Setting) -> ForwardFlops:
        D, T = self.config.hidden_size, setting.length
        assert self.config.intermediate_size is not None
        full = 8 * D * D + 4 * D * self.config.intermediate_size + visible_pairs(T, 1.0, 1.0) * 4 * D
        routed = self.kind.flops(self.config, T, setting.attending / T)
        count = len(self.routed_layers)
        layers = (len(self.layers) - count) * full + count * routed
        return ForwardFlops(layers, 2.0 * D * self.config.vocab_size)


class ExternalModel(TimedModel):
    """An external model, called as model(ids) → logits or a tuple that starts with them. Its loss is the unfused
    cross-entropy of the logits, and its FLOPs are unknown."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.width, self.routed_layers = model, width, []

    def states(self, ids_BT: Tensor, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """The logits take the place of the states."""
        result: Any = self.model(ids_BT)
        return result[0] if isinstance(result, tuple) else result, None

    def flops(self, setting: Setting) -> ForwardFlops | None:
        return None

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None, routes: Routes) -> tuple[Tensor, Tensor | None]:
        logits_BTV, _ = self.states(ids_BT, routes)
        if targets_BT is None:
            return logits_BTV[:, -1], None
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten()), None


def load_peer(folder: Path) -> Any:
    """The module FOLDER/peer.py, which may import other modules in the folder."""
    path = folder / PEER_FILE
    if not path.is_file():
        raise InputError(f"{folder} has no {PEER_FILE}: it must hold build(vocab, width, heads, layers, length).")
    spec = importlib.util.spec_from_file_location(f"speed_peer_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    if not callable(getattr(module, "build", None)):
        raise InputError(f"{path} has no function build(vocab, width, heads, layers, length).")
    return module


def build_external(module: Any, setting: Setting) -> ExternalModel:
    depth = {} if setting.layers is None else {"num_hidden_layers": setting.layers}
    config = presets.get(f"baseline-{setting.size}", **depth)
    sizes = (config.vocab_size, config.hidden_size, config.num_attention_heads, config.num_hidden_layers)
    model = module.build(*sizes, setting.length)
    if not isinstance(model, nn.Module):
        raise InputError(f"build() of the peer returned {type(model).__name__}, expected a torch.nn.Module.")
    return ExternalModel(model, config.hidden_size)
