"""The package against an independent NumPy transcription of the specification, over every architectural choice."""

import numpy as np
import pytest
import torch

import transcription
from chiar.kernels.basis import basis_matrix
from helpers import mixed_routes, padding_mask, random_model, small_config, token_ids
from routed import OPTIONS as ROUTER_OPTIONS
from routed import options

ROWS, TOKENS = 3, 10
# Weights and the residual stream are float64, but three things are fp32 by design: RoPE's tables, the MetaRouter, and
# RBF's scores. Each is good to about 1e-7 and layers multiply that by a few.
LOGITS_TOLERANCE = 5e-6
ENTROPY_TOLERANCE = 1e-6
WEIGHTS_TOLERANCE = 1e-6
GATE_TOLERANCE = 1e-6
# Nothing is rounded to fp32 in a model without those three.
FLOAT64_TOLERANCE = 1e-12


def transcribed_weights(model):
    """Our state dict under the transcription's names."""
    names = {
        "model.embed_tokens.weight": "token_emb",
        "model.embed_positions.weight": "position_emb",
        "model.meta_router.gate.weight": "gate.weight",
        "model.meta_router.gate.bias": "gate.bias",
        "model.norm.weight": "norm.weight",
        "model.norm.bias": "norm.bias",
    }
    parts = {
        "operators.spectral.weight": "filter",
        "operators.attention.": "attention.",
        "operators.rbf.omega_Dm": "rbf.omega",
        "operators.rbf.": "rbf.",
        "norms.spectral.": "spectral_norm.",
        "norms.attention.": "attention_norm.",
        "norms.rbf.": "rbf_norm.",
        "norms.temporal.": "temporal_norm.",
        "operators.temporal.": "temporal.",
        "everywhere.": "everywhere.",
        "router.score.": "router.",
        "router.hidden.": "router_hidden.",
        "entropy_weights.raw_D": "entropy_weights",
        "ffn.": "ffn.",
        "ffn_norm.": "ffn_norm.",
    }
    weights = {}
    for name, value in model.state_dict().items():
        if name.startswith("model.router_state."):
            continue
        if name == "lm_head.weight":
            assert torch.equal(value, model.model.embed_tokens.weight)
            continue
        if name not in names:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            prefix = next(part for part in parts if rest.startswith(part))
            names[name] = f"{layer}.{parts[prefix]}{rest.removeprefix(prefix)}"
        weights[names[name]] = value.numpy()
    if "gate.weight" in weights:
        weights["gate.weight"], weights["gate.bias"] = weights["gate.weight"][0], weights["gate.bias"][0]
    return weights


def transcribed_options(model):
    config, state = model.config, model.model.router_state
    # τ as the router holds it: rounded to fp32.
    thresholds = [[float(np.float32(tau)) for tau in taus] for taus in config.layer_thresholds()]
    return transcription.Options(
        layer_types=config.layer_types,
        heads=config.num_attention_heads,
        operators=tuple(config.operators),
        routing=config.routing,
        thresholds=[taus[0] if len(taus) == 1 else taus for taus in thresholds],
        keys=config.keys,
        light_ffn=config.light_ffn,
        spectral_form=config.spectral_form,
        norm=config.norm,
        norm_position=config.norm_position,
        positions=config.positions,
        meta_router=config.meta_router,
        gate_pool=config.gate_pool,
        entropy_eps=config.entropy_eps,
        entropy_dc_weight=config.entropy_dc_weight,
        basis=basis_matrix(config.basis, config.hidden_size, config.basis_seed, torch.float64).numpy(),
        cuts=state.threshold_L.tolist() if config.follows_quantile else None,
        scale=config.router_scale,
        window=config.temporal_window,
        everywhere=config.temporal_everywhere,
        embedding_norm=config.embedding_norm,
    )


def is_float64_throughout(config):
    rbf = "rbf" in config.operators and config.routed_layers
    return config.positions == "learned" and not (config.meta_router or rbf)


def check_same(preset="v3-tiny", padding=None, forced=False, seed=3, **fields):
    config = small_config(preset, **fields)
    # With this seed every operator is used in every case; the assertion below watches over that.
    model, ids = random_model(config, seed=seed), token_ids(ROWS, TOKENS)
    mask = None if padding is None else padding_mask(padding, ROWS, TOKENS)
    if model.model.router_state is not None:
        model.model.set_progress(1.0)
        model.train()(token_ids(16, 16, seed=5))  # so that thresholds lie among the scores
        model.eval()
    routes = mixed_routes(config, ROWS, TOKENS) if forced else None
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, forced_routes=routes, output_routing=True)
    if config.router in ("random", "static"):
        # The transcription has no controls: it is told their routes and shows that they are followed.
        routes = {layer: ours.routing.layers[layer].choice_BT for layer in config.routed_layers}
    theirs = transcription.forward(
        transcribed_weights(model),
        ids.numpy(),
        transcribed_options(model),
        None if mask is None else mask.numpy(),
        None if routes is None else {layer: choice_BT.numpy() for layer, choice_BT in routes.items()},
    )
    # The outputs at padding are read by nobody.
    real = np.ones((ROWS, TOKENS), dtype=bool) if mask is None else mask.numpy().astype(bool)

    def assert_close(a, b, tolerance):
        tolerance = FLOAT64_TOLERANCE if is_float64_throughout(config) else tolerance
        np.testing.assert_allclose(a.numpy()[real], b[real], rtol=0, atol=tolerance)

    for layer in config.routed_layers:
        trace, choice = ours.routing.layers[layer], theirs["choice"][layer][real]
        assert config.router == "static" or set(choice) == set(range(len(config.operators))), "routes are not mixed"
        np.testing.assert_array_equal(trace.choice_BT.numpy()[real], choice)
        assert_close(trace.entropy_BT, theirs["H"][layer], ENTROPY_TOLERANCE)
        assert_close(trace.weights_BTK, theirs["gates"][layer], WEIGHTS_TOLERANCE)
    if config.meta_router:
        gate_BT = ours.routing.layers[0].gate_BT
        assert ((gate_BT > 0.1) & (gate_BT < 0.9)).any(), "the gate is saturated"
        assert_close(gate_BT, theirs["g"], GATE_TOLERANCE)
    assert float(ours.logits.std()) > 0.5
    assert_close(ours.logits, theirs["logits"], LOGITS_TOLERANCE)


THREE = {"operators": ["spectral", "rbf", "attention"]}
EQUATION = {"spectral_form": "equation"}
PADDINGS = {"no-padding": None, "left": "left", "right": "right", "holes": "holes"}


def ids_of(values):
    return {"argvalues": list(values.values()), "ids": list(values)}


@pytest.mark.parametrize("padding", **ids_of(PADDINGS))
@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"])
def test_presets(preset, forced, padding):
    check_same(preset, padding, forced)


FORMS = {
    "post": {},
    "post-light-ffn-off": {"light_ffn": False},
    "equation": EQUATION,
    "pre": {"norm_position": "pre"},
    "pre-light-ffn-off": {"norm_position": "pre", "light_ffn": False},
}


@pytest.mark.parametrize("padding", **ids_of({"no-padding": None, "left": "left"}))
@pytest.mark.parametrize("keys", ["all", "routed"], ids=["keys-all", "keys-routed"])
@pytest.mark.parametrize("form", **ids_of(FORMS))
@pytest.mark.parametrize("operators", **ids_of({"two": {}, "three": THREE}))
@pytest.mark.parametrize("routing", ["threshold", "hard", "soft"])
def test_routing_by_form(routing, operators, form, keys, padding):
    check_same(padding=padding, routing=routing, keys=keys, **operators, **form)


@pytest.mark.parametrize("form", **ids_of(FORMS))
@pytest.mark.parametrize("operators", **ids_of({"two": {}, "three": THREE}))
@pytest.mark.parametrize("routing", ["threshold", "hard"])
def test_forced_routes(routing, operators, form):
    check_same(padding="right", forced=True, keys="routed", routing=routing, **operators, **form)


@pytest.mark.parametrize("form", **ids_of(FORMS))
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_and_positions(norm, positions, form):
    check_same(padding="left", norm=norm, positions=positions, meta_router=True, **form)


@pytest.mark.parametrize("padding", **ids_of(PADDINGS))
@pytest.mark.parametrize("gate_pool", ["batch", "sequence", "causal"])
def test_gate_pools(gate_pool, padding):
    check_same(padding=padding, gate_pool=gate_pool)


ENTROPIES = {
    "papers-eps": {"entropy_eps": 1e-8},
    "large-eps": {"entropy_eps": 0.05, "thresholds": 0.6},
    "dc-double": {"entropy_dc_weight": 2.0},
    "released-code": {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
    "dc-off": {"entropy_dc_weight": 0.0},
}


@pytest.mark.parametrize("entropy", **ids_of({"exact": {}, **ENTROPIES}))
@pytest.mark.parametrize("routing", ["threshold", "soft"])
@pytest.mark.parametrize("basis", ["dct", "identity", "random"])
def test_bases_and_entropies(basis, routing, entropy):
    check_same("v2-tiny", basis=basis, basis_seed=3, routing=routing, **entropy)


THRESHOLDS = {
    "one-for-all": {"thresholds": 0.8},
    "one-a-layer": {"thresholds": [0.85, 0.7]},
    "pair-a-layer": {"thresholds": [[0.75, 0.85], [0.7, 0.8]], **THREE},
}


@pytest.mark.parametrize("thresholds", **ids_of(THRESHOLDS))
def test_thresholds(thresholds):
    check_same("v2-tiny", **thresholds)


LAYER_TYPES = {
    "routed-first": ["routed", "routed"],
    "attention-first": ["attention", "routed"],
    "spectral-last": ["routed", "spectral"],
    "alternating": ["spectral", "routed", "attention", "routed", "spectral"],
}


@pytest.mark.parametrize("layer_types", **ids_of(LAYER_TYPES))
@pytest.mark.parametrize("form", **ids_of(FORMS))
def test_orders_of_layers(form, layer_types):
    check_same(layer_types=layer_types, **form)


CONTROLS = {
    "random-by-token": {"router": "random"},
    "random-by-position": {"router": "random", "random_key": "position"},
    "random-three": {"router": "random", "random_fraction": 0.4, **THREE},
    "static": {"router": "static"},
}


@pytest.mark.parametrize("keys", ["all", "routed"], ids=["keys-all", "keys-routed"])
@pytest.mark.parametrize("control", **ids_of(CONTROLS))
def test_controls(control, keys):
    check_same(keys=keys, **control)


@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("option", ROUTER_OPTIONS)
def test_router_options(option, forced):
    check_same(forced=forced, padding="left", seed=4 if option == "two layers" else 3, **options(option))


ALONG_TIME = {
    "light path": {"operators": ["temporal", "attention"]},
    "light path, keys routed": {"operators": ["temporal", "attention"], "keys": "routed", "light_ffn": False},
    "everywhere": {"temporal_everywhere": True},
    "everywhere, long window": {"temporal_everywhere": True, "temporal_window": 12, "temporal_coefficients": 7},
    "layer 1": {"layer_types": ["temporal", "routed", "attention"]},
}


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("padding", **ids_of(PADDINGS))
@pytest.mark.parametrize("fields", **ids_of(ALONG_TIME))
def test_filters_along_time(fields, padding, norm_position):
    check_same(padding=padding, **{"norm_position": norm_position, "temporal_window": 4, **fields})


@pytest.mark.parametrize("padding", **ids_of(PADDINGS))
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_embedding_norm(positions, padding):
    check_same(padding=padding, positions=positions, embedding_norm=True)


@pytest.mark.parametrize("fields", **ids_of({"one-head": 1, "four-heads": 4, "eight-heads": 8}))
def test_heads(fields):
    check_same(num_attention_heads=fields)


@pytest.mark.parametrize("padding", **ids_of(PADDINGS))
@pytest.mark.parametrize("keys", ["all", "routed"], ids=["keys-all", "keys-routed"])
def test_eager_attention(keys, padding):
    check_same(padding=padding, keys=keys, attn_implementation="eager")
