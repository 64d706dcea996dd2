"""Small models with weights that leave nothing at its initial symmetry, and inputs to go with them."""

import pytest
import torch

from chiar import presets
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.model.cache import ChiarCache
from chiar.model.modeling import ChiarForCausalLM
from chiar.registry import ROUTERS

VOCABULARY = 23
ROWS, TOKENS, LENGTHS = 3, 10, (10, 7, 4)  # of the fixtures `ids` and `left_mask`
TEMPORAL = ["temporal", "attention"]
WINDOW = {"temporal_window": 5, "temporal_coefficients": 3}
# What looks back on earlier tokens.
ALONG_TIME = {
    "temporal": {"operators": TEMPORAL, "layer_types": ["temporal", "routed", "routed", "attention"], **WINDOW},
    "temporal-everywhere": {"preset": "baseline-tiny", "temporal_everywhere": True, **WINDOW},
    "temporal-all": {
        **{"operators": TEMPORAL, "temporal_everywhere": True, "norm_position": "pre", **WINDOW},
        **{"norm": "rmsnorm", "keys": "routed", "light_ffn": False, "thresholds": 0.83},
    },
}

HARD = {"routing": "hard", "hard_estimator": "selected"}
SCALED = {**HARD, "router_scale": "probability", "target_fraction": 0.4}
# Router options that follow quantiles or scale what attention adds, for the tests that hold for all of them.
ROUTER_OPTIONS = {
    "quantile": {"target_fraction": [0.3, 0.6]},
    "quantile post": {"target_fraction": 0.5, "norm_position": "post", "norm": "layernorm"},
    "learned quantile": {**HARD, "target_fraction": 0.4},
    "learned quantile post": {**HARD, "target_fraction": 0.5, "norm_position": "post"},
    "learned scaled": {**SCALED, "light_ffn": False},
    "routed keys": {**SCALED, "keys": "routed"},
}


def router_options(name: str) -> dict:
    layers = ["attention", "routed", "routed", "attention"]
    base = {"layer_types": layers, "norm_position": "pre", "norm": "rmsnorm", "meta_router": False}
    return {**base, **ROUTER_OPTIONS[name]}


def small_config(preset: str = "v3-tiny", **changes) -> ChiarConfig:
    """A tiny preset, narrowed further; any field can be changed."""
    small = {"hidden_size": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    return presets.get(preset, **{**small, "dropout": 0.0, "bos_token_id": None, "eos_token_id": None, **changes})


def randomise(model: ChiarForCausalLM, seed: int = 0) -> ChiarForCausalLM:
    """Normal weights of a size that keeps activations near 1, so that entropies spread and gates and routes differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter, mean, std):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(mean + std * drawn)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("operators.spectral.weight") or name.endswith("now_D"):
                normal(parameter, 1.0, 0.5)
            elif "norm" in name:
                normal(parameter, 0.0 if name.endswith("bias") else 1.0, 0.3)
            elif "embed" in name or name.endswith("score.weight") or name.endswith("gate.weight"):
                normal(parameter, 0.0, 1.0)
            elif name.endswith("bias"):
                normal(parameter, 0.0, 0.3)
            else:
                normal(parameter, 0.0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("omega_Dm"):
                normal(buffer, 0.0, 0.3)  # at the usual √2 every RBF row attends to itself alone
    settle(model)
    return model


def random_model(config: ChiarConfig, seed: int = 0) -> ChiarForCausalLM:
    """A float64 model in evaluation mode."""
    torch.manual_seed(seed)
    return randomise(ChiarForCausalLM(config).double(), seed).eval()


def settle(model) -> None:
    """Give dark stacks thresholds that part the tokens of a text: those of a training pass."""
    if model.config.stacks and model.model.router_state is not None:
        was_training = model.training
        with torch.no_grad():
            model.train().model(token_ids(16, 16, seed=7, vocabulary=model.config.vocab_size))
        model.train(was_training)


STACK_ROUTERS = [name for name, kind in ROUTERS.items() if kind.of_stacks]


def stack_config(**changes) -> ChiarConfig:
    """A tiny model with a dark stack of two layers; `space` reads bytes, so its vocabulary is larger."""
    layers = {"layer_types": ["attention", "dark", "dark", "attention"], "target_fraction": 0.4}
    if changes.get("router") == "random":
        del layers["target_fraction"]
    bytes_too = {"vocab_size": 256} if changes.get("router") == "space" else {}
    return small_config("v5-tiny", **{**layers, **bytes_too, **changes})


def stack_model(**changes) -> ChiarForCausalLM:
    """In float64, in evaluation mode, with thresholds that part its tokens."""
    return random_model(stack_config(**changes))


def routed_model(**changes) -> ChiarForCausalLM:
    return random_model(small_config(**{"keys": "routed", "meta_router": False, **changes}))


def dark_model(**changes) -> ChiarForCausalLM:
    """A small v5 whose stacks take about half of random tokens."""
    model = random_model(small_config("v5-tiny", **changes))
    if model.config.follows_quantile:
        with torch.no_grad():
            ids = token_ids(4, 50, vocabulary=model.config.vocab_size)
            scores = [route.score_BT for route in model.model(ids, output_routes=True).routes]
        model.model.set_thresholds([float(score_BT.median()) for score_BT in scores])
    return model


def token_ids(rows: int = 2, tokens: int = 8, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def mixed_routes(config: ChiarConfig, rows: int = 2, tokens: int = 8, seed: int = 0) -> dict[int, torch.Tensor]:
    """Forced routes in which every operator appears in every row of every routed layer; soft routing takes none."""
    if config.routing == "soft":
        return {}
    generator, count = torch.Generator().manual_seed(seed), len(config.operators)
    cycle = torch.arange(tokens) % count
    return {
        layer: torch.stack([cycle[torch.randperm(tokens, generator=generator)] for _ in range(rows)])
        for layer in config.routed_layers
    }


def padding_mask(side: str, rows: int = 2, tokens: int = 8) -> torch.Tensor:
    """1 for real tokens. Row b has b + 1 padding tokens: on the left, on the right, or as holes between real ones."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        padding = {"left": slice(0, row + 1), "right": slice(tokens - row - 1, tokens), "holes": slice(2, row + 3)}
        mask[row, padding[side]] = 0
    return mask


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def refused(match: str, function, /, *inputs, **options) -> InputError:
    """The error with which this call is answered."""
    with pytest.raises(InputError, match=match) as caught:
        function(*inputs, **options)
    return caught.value


def feed(
    model, ids, chunks, mask=None, routes=None, cache=None, start=0, gradients=False, **options
) -> tuple[list, ChiarCache]:
    """The outputs of `ids` fed in pieces of these sizes through one cache, from `start` on, and the cache."""
    outputs = []
    for size in chunks:
        stop = start + size
        seen = None if mask is None else mask[:, :stop]
        forced = {i: choice_BT[:, start:stop] for i, choice_BT in routes.items()} if routes else None
        with torch.set_grad_enabled(gradients):
            given = {"past_key_values": cache, "use_cache": True, "forced_routes": forced, **options}
            done = model(ids[:, start:stop], seen, **given)
        cache, start = done.past_key_values, stop
        assert cache.get_seq_length() == stop
        outputs.append(done)
    return outputs, cache


def fed_logits(*inputs, **options) -> tuple[torch.Tensor, ChiarCache]:
    outputs, cache = feed(*inputs, **options)
    return torch.cat([output.logits for output in outputs], 1), cache
