"""Rules and scores that choose which bytes pass a dark stack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar import ChiarForCausalLM, register_router, registry
from chiar.layers.routers import ChoiceRouter, Route
from chiar.layers.stack_routers import is_space, ratio_loss
from chiar.model.inputs import make_context
from chiar.training.tasks import materialise, outline
from helpers import fed_logits, padding_mask, stack_config, stack_model, token_ids

TEXTS = [
    "Two words, and more.\n\n  42 lines",
    "été à Zürich — naïve",
    "日本語 と English",
    "no_spaces",
    " leading",
    "a",
    "",
]


def routed(model, ids, mask=None, **options):
    """The decision of the one stack."""
    with torch.no_grad():
        (route,) = model.model(ids, attention_mask=mask, output_routes=True, **options).routes
    return route


def dark_by_rule(text: bytes) -> list[int]:
    """SpaceByte's rule in plain Python."""
    found, before = [], False
    for place, byte in enumerate(text):
        space = byte < 128 and not chr(byte).isalnum()
        found.append(int(place == 0 or (space and not before)))
        before = space
    return found


@pytest.fixture(scope="module")
def spaces():
    return stack_model(router="space", vocab_size=257)


@pytest.mark.parametrize("text", [text.encode() for text in TEXTS if text], ids=[text for text in TEXTS if text])
def test_spaces_of_a_text(spaces, text):
    assert routed(spaces, torch.tensor([list(text)])).choice_BT[0].tolist() == dark_by_rule(text)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), min_size=2, max_size=2), st.data())
def test_spaces_of_any_text(texts, data):
    """In a batch of two, padded anywhere, and in pieces."""
    model, lines = stack_model(router="space", vocab_size=257), [text.encode() for text in texts]
    width = max(map(len, lines)) + 2
    ids, mask = torch.full((2, width), 32), torch.zeros(2, width, dtype=torch.long)
    for row, line in enumerate(lines):
        places = sorted(data.draw(st.permutations(range(width)))[: len(line)])
        ids[row, places], mask[row, places] = torch.tensor(list(line)), 1
    found = routed(model, ids, mask).choice_BT
    assert [row[real.bool()].tolist() for row, real in zip(found, mask, strict=True)] == list(map(dark_by_rule, lines))
    piece = data.draw(st.integers(1, width - 1))
    steps, _ = fed_logits(model, ids, [piece, *[1] * (width - piece)], mask)
    with torch.no_grad():
        torch.testing.assert_close(steps[mask.bool()], model(ids, mask).logits[mask.bool()])


def test_ids_beyond_bytes_are_no_spaces():
    assert is_space(torch.arange(300)).tolist() == [n < 128 and not chr(n).isalnum() for n in range(300)]


@pytest.mark.parametrize(("fraction", "stride"), [(0.2, 5), (0.5, 2), (0.34, 3), (0.01, 100)])
def test_a_stride(fraction, stride):
    model = stack_model(router="stride", target_fraction=fraction)
    assert model.config.target_fraction == 1 / stride
    mask = padding_mask("left", 2, 12)
    found = routed(model, token_ids(2, 12), mask).choice_BT
    assert [found[row, row + 1 :].tolist() for row in range(2)] == [
        [int(t % stride == 0) for t in range(11 - row)] for row in range(2)
    ]


@pytest.mark.parametrize("padding", ["left", "holes"])
def test_the_rise_of_the_entropy(padding):
    """From real token to real token, the first from 0; and what is cut is what the router `predictive` reads."""
    model, ids, mask = stack_model(router="rise"), token_ids(3, 12), padding_mask(padding, 3, 12)
    rises = routed(model, ids, mask).score_BT
    model.config.router = "predictive"
    plain = ChiarForCausalLM(model.config).double().eval()
    plain.load_state_dict(model.state_dict())
    entropies = routed(plain, ids, mask).score_BT
    for rise, entropy, real in zip(rises, entropies, mask.bool(), strict=True):
        torch.testing.assert_close(rise[real], entropy[real].diff(prepend=entropy.new_zeros(1)))


def test_the_learned_score_scales_by_2p():
    model = stack_model(router="learned", hard_estimator="both").train()
    ids = token_ids(3, 12)
    (route,) = model.model(ids, output_routes=True).routes
    p_BT, dark_BT = route.probabilities_BTK[..., 1], route.choice_BT.bool()
    torch.testing.assert_close(route.weights_BTK[..., 1], torch.where(dark_BT, 2 * p_BT, 0.0))
    assert torch.equal(route.weights_BTK[..., 0], (~dark_BT).double())
    assert (p_BT[dark_BT] > 0.5).all() and (p_BT[~dark_BT] <= 0.5).all()
    assert route.weights_BTK.requires_grad


def test_boundaries():
    """p by hand; weights of 1 with the gradient of p where dark, of 1 − p where light."""
    model = stack_model(router="boundary")
    router, decoder, ids = model.model.stacks["1"].router, model.model, token_ids(2, 9)
    x_BTD = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    context = make_context(model.config, decoder.basis.transform(), x_BTD, ids, None, None, 0).of("router", None)
    route = router(x_BTD, None, context, None)
    q_BTD, k_BTD = x_BTD @ router.q.weight.T, x_BTD @ router.k.weight.T
    for row in range(2):
        for t in range(9):
            q, k = q_BTD[row, t], k_BTD[row, t - 1]
            p = (1 - q @ k / (q.norm() * k.norm())) / 2 if t else torch.ones(())
            assert route.probabilities_BTK[row, t, 1].item() == pytest.approx(p.item())
            assert route.choice_BT[row, t] == int(p > 0.5)
    assert torch.equal(route.weights_BTK.sum(-1), torch.ones(2, 9, dtype=torch.float64))
    weights_BT = route.weights_BTK.sum(-1)
    sign_BT = torch.where(route.choice_BT == 1, 1.0, -1.0)
    scale_BT = torch.linspace(-1, 1, 18, dtype=torch.float64).view(2, 9)
    found, expected = (
        torch.autograd.grad((scale_BT * value).sum(), x_BTD, retain_graph=True)[0]
        for value in (weights_BT, sign_BT * route.probabilities_BTK[..., 1])
    )
    torch.testing.assert_close(found, expected)


def test_the_ratio_loss():
    """H-Net's, by hand, over real tokens; 1 where f of them are dark with a mean p of f."""
    torch.manual_seed(0)
    choice_BT, p_BT = torch.randint(2, (3, 8)), torch.rand(3, 8, requires_grad=True)
    real_BT = padding_mask("holes", 3, 8).bool()
    route = Route(choice_BT, torch.zeros(3, 8, 2), torch.stack([1 - p_BT, p_BT], -1))
    for real in (None, real_BT):
        there = torch.ones_like(real_BT) if real is None else real
        dark, mean, times = choice_BT[there].float().mean(), p_BT[there].mean(), 5.0
        by_hand = times / (times - 1) * ((times - 1) * dark * mean + (1 - dark) * (1 - mean))
        torch.testing.assert_close(ratio_loss(route, real, 0.2), by_hand)
    even = Route(torch.tensor([[1, 0, 0, 0, 0]]), torch.zeros(1, 5, 2), torch.tensor([[[0.8, 0.2]] * 5]))
    assert ratio_loss(even, None, 0.2).item() == pytest.approx(1.0)
    more = Route(torch.tensor([[1, 1, 1, 0, 0]]), torch.zeros(1, 5, 2), torch.tensor([[[0.4, 0.6]] * 5]))
    assert ratio_loss(more, None, 0.2).item() > 1.0
    model, ids = stack_model(router="boundary", target_fraction=0.25), token_ids(3, 12)
    done = model.train().model(ids, output_routes=True)
    torch.testing.assert_close(done.routing_loss, 0.03 * ratio_loss(done.routes[0], None, 0.25))
    done.routing_loss.backward()
    assert model.model.stacks["1"].router.q.weight.grad.abs().max() > 0


def test_it_begins_with_the_cosine_of_the_states_themselves():
    """In a model, and where a run draws its weights."""
    config = stack_config(router="boundary")
    for model in (ChiarForCausalLM(config), materialise(outline(config, {}), 0).language):
        router = model.model.stacks["1"].router
        assert torch.equal(router.q.weight, torch.eye(16)) and torch.equal(router.k.weight, torch.eye(16))


def test_a_trained_boundary_router_comes_near_its_fraction():
    torch.manual_seed(0)
    model = ChiarForCausalLM(stack_config(router="boundary", target_fraction=0.25)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for seed in range(60):
        ids = token_ids(8, 16, seed)
        loss = model.model(ids, output_routes=True).routing_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = routed(model.eval(), token_ids(32, 16, seed=99)).choice_BT.float().mean()
    assert found.item() == pytest.approx(0.25, abs=0.12)


class Vowels(ChoiceRouter):
    """Dark is a vowel that follows no vowel."""

    def choose(self, x_BTD, entropy_BT, context):
        vowel_BT = torch.isin(context.token_ids_BT, torch.tensor(list(b"aeiou"))).long()
        return vowel_BT * (1 - context.past("vowel", vowel_BT, 1)[..., 0])


def test_a_router_of_ones_own():
    register_router("vowels", lambda config, layer: Vowels(2))
    try:
        model = stack_model(router="vowels", vocab_size=256, execution="sparse")
        ids = torch.tensor([list(b"queueing trees"), list(b"aabbaacceexxii")])
        dark = routed(model, ids).choice_BT
        assert ["".join(chr(c) for c in row[mark.bool()]) for row, mark in zip(ids, dark, strict=True)] == [
            "ue",
            "aaei",
        ]
        with torch.no_grad():
            sparse, model.config.execution = model(ids).logits, "dense"
            torch.testing.assert_close(sparse, model(ids).logits)
        steps, _ = fed_logits(model, ids, [3, *[1] * 11])
        torch.testing.assert_close(steps, sparse)
    finally:
        del registry.ROUTERS["vowels"]


def test_a_forecast_is_cut_in_fp32_in_a_bf16_model():
    model = stack_model(router="forecast").bfloat16()
    scores = model.model(token_ids(2, 40), output_routes=True).routes[0].score_BT
    assert scores.dtype == torch.float32 and len(scores.unique()) > 70


def test_a_share_of_padded_rows_is_cut_without_a_look_at_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from chiar.layers.context import TokenContext

    with FakeTensorMode():
        real_BT = torch.ones(2, 10, dtype=torch.bool)
        context = TokenContext(None, None, real_BT, None, None, share=0.3)
        assert context.cut(torch.randn(2, 10)).shape == ()
