"""Sparse execution is dense execution: the same routes in, the same outputs and gradients out."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.layers import block, sparse
from helpers import ROUTER_OPTIONS, router_options

B, T = 3, 12


@pytest.fixture(params=["exact", "exact, long", "with room"], autouse=True)
def form(request, monkeypatch):
    """Packings without room behind the last token, as on a CPU (long rows have a way of their own), or with, as on a
    GPU."""
    if request.param == "with room":
        monkeypatch.setattr(sparse, "host_sees_routes", lambda device: False)
    if request.param == "exact, long":
        monkeypatch.setattr(sparse, "LONG", 1)
    return request.param


@pytest.fixture(autouse=True)
def undefined_is_nan():
    """torch then fills new memory with NaN: whoever reads a packed row behind the last is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def build(**changes):
    """In float64, with every weight drawn, so that nothing is 1 or 0 by chance."""
    base = {"hidden_size": 16, "num_attention_heads": 2, "dropout": 0.0, "gate_pool": "causal", "vocab_size": 61}
    model = ChiarForCausalLM(presets.get("v3-tiny", **{**base, **changes})).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def densely_and_sparsely(model, **inputs):
    for model.config.execution in ("dense", "sparse"):
        yield model(tokens(), **inputs)


def tokens(rows=B, length=T):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(2))


def routes(model, rows=B, length=T, fraction=0.5, seed=3):
    """Forced, so that rounding cannot turn a token round."""
    operators = len(model.config.operators)
    drawn = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed))
    choice = torch.where(drawn < fraction, operators - 1, (drawn * 1000).long() % (operators - 1))
    return {layer: choice.roll(layer, 1) for layer in model.config.routed_layers}


def run(model, execution, ids, **inputs):
    """Loss-like sum over real tokens, and its gradients."""
    model.config.execution = execution
    model.zero_grad()
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    logits = model(ids, **inputs).logits[real]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model, ids, **inputs):
    dense, dense_gradients = run(model, "dense", ids, **inputs)
    sparse, sparse_gradients = run(model, "sparse", ids, **inputs)
    # Sums run in another order, in float64; RBF mixing takes its softmax in fp32.
    fp32 = "rbf" in model.config.operators
    values, slopes = (1e-6, 1e-5) if fp32 else (1e-10, 1e-9)
    torch.testing.assert_close(sparse, dense, atol=values, rtol=values)
    assert sparse_gradients.keys() == dense_gradients.keys(), "every parameter stays in the graph"
    for name, gradient in dense_gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(sparse_gradients[name], gradient, atol=slopes * scale, rtol=1e-7, msg=name)


RMS = {"norm_position": "pre", "norm": "rmsnorm"}
DESIGNS = {
    "post": {},
    "post equation": {"spectral_form": "equation"},
    "post light skips": {"light_ffn": False},
    "pre": {"norm_position": "pre"},
    "pre light skips": {**RMS, "light_ffn": False},
    "pre identity": {**RMS, "basis": "identity", "filter_gamma": False},
    "wide heads": {"hidden_size": 32},
    "wide heads, learned positions": {"hidden_size": 32, "positions": "learned", "meta_router": False},
}
THREE = {"operators": ["spectral", "rbf", "attention"]}
SELECTED = {"routing": "hard", "hard_estimator": "selected"}
ROUTERS = {
    "entropy": {},
    "random": {"router": "random"},
    "static": {"router": "static"},
    "hard": SELECTED,
    "three": THREE,
    "three hard": {**THREE, **SELECTED},
}
TEMPORAL = {"operators": ["temporal", "attention"], "temporal_window": 4}
TEMPORAL_DESIGNS = {
    "post": {},
    "post equation": {"spectral_form": "equation"},
    "pre light skips": {**RMS, "light_ffn": False},
    "pre everywhere": {"norm_position": "pre", "temporal_everywhere": True, "keys": "routed"},
    "three": {"operators": ["temporal", "rbf", "attention"], "light_ffn": False, "temporal_everywhere": True},
    "hard": SELECTED,
}
# Each design with each router under one of the key policies, and with the entropy router under both.
CASES = {
    f"{design}, {router}, {keys} keys": {**DESIGNS[design], **ROUTERS[router], "keys": keys}
    for i, design in enumerate(DESIGNS)
    for j, router in enumerate(ROUTERS)
    for k, keys in enumerate(("all", "routed"))
    if router == "entropy" or (i + j + k) % 2
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients(case):
    model = build(**case)
    assert_alike(model, tokens(), forced_routes=routes(model))


PADDED = {f"{design} {keys}": {**DESIGNS[design], "keys": keys} for design in DESIGNS for keys in ("all", "routed")}
PADDED |= {f"temporal {name}": {**TEMPORAL, **design} for name, design in TEMPORAL_DESIGNS.items()}
PADDED |= {f"three {keys}": {**THREE, "light_ffn": False, "keys": keys} for keys in ("all", "routed")}
PADDED |= {name: router_options(name) for name in ROUTER_OPTIONS}


@pytest.mark.parametrize("case", PADDED.values(), ids=PADDED.keys())
def test_padding(case):
    """Left, right and between: it is never sent to attention, and temporal filters never look at it."""
    model = build(**case).eval()  # in training thresholds that follow would move
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, 10:], mask[1, :4], mask[2, 3:5], mask[2, 9:] = 0, 0, 0, 0
    assert_alike(model, tokens(), attention_mask=mask, forced_routes=routes(model))
    if "temporal" in model.config.operators:
        assert_alike(model, tokens(), forced_routes=routes(model))


@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("design", ["post", "pre light skips", "wide heads"])
@pytest.mark.parametrize("shape", [(3, 12), (4, 1)], ids=str)
def test_all_tokens_light_and_all_dark(shape, design, keys):
    model = build(keys=keys, **DESIGNS[design])
    for choice in (0, 1):
        forced = {layer: torch.full(shape, choice) for layer in model.config.routed_layers}
        assert_alike(model, tokens(*shape), forced_routes=forced)


@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("design", ["post", "pre light skips"])
def test_autocast(design, keys):
    """The same dtype as densely, and the same numbers as closely as bf16 tells them apart."""
    model = build(keys=keys, **DESIGNS[design]).float()
    with torch.autocast("cpu", torch.bfloat16):
        dense, sparse = (found.logits for found in densely_and_sparsely(model, forced_routes=routes(model)))
    assert sparse.dtype == dense.dtype
    # Eight roundings a layer, here and there, each at most 2⁻⁹.
    assert (sparse - dense).float().norm() / dense.float().norm() < 0.03


@given(bits=st.lists(st.booleans(), min_size=15, max_size=15), keys=st.sampled_from(["all", "routed"]))
# One fixture for all examples: they all want the same form.
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split(bits, keys):
    model = build(keys=keys, **DESIGNS["pre light skips"])
    choice = torch.tensor(bits).long().view(3, 5)
    assert_alike(model, tokens(3, 5), forced_routes=dict.fromkeys(model.config.routed_layers, choice))


def test_its_own_routes_are_the_same():
    dense, sparse = (found.routing for found in densely_and_sparsely(build(keys="routed"), output_routing=True))
    assert all(torch.equal(a.choice_BT, b.choice_BT) for a, b in zip(dense.layers, sparse.layers, strict=True))


@pytest.mark.parametrize("changes", [{"routing": "soft"}, {"routing": "hard", "hard_estimator": "both"}])
def test_what_needs_all_operators_is_refused_or_runs_densely(changes):
    with pytest.raises(InputError, match="execution='sparse' is impossible"):
        presets.get("v3-tiny", execution="sparse", **changes)
    model = build(execution="auto", **changes)
    automatic = model(tokens()).logits
    model.config.execution = "dense"
    torch.testing.assert_close(automatic, model(tokens()).logits)


def test_dropout_of_attention_weights_is_refused_in_training_only():
    model = build(execution="sparse", dropout=0.1)
    with pytest.raises(InputError, match=r"dropout=0\.0"):
        model.train()(tokens())
    assert model.eval()(tokens()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("keys", "shape", "sparsely"),
    [("routed", (1, 255), False), ("routed", (16, 16), True), ("all", (1, 511), False), ("all", (16, 32), True)],
    ids=str,
)
def test_auto_runs_few_tokens_densely_on_a_cpu(form, keys, shape, sparsely, monkeypatch):
    ran = []
    monkeypatch.setattr(block, "PackedTokens", lambda *inputs: ran.append(1) or sparse.PackedTokens(*inputs))
    model = build(execution="auto", keys=keys)
    model(tokens(*shape))
    assert bool(ran) == (sparsely or form == "with room"), "a GPU's work is never looked at"
    model.config.execution = "sparse"
    ran.clear()
    model(tokens(*shape))
    assert ran, "what was asked for is done"


@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("design", ["post", "pre light skips"])
def test_recomputed_layers_give_the_same_gradients(design, keys):
    model = build(keys=keys, **DESIGNS[design]).train()
    ids, forced = tokens(), routes(model)
    kept = run(model, "sparse", ids, forced_routes=forced)
    model.gradient_checkpointing_enable()
    again = run(model, "sparse", ids, forced_routes=forced)
    torch.testing.assert_close(again, kept, atol=1e-9, rtol=1e-7)
