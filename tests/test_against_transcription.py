"""The package against an independent NumPy transcription of the specification, over every architectural choice."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import transcription
from chiar.kernels.transform import basis_matrix
from helpers import ROUTER_OPTIONS, mixed_routes, padding_mask, random_model, router_options, small_config, token_ids

ROWS, TOKENS = 3, 10
# Weights and the residual stream are float64, but three things are fp32 by design: RoPE's tables, the MetaRouter, and
# RBF's scores. Each is good to about 1e-7 and layers multiply that by a few; H, weights and gates lie in [0, 1].
LOGITS_TOLERANCE, UNIT_TOLERANCE = 5e-6, 1e-6
# Nothing is rounded to fp32 in a model without those three.
FLOAT64_TOLERANCE = 1e-12
NAMES = {
    r"^model\.(layers\.)?": "",
    r"embed_tokens\.weight": "token_emb",
    r"embed_positions\.weight": "position_emb",
    r"meta_router\.": "",
    r"operators\.spectral\.weight": "filter",
    r"operators\.": "",
    r"norms\.(\w+)": r"\1_norm",
    r"router\.score": "router",
    r"omega_Dm": "omega",
}


def transcribed_weights(model):
    """Our state dict under the transcription's names."""
    weights = {}
    for name, value in model.state_dict().items():
        if name != "lm_head.weight" and "router_state" not in name:
            for ours, theirs in NAMES.items():
                name = re.sub(ours, theirs, name)
            weights[name] = value.numpy()[0] if name.startswith("gate.") else value.numpy()
    return weights


def transcribed_options(model):
    config, state = model.config, model.model.router_state
    # τ as the router holds it: rounded to fp32.
    thresholds = np.array(config.layer_thresholds(), dtype=np.float32).astype(np.float64)
    basis = basis_matrix(config.basis, config.hidden_size, config.router_seed, torch.float64).numpy()
    cuts = state.threshold_L.tolist() if config.follows_quantile else None
    held = {"layer_types": config.layer_types, "thresholds": thresholds, "basis": basis, "cuts": cuts}
    return SimpleNamespace(**{**config.to_dict(), **held})


def is_float64_throughout(config):
    rbf = "rbf" in config.operators and config.routed_layers
    return config.positions == "learned" and not (config.meta_router or rbf)


THREE = {"operators": ["spectral", "rbf", "attention"]}
TEMPORAL = {"operators": ["temporal", "attention"], "temporal_window": 4}
EVERYWHERE = {"temporal_everywhere": True, "temporal_window": 4}
FORMS = {
    "post": {},
    "post light-ffn-off": {"light_ffn": False},
    "equation": {"spectral_form": "equation"},
    "pre": {"norm_position": "pre"},
    "pre light-ffn-off": {"norm_position": "pre", "light_ffn": False},
}
CASES = {
    "eager": {"attn_implementation": "eager", "padding": "holes"},
    "eager, keys routed": {"attn_implementation": "eager", "keys": "routed", "padding": "holes"},
    "embedding norm": {"embedding_norm": True, "positions": "learned", "padding": "holes"},
    "one head": {"num_attention_heads": 1},
    "eight heads": {"num_attention_heads": 8},
    "papers eps": {"entropy_eps": 1e-8},
    "large eps": {"entropy_eps": 0.05, "thresholds": 0.6, "basis": "random", "router_seed": 3},
    "released code": {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
    "dc off": {"entropy_dc_weight": 0.0, "basis": "random", "router_seed": 3, "routing": "soft"},
    "threshold a layer": {"thresholds": [0.85, 0.7], "basis": "random", "router_seed": 3},
    "pair a layer": {"thresholds": [[0.75, 0.85], [0.7, 0.8]], **THREE},
    "one threshold": {"thresholds": 0.8},
    "routed first": {"layer_types": ["routed", "routed"], "norm_position": "pre"},
    "attention first": {"layer_types": ["attention", "routed"], "light_ffn": False},
    "spectral last": {"layer_types": ["routed", "spectral"], "spectral_form": "equation"},
    "alternating": {"layer_types": ["spectral", "routed", "attention", "routed", "spectral"]},
    "random by token": {"router": "random", "keys": "routed"},
    "random by position": {"router": "random", "random_key": "position"},
    "random of three": {"router": "random", "random_fraction": 0.4, "keys": "routed", **THREE},
    "static": {"router": "static", "keys": "routed"},
    "temporal light path, keys routed": {**TEMPORAL, "keys": "routed", "light_ffn": False, "padding": "holes"},
    "temporal, long window": {**EVERYWHERE, "temporal_window": 12, "temporal_coefficients": 7, "padding": "holes"},
    "temporal layer 1": {"layer_types": ["temporal", "routed", "attention"], "temporal_window": 4, "padding": "holes"},
}
for pool in ("batch", "sequence", "causal"):
    CASES[f"{pool} gate"] = {"gate_pool": pool, "padding": "holes"}
for position in ("pre", "post"):
    CASES[f"temporal light path, {position}"] = {**TEMPORAL, "norm_position": position, "padding": "holes"}
    CASES[f"temporal everywhere, {position}"] = {**EVERYWHERE, "norm_position": position}
for preset in ("baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"):
    CASES[preset] = {"preset": preset, "padding": "holes"}
    CASES[f"{preset}, forced"] = {"preset": preset, "forced": True}
for name, form in FORMS.items():
    CASES[f"rmsnorm, {name}"] = {"norm": "rmsnorm", "meta_router": True, "padding": "left", **form}
    CASES[f"learned positions, {name}"] = {"positions": "learned", "padding": "left", **form}
    for routing in ("threshold", "hard", "soft"):
        CASES[f"{routing}, {name}"] = {"routing": routing, "padding": "left", **form}
        three = {"routing": routing, "keys": "routed", "padding": "right", **THREE, **form}
        CASES[f"{routing} of three, keys routed, {name}"] = {**three, "forced": routing != "soft"}
for name in ROUTER_OPTIONS:
    CASES[name] = {"padding": "left", **router_options(name)}
    CASES[f"{name}, forced"] = {"forced": True, **router_options(name)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_same_numbers(case):
    fields = {"preset": "v3-tiny", "padding": None, "forced": False, **case}
    padding, forced = fields.pop("padding"), fields.pop("forced")
    config, ids = small_config(**fields), token_ids(ROWS, TOKENS)
    # With this seed every operator is used in every case; the assertion below watches over that.
    model = random_model(config, seed=5)
    mask = None if padding is None else padding_mask(padding, ROWS, TOKENS)
    if model.model.router_state is not None:
        model.train()(token_ids(16, 16, seed=5))  # so that thresholds lie among the scores
        model.eval()
    routes = mixed_routes(config, ROWS, TOKENS) if forced else {}
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, forced_routes=routes, output_routing=True)
    if config.router in ("random", "static"):
        # The transcription has no controls: it is told their routes and shows that they are followed.
        routes = {layer: ours.routing.layers[layer].choice_BT for layer in config.routed_layers}
    # The outputs at padding are read by nobody.
    real = torch.ones_like(ids).bool().numpy() if mask is None else mask.bool().numpy()
    forced = {layer: choice_BT.numpy() for layer, choice_BT in routes.items()}
    theirs = transcription.forward(transcribed_weights(model), ids.numpy(), real, forced, transcribed_options(model))

    def assert_close(a, b, tolerance=UNIT_TOLERANCE):
        tolerance = FLOAT64_TOLERANCE if is_float64_throughout(config) else tolerance
        np.testing.assert_allclose(a.numpy()[real], b[real], rtol=0, atol=tolerance)

    for layer in config.routed_layers:
        trace, choice = ours.routing.layers[layer], theirs["choice"][layer][real]
        assert config.router == "static" or set(choice) == set(range(len(config.operators))), "routes are not mixed"
        np.testing.assert_array_equal(trace.choice_BT.numpy()[real], choice)
        assert_close(trace.entropy_BT, theirs["H"][layer])
        assert_close(trace.weights_BTK, theirs["gates"][layer])
    if config.meta_router:
        gate_BT = ours.routing.layers[0].gate_BT
        assert ((gate_BT > 0.1) & (gate_BT < 0.9)).any(), "the gate is saturated"
        assert_close(gate_BT, theirs["g"])
    assert float(ours.logits.std()) > 0.5
    assert_close(ours.logits, theirs["logits"], LOGITS_TOLERANCE)
