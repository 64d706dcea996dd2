"""Small models with weights that leave nothing at its initial symmetry, and inputs to go with them."""

import torch

from chiar import presets
from chiar.config import ChiarConfig
from chiar.model.modeling import ChiarForCausalLM

VOCABULARY = 23
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


def small_config(preset: str = "v3-tiny", **changes) -> ChiarConfig:
    """A tiny preset, narrowed further; any field can be changed."""
    small = {"hidden_size": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "rbf_features": 8}
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
    return model


def random_model(config: ChiarConfig, seed: int = 0) -> ChiarForCausalLM:
    """A float64 model in evaluation mode."""
    torch.manual_seed(seed)
    return randomise(ChiarForCausalLM(config).double(), seed).eval()


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
