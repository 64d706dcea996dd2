"""What all tests share: quiet, single-threaded, seeded runs, and models in which a leak would show."""

import os

# The tests load from folders only: a lookup on the network would be a mistake, and slow.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the processes tests start: how sums are split between threads changes their last bit.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
import transformers
from torch import nn

from chiar import presets
from chiar.layers.gate import Gate
from chiar.layers.rbf import RBFMixing
from chiar.layers.spectral import SpectralFilter
from chiar.layers.temporal import TemporalFilter
from chiar.model.modeling import ChiarForCausalLM
from helpers import ALONG_TIME

THREE = ["spectral", "rbf", "attention"]
LEARNED = {"router": "learned"}
RANDOM = {"router": "random"}

# Every option of the model, with the gate that is causal. The presets alone come first.
OPTIONS = {
    "baseline": {"preset": "baseline-tiny"},
    "v1": {"preset": "v1-tiny"},
    "v2": {"preset": "v2-tiny"},
    "v3": {},
    "v4": {"preset": "v4-tiny"},
    "hard-both": {**LEARNED, "routing": "hard"},
    "hard-selected": {**LEARNED, "routing": "hard", "hard_estimator": "selected"},
    "soft": {**LEARNED, "routing": "soft", "light_ffn": False},
    "random-token": {**RANDOM, "random_key": "token"},
    "random-position": {**RANDOM, "random_key": "position", "router_seed": 3},
    "static": {"router": "static"},
    "entropy-3": {"operators": THREE, "thresholds": [[0.77, 0.82], [0.75, 0.81]]},
    "soft-3": {"preset": "v1-tiny", "routing": "soft"},
    "keys-routed": {"keys": "routed"},
    "keys-routed-eager": {"keys": "routed", "attn_implementation": "eager"},
    "keys-routed-v1": {"preset": "v1-tiny", "keys": "routed", "hard_estimator": "selected"},
    "pre": {"norm": "rmsnorm", "norm_position": "pre"},
    "pre-light-ffn-off": {"light_ffn": False, "norm_position": "pre"},
    "equation": {"preset": "v1-tiny", "spectral_form": "equation"},
    "learned-positions-gate": {"positions": "learned", "meta_router": True},
    "hard-gate": {"gate_skip_below": 0.5},
    "random-basis-authors-entropy": {"basis": "random", "entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
    **ALONG_TIME,
}
ROUTERS = [
    *("v1", "v2", "v3", "hard-both", "hard-selected", "soft", "random-token", "random-position", "static"),
    *("entropy-3", "keys-routed", "keys-routed-v1"),
]
# With this seed every operator of every variant gets tokens and no entropy lies at a threshold; both are asserted.
LIVELY_SEED = 5


def configuration(option: dict, **changes) -> presets.ChiarConfig:
    fields = {"gate_pool": "causal", "dropout": 0.0, "bos_token_id": None, "eos_token_id": None, **option, **changes}
    return presets.get(fields.pop("preset", "v3-tiny"), **fields)


def enliven(model: nn.Module, seed: int) -> nn.Module:
    """Weights so large that a leak shows in the logits, routes that mix, a gate that moves, RBF rows that overlap.

    The usual initialisation, N(0, 0.02) with the gate's weights at 0, would hide all of these.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor, std: float) -> torch.Tensor:
        return std * torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(noise(module.weight, 1.0))
            elif isinstance(module, Gate):
                module.weight.copy_(noise(module.weight, 1.0))
                module.bias.fill_(0.1)
            elif isinstance(module, nn.Linear) and module is not getattr(model, "lm_head", None):
                module.weight.copy_(noise(module.weight, 1.5 * module.in_features**-0.5))
                module.bias.copy_(noise(module.bias, 0.1))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm | SpectralFilter):
                if module.weight is not None:
                    module.weight.copy_(1.0 + noise(module.weight, 0.3))
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(noise(module.bias, 0.1))
            elif isinstance(module, TemporalFilter):
                module.now_D.copy_(1.0 + noise(module.now_D, 0.3))
                module.coefficients_KD.copy_(noise(module.coefficients_KD, 0.5))
            elif isinstance(module, RBFMixing):
                module.omega_Dm.copy_(noise(module.omega_Dm, 0.4))
    return model


@pytest.fixture(scope="session", autouse=True)
def quiet_single_thread():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS.keys())
def option(request) -> dict:
    """One variant of the model: a preset and the fields changed in it."""
    return request.param


@pytest.fixture(params=[OPTIONS[name] for name in ROUTERS], ids=ROUTERS)
def router_option(request) -> dict:
    """One variant for each way of choosing an operator."""
    return request.param


@pytest.fixture(scope="session")
def lively():
    """Builds a model of the given option with weights that make every effect visible, in evaluation mode."""

    def build(option: dict, kind: type = ChiarForCausalLM, seed: int = LIVELY_SEED, **changes):
        return enliven(kind(configuration(option, **changes)).eval(), seed)

    return build
