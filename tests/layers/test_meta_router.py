"""The MetaRouter: pools by hand, both initialisations, the hard gate."""

import math

import pytest
import torch

from chiar import presets
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.gate import MetaRouter
from chiar.model.modeling import ChiarForCausalLM
from helpers import padding_mask, random_model, small_config, token_ids

WIDTH = 5


def context(real_BT=None):
    return TokenContext(
        transform=Transform(), positions_BT=torch.zeros(1, 1), real_BT=real_BT, token_ids_BT=None, rope=None
    )


def drawn_router(pool, skip_below=None):
    router = MetaRouter(WIDTH, pool, skip_below)
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0]]))
        router.gate.bias.fill_(0.25)
    return router


def pool_by_hand(x_BTD, real_BT, row, token, pool):
    """The mean of the real tokens that token (row, token) may see; 0 if there are none."""
    members = []
    for b in range(x_BTD.shape[0]):
        for t in range(x_BTD.shape[1]):
            same_row, not_later = b == row, t <= token
            seen = {"batch": True, "sequence": same_row, "causal": same_row and not_later}[pool]
            if seen and real_BT[b, t]:
                members.append(x_BTD[b, t])
    return torch.stack(members).mean(0) if members else torch.zeros(WIDTH)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_gate_is_the_sigmoid_of_the_pooled_mean(pool, padding):
    x_BTD = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    real_BT = torch.ones(3, 8, dtype=torch.bool) if padding == "none" else padding_mask(padding, rows=3).bool()
    router = drawn_router(pool)
    gate_BT1 = router(x_BTD, context(None if padding == "none" else real_BT))
    assert gate_BT1.shape == (3, 8, 1)
    for row in range(3):
        for token in range(8):
            mean_D = pool_by_hand(x_BTD, real_BT, row, token, pool)
            expected = 1 / (1 + math.exp(-(router.gate.weight[0] @ mean_D + router.gate.bias).item()))
            # fp32 sums of up to 24 tokens.
            assert gate_BT1[row, token].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_padding_is_never_counted(pool):
    real_BT = padding_mask("left", rows=3).bool()
    x_BTD = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    other_BTD = torch.where(real_BT[..., None], x_BTD, 1e6)
    router = drawn_router(pool)
    assert torch.equal(router(x_BTD, context(real_BT)), router(other_BTD, context(real_BT)))


@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_rows_of_padding_alone_give_the_bias(pool):
    x_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    gate_BT1 = drawn_router(pool)(x_BTD, context(torch.zeros(2, 4, dtype=torch.bool)))
    assert torch.equal(gate_BT1, torch.full((2, 4, 1), 0.25).sigmoid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gate_is_fp32(dtype):
    x_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    router = drawn_router("causal").to(dtype)
    gate_BT1 = router(x_BTD, context())
    assert gate_BT1.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x_BTD, context()), gate_BT1)


def test_biased_start_is_the_texts():
    gate = ChiarForCausalLM(small_config(gate_init="biased")).model.meta_router.gate
    assert torch.equal(gate.weight, torch.zeros_like(gate.weight))
    assert torch.equal(gate.bias, torch.tensor([2.0]))
    trace = ChiarForCausalLM(small_config()).eval()(token_ids(), output_routing=True).routing
    # σ(2) = 0.88080 to five decimals.
    torch.testing.assert_close(trace.layers[0].gate_BT, torch.full((2, 8), 0.88080), atol=5e-6, rtol=0)


def test_neutral_start_is_the_released_codes():
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(gate_init="neutral", hidden_size=512, num_attention_heads=2)).eval()
    gate = model.model.meta_router.gate
    assert torch.equal(gate.bias, torch.zeros(1))
    # A standard deviation of 512 draws is good to 3% (one standard error); three of them.
    assert gate.weight.std().item() == pytest.approx(0.02, rel=0.1)
    trace = model(token_ids(), output_routing=True).routing
    # w·x̄ is a sum of 512 products of 0.02 and less: below 0.02·0.02·√512.
    torch.testing.assert_close(trace.layers[0].gate_BT, torch.full((2, 8), 0.5), atol=0.01, rtol=0)


def gates_and_states(model, mask=None, **changes):
    output = model(token_ids(), attention_mask=mask, output_routing=True, output_hidden_states=True, **changes)
    return output.routing.layers[0].gate_BT, output.hidden_states


@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_layer_one_is_blended_with_its_input(pool):
    model = random_model(small_config(gate_pool=pool))
    gate_BT, states = gates_and_states(model)
    ungated = ChiarForCausalLM(small_config(meta_router=False)).double().eval()
    ungated.load_state_dict({k: v for k, v in model.state_dict().items() if "meta_router" not in k})
    spectral_BTD = ungated(token_ids(), output_hidden_states=True).hidden_states[1]
    g = gate_BT.double()[..., None]
    assert float(g.min()) < 0.99 and float(g.max()) > 0.01
    # float64.
    torch.testing.assert_close(states[1], g * spectral_BTD + (1 - g) * states[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_hard_gate_skips_below_its_bound(pool):
    model = random_model(small_config(gate_pool=pool))
    gate_BT, _ = gates_and_states(model)
    bound = float(gate_BT.double().mean()) if pool != "batch" else float(gate_BT.max()) + 1e-3
    skipping = ChiarForCausalLM(small_config(gate_pool=pool, gate_skip_below=bound)).double().eval()
    skipping.load_state_dict(model.state_dict())
    hard_BT, states = gates_and_states(skipping)
    below_BT = gate_BT < bound
    assert below_BT.any() and (pool == "batch" or not below_BT.all())
    assert torch.equal(hard_BT, torch.where(below_BT, 0.0, gate_BT))
    assert torch.equal(states[1][below_BT], states[0][below_BT]), "a skipped layer 1 is the identity"


@pytest.mark.parametrize("trace", [False, True], ids=["layer-not-run", "layer-run-for-its-trace"])
def test_a_layer_every_token_skips_is_the_identity(trace):
    model = random_model(small_config(gate_pool="causal", gate_skip_below=1.0))
    output = model(token_ids(), output_hidden_states=True, output_routing=trace)
    assert torch.equal(output.hidden_states[1], output.hidden_states[0])


def test_gate_exactly_at_the_bound_does_not_skip():
    config = small_config(gate_skip_below=0.5)
    model = ChiarForCausalLM(config).eval()
    torch.nn.init.zeros_(model.model.meta_router.gate.bias)
    gate_BT, _ = gates_and_states(model)
    assert torch.equal(gate_BT, torch.full((2, 8), 0.5))


def test_training_never_skips():
    model = random_model(small_config(gate_skip_below=1.0))
    soft_BT, _ = gates_and_states(random_model(small_config()))
    assert torch.equal(gates_and_states(model)[0], torch.zeros(2, 8))
    model.train()
    assert torch.equal(gates_and_states(model)[0], soft_BT)


def test_a_skipped_layer_trains_its_gate():
    model = random_model(small_config(gate_skip_below=1.0)).train()
    model(token_ids(), labels=token_ids()).loss.backward()
    assert model.model.meta_router.gate.weight.grad.abs().max() > 1e-6


def test_a_fresh_post_norm_gate_has_almost_no_gradient():
    """With w = 1 layer 1 returns nearly a multiple of its input, and the next LayerNorm undoes scale."""
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v3-16m", dropout=0.0))
    ids = torch.randint(0, 50257, (2, 32))
    model(ids, labels=ids).loss.backward()
    gate = model.model.meta_router.gate
    smallest_matrix = min(
        parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "meta_router" not in name
    )
    assert 0 < gate.weight.grad.norm().item() < 1e-3 * smallest_matrix
