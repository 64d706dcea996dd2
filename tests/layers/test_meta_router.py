"""The MetaRouter: its precision, both initialisations, the hard gate. What a pool is tests/transcription.py says."""

import pytest
import torch

from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.gate import MetaRouter
from chiar.model.modeling import ChiarForCausalLM
from helpers import random_model, small_config, token_ids

WIDTH = 5
every_pool = pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])


def gate_of(pool, dtype=torch.float32, real_BT=None, autocast=False):
    """A drawn gate with the bias ¼ for two rows of four tokens."""
    router, generator = MetaRouter(WIDTH, pool, None), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.gate.weight, generator=generator)
    torch.nn.init.constant_(router.gate.bias, 0.25)
    x_BTD = torch.randn(2, 4, WIDTH, generator=generator).to(dtype)
    context = TokenContext(Transform(), torch.zeros(1, 1), real_BT, token_ids_BT=None, rope=None)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return router.to(dtype)(x_BTD, context)


@every_pool
def test_rows_of_padding_alone_give_the_bias(pool):
    gate_BT1 = gate_of(pool, real_BT=torch.zeros(2, 4, dtype=torch.bool))
    torch.testing.assert_close(gate_BT1, torch.full((2, 4, 1), 0.25).sigmoid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gate_is_fp32(dtype):
    assert gate_of("causal", dtype).dtype == torch.float32
    # fp32's rounding, far below bf16's.
    torch.testing.assert_close(gate_of("causal", dtype, autocast=True), gate_of("causal", dtype), atol=1e-6, rtol=0)


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


def gates_and_states(model):
    output = model(token_ids(), output_routing=True, output_hidden_states=True)
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
