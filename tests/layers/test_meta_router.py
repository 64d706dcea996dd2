"""The MetaRouter: its precision, both initialisations, the hard gate."""

import pytest
import torch

from chiar import presets
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.gate import MetaRouter
from chiar.model.modeling import ChiarForCausalLM
from helpers import random_model, small_config, token_ids

WIDTH = 5
every_pool = pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])


def context(real_BT=None):
    return TokenContext(
        transform=Transform(), positions_BT=torch.zeros(1, 1), real_BT=real_BT, token_ids_BT=None, rope=None
    )


def drawn_router(pool):
    router = MetaRouter(WIDTH, pool, None)
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0]]))
        router.gate.bias.fill_(0.25)
    return router


@every_pool
def test_rows_of_padding_alone_give_the_bias(pool):
    """What a pool is otherwise, tests/transcription.py says."""
    x_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    gate_BT1 = drawn_router(pool)(x_BTD, context(torch.zeros(2, 4, dtype=torch.bool)))
    torch.testing.assert_close(gate_BT1, torch.full((2, 4, 1), 0.25).sigmoid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gate_is_fp32(dtype):
    x_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    router = drawn_router("causal").to(dtype)
    gate_BT1 = router(x_BTD, context())
    assert gate_BT1.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # fp32's rounding, far below bf16's.
        torch.testing.assert_close(router(x_BTD, context()), gate_BT1, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("how", "bias", "gate"), [("biased", 2.0, 0.88080), ("neutral", 0.0, 0.5)])
def test_both_beginnings(how, bias, gate):
    """The text's: sigmoid(2) = 0.88080 to five decimals. The released code's: w·x̄ is a sum of 512 products of 0.02 and
    less, below 0.02·0.02·√512."""
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(gate_init=how, hidden_size=512, num_attention_heads=2)).eval()
    begun = model.model.meta_router.gate
    assert begun.bias.item() == bias
    # A standard deviation of 512 draws is good to 3% (one standard error); three of them.
    assert begun.weight.std().item() == pytest.approx(0.02 if how == "neutral" else 0, rel=0.1)
    trace = model(token_ids(), output_routing=True).routing
    tolerance = 5e-6 if how == "biased" else 0.01
    torch.testing.assert_close(trace.layers[0].gate_BT, torch.full((2, 8), gate), atol=tolerance, rtol=0)


def gates_and_states(model, **options):
    output = model(token_ids(), output_routing=True, output_hidden_states=True, **options)
    return output.routing.layers[0].gate_BT, output.hidden_states


@every_pool
def test_a_hard_gate_skips_below_its_bound(pool):
    model = random_model(small_config(gate_pool=pool))
    gate_BT, _ = gates_and_states(model)
    bound = float(gate_BT.double().mean()) if pool != "batch" else float(gate_BT.max()) + 1e-3
    skipping = ChiarForCausalLM(small_config(gate_pool=pool, gate_skip_below=bound)).double().eval()
    skipping.load_state_dict(model.state_dict())
    hard_BT, states = gates_and_states(skipping)
    below_BT = gate_BT < bound
    assert below_BT.any() and (pool == "batch" or not below_BT.all())
    torch.testing.assert_close(hard_BT, torch.where(below_BT, 0.0, gate_BT), atol=1e-6, rtol=0)
    assert torch.equal(states[1][below_BT], states[0][below_BT]), "a skipped layer 1 is the identity"
    soft_BT, _ = gates_and_states(skipping.train())
    torch.testing.assert_close(soft_BT, gate_BT, atol=1e-6, rtol=0, msg="training never skips")


@pytest.mark.parametrize("trace", [False, True], ids=["layer-not-run", "layer-run-for-its-trace"])
def test_a_layer_every_token_skips_is_the_identity_and_trains_its_gate(trace):
    model = random_model(small_config(gate_pool="causal", gate_skip_below=1.0))
    output = model(token_ids(), output_hidden_states=True, output_routing=trace)
    assert torch.equal(output.hidden_states[1], output.hidden_states[0])
    model.train()(token_ids(), labels=token_ids()).loss.backward()
    assert model.model.meta_router.gate.weight.grad.abs().max() > 1e-6


def test_gate_exactly_at_the_bound_does_not_skip():
    model = ChiarForCausalLM(small_config(gate_skip_below=0.5)).eval()
    torch.nn.init.zeros_(model.model.meta_router.gate.bias)
    assert (gates_and_states(model)[0] == 0.5).all()


def test_a_fresh_post_norm_gate_has_almost_no_gradient():
    """With w = 1 layer 1 returns nearly a multiple of its input, and the next LayerNorm undoes scale."""
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v3-16m", dropout=0.0, vocab_size=999))
    ids = torch.randint(0, 999, (2, 32))
    model(ids, labels=ids).loss.backward()
    others = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.ndim == 2 and "meta_router" not in n}
    assert 0 < model.model.meta_router.gate.weight.grad.norm().item() < 1e-3 * min(others.values())
