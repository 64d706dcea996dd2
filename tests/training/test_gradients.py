"""Gradients reach every weight that can have one and are the loss's derivative; routers move when they should."""

import pytest
import torch

from helpers import mixed_routes, padding_mask, random_model, small_config, token_ids

ROWS, TOKENS = 2, 8
PRESETS = ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"]
ROUTINGS = {"threshold": {"routing": "threshold"}, "soft": {"routing": "soft"}}
ROUTINGS |= {f"hard-{way}": {"routing": "hard", "hard_estimator": way} for way in ("both", "selected")}
OPERATORS = {"two": {}, "three": {"operators": ["spectral", "rbf", "attention"]}}
PRE = {"norm_position": "pre"}
FORMS = {"post": {}, "post-light-ffn-off": {"light_ffn": False}, "equation": {"spectral_form": "equation"}}
FORMS |= {"pre": PRE, "pre-light-ffn-off": {**PRE, "light_ffn": False}}


def named(values):
    return {"argvalues": list(values.values()), "ids": list(values)}


def gradients(config, forced=True, model=None, **inputs):
    """Gradients of the next-token loss under routes that use every operator."""
    model = (random_model(config) if model is None else model).train()
    ids = token_ids(ROWS, TOKENS)
    routes = mixed_routes(config, ROWS, TOKENS) if forced else None
    model(ids, labels=ids, forced_routes=routes, **inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def zero_by_mathematics(config, name, gradient):
    """Marks the entries whose gradient is exactly zero whatever the weights and the data."""
    zero = torch.zeros_like(gradient, dtype=torch.bool)
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
    if name.endswith("operators.spectral.weight") and config.basis == "dct" and config.spectral_form == "sublayer":
        # The first DCT vector is constant, which LayerNorm removes: in post-norm straight after, in pre-norm before
        # every reader of the stream but a learned router, which reads the entropy of later layers without it.
        later_entropy = config.router == "learned" and any(routed > layer for routed in config.routed_layers)
        zero[0] = config.norm == "layernorm" and (config.norm_position == "post" or not later_entropy)
    if name.endswith("qkv.bias") and config.positions == "learned":
        # A key bias adds q·b to all scores of a query, and softmax ignores a common shift. RoPE turns it differently.
        zero[config.hidden_size : 2 * config.hidden_size] = True
    if name.endswith("router.score.bias") and config.follows_quantile:
        # It moves all scores alike, and a threshold that follows them behind.
        zero[:] = True
    if name == "model.embed_positions.weight":
        # Later positions do not occur. No label follows the last token; only a gate that pools the future reads it.
        zero[TOKENS:] = True
        zero[TOKENS - 1] = not config.meta_router or config.gate_pool == "causal"
    return zero


ALONG = {"operators": ["temporal", "attention"], "temporal_everywhere": True, "temporal_window": 5}
CHANGES = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{f"{r}-{o}-keys-routed": {**ROUTINGS[r], **OPERATORS[o], "keys": "routed"} for r in ROUTINGS for o in OPERATORS},
    **{f"{r}-{f}-three": {**ROUTINGS[r], **FORMS[f], **OPERATORS["three"]} for r in ROUTINGS for f in FORMS},
    **{f"{f}-keys-routed": {**FORMS[f], "keys": "routed"} for f in FORMS},
    **{f"along-time-{r}": {**ALONG, **ROUTINGS[r]} for r in ROUTINGS},
    **{f"along-time-pre-{r}": {**ALONG, **PRE, **ROUTINGS[r]} for r in ROUTINGS},
    **{f"gate-{pool}": {"meta_router": True, "gate_pool": pool} for pool in ("batch", "sequence", "causal")},
    **{f"gate-{pool}-learned": {"gate_pool": pool, "positions": "learned"} for pool in ("batch", "causal")},
    **{f"{basis}-pre": {"basis": basis, **PRE} for basis in ("dct", "identity", "random")},
    **{f"{basis}-rmsnorm": {"basis": basis, "norm": "rmsnorm"} for basis in ("dct", "identity", "random")},
    **{f"learned-{norm}-pre": {"positions": "learned", "norm": norm, **PRE} for norm in ("layernorm", "rmsnorm")},
}


@pytest.mark.parametrize("changes", **named(CHANGES))
def test_every_weight_that_can_have_a_gradient_has_one(changes):
    config = small_config(**changes)
    for name, gradient in gradients(config).items():
        assert gradient is not None, f"{name} has no gradient"
        assert torch.isfinite(gradient).all(), name
        zero = zero_by_mathematics(config, name, gradient)
        # float64 rounding leaves 2e-16 of the zeros, and the smallest entry of the others is 6e-10.
        assert (gradient[zero].abs() < 1e-13).all(), f"{name} should be zero: {gradient[zero].abs().max()}"
        assert (gradient[~zero].abs() > 1e-12).all(), f"{name} has zeros: {(gradient.abs() <= 1e-12).nonzero()}"
        assert zero.all() or gradient.abs().max() > 1e-4, f"{name} has next to no gradient"


@pytest.mark.parametrize("forced", [True, False], ids=["forced", "free"])
@pytest.mark.parametrize("keys", ["all", "routed"], ids=["keys-all", "keys-routed"])
@pytest.mark.parametrize("form", **named(FORMS))
def test_gradient_is_the_derivative_of_the_loss(form, keys, forced):
    """Along a random direction in the space of all weights; threshold routing with learned positions is all float64.
    Where the entropy chooses, small steps leave the choice as it is, and no gradient may go through it."""
    config = small_config("v2-tiny", keys=keys, **form)
    model, ids = random_model(config), token_ids(ROWS, TOKENS)
    routes = mixed_routes(config, ROWS, TOKENS) if forced else None
    grads = gradients(config, forced, model)
    generator = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(g.shape, generator=generator, dtype=torch.float64) for name, g in grads.items()}
    step, losses = 1e-5, []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in model.named_parameters():
                parameter += sign * step * direction[name]
            logits = model(ids, forced_routes=routes).logits
            losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    expected = sum(float((grads[name] * direction[name]).sum()) for name in grads)
    # The loss in backward is summed in fp32 (6e-8); central differences with this step are good to 1e-8.
    assert float(losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("padding", [None, "left"], ids=["no-padding", "left"])
@pytest.mark.parametrize("operators", **named(OPERATORS))
@pytest.mark.parametrize("routing", **named(ROUTINGS))
def test_regulariser_is_minus_the_entropy_of_mean_use(routing, operators, padding):
    """−Σ ū log ū of the mean ū over real tokens."""
    model = random_model(small_config(collapse_regulariser=0.01, **routing, **operators), seed=3)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long) if padding is None else padding_mask(padding, ROWS, TOKENS)
    ids = token_ids(ROWS, TOKENS)
    labels = ids.masked_fill(mask == 0, -100)
    output = model.train()(ids, attention_mask=None if padding is None else mask, labels=labels, output_routing=True)
    entropies = []
    for layer in model.config.routed_layers:
        trace = output.routing.layers[layer]
        use_BTK = trace.weights_BTK if trace.probabilities_BTK is None else trace.probabilities_BTK
        entropies.append(float(torch.special.entr(use_BTK[mask.bool()].double().mean(0)).sum()))
    expected = -0.01 * sum(entropies) / len(entropies)
    assert min(entropies) > 0.05, "one operator takes everything and the value says nothing"
    # fp32 means of 16 probabilities.
    assert output.routing_loss.item() == pytest.approx(expected, rel=1e-5)
    output.routing_loss.requires_grad and output.routing_loss.backward()
    routers = [model.model.layers[layer].router for layer in model.config.routed_layers]
    learns = [router.score.weight.grad.abs().max() > 1e-6 for router in routers if hasattr(router, "score")]
    assert all(learns) and bool(learns) == (routing["routing"] != "threshold"), "routers learn exactly where they can"
