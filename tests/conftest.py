"""What all tests share: quiet, single-threaded, seeded runs, and every option of the model."""

import os

# The tests load from folders only: a lookup on the network would be a mistake, and slow.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the processes tests start: how sums are split between threads changes their last bit.
os.environ["OMP_NUM_THREADS"] = "1"
# Tables are as wide as where there is no terminal.
os.environ["COLUMNS"] = "100"

import importlib
import sys

import pytest
import torch
import transformers

from chiar import presets
from chiar.model import decoder
from chiar.model.modeling import ChiarForCausalLM
from chiar.registry import ROUTERS
from helpers import ALONG_TIME, LENGTHS, ROWS, STACK_ROUTERS, TOKENS, randomise, router_options, token_ids

THREE = ["spectral", "rbf", "attention"]
LEARNED = {"router": "learned"}
RANDOM = {"router": "random"}
V5 = {"preset": "v5-tiny", "target_fraction": 0.4}

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
    **{name: router_options(name) for name in ("quantile", "learned scaled", "routed keys")},
    **{f"v5-{router}": {**V5, "router": router} for router in STACK_ROUTERS if router != "random"},
    "v5-spectral": {**V5, "router": "spectral", "target_fraction": 0.3},  # 0.4 would cut close to a token
    "v5-random": {"preset": "v5-tiny", "router": "random", "carry": "none"},
    "v5-window": {**V5, "window": 3, "inner_size": 48, "carry": "smoothed"},
    "v5-window-eager": {**V5, "window": 2, "attn_implementation": "eager", "early_weight": 0.0},
    "v5-two-stacks": {**V5, "layer_types": ["attention", "dark", "attention", "dark"], "positions": "learned"},
    "v5-smoothed-boundary": {**V5, "router": "boundary", "carry": "smoothed", "temporal_everywhere": False},
}


def configuration(option: dict, **changes) -> presets.ChiarConfig:
    fields = {"gate_pool": "causal", "dropout": 0.0, "bos_token_id": None, "eos_token_id": None, **option, **changes}
    return presets.get(fields.pop("preset", "v3-tiny"), **fields)


@pytest.fixture(scope="session", autouse=True)
def quiet_single_thread():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def ids() -> torch.Tensor:
    """Rows of tokens for a `lively` model."""
    return token_ids(ROWS, TOKENS, seed=19, vocabulary=257)


@pytest.fixture
def left_mask() -> torch.Tensor:
    """Rows of 10, 7 and 4 real tokens, padded on the left."""
    return torch.tensor([[0] * (TOKENS - length) + [1] * length for length in LENGTHS])


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS.keys())
def option(request) -> dict:
    """One variant of the model: a preset and the fields changed in it."""
    return request.param


@pytest.fixture(scope="session")
def lively():
    """Builds a model of the given option, in evaluation mode, with weights in which a leak would show.

    The usual initialisation, N(0, 0.02) with the gate's weights at 0, would hide it. With this seed every operator of
    every variant gets tokens and no entropy lies at a threshold; test_causality.py asserts both.
    """

    def build(option: dict, kind: type = ChiarForCausalLM, seed: int = 0, **changes):
        return randomise(kind(configuration(option, **changes)).eval(), seed)

    return build


@pytest.fixture
def leads():
    """The plugin research/leads.py, until the end of a test."""
    before, stack = dict(ROUTERS), decoder.DarkStack
    sys.modules.pop("research.leads", None)
    yield importlib.import_module("research.leads")
    ROUTERS.clear()
    ROUTERS.update(before)
    decoder.DarkStack = stack
