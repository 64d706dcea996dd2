"""Looking back: over real tokens only, in one pass or many, in a place that does not move."""

import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.kernels.temporal_filter import naive_temporal_filter
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.ragged import Shelf
from chiar.layers.temporal import TemporalFilter
from chiar.model.cache import LayerState
from chiar.training.loop import make_optimizer
from chiar.training.settings import TrainSettings

ROWS, TOKENS, WIDTH, WINDOW = 3, 12, 6, 4
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 12, [0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0]]).bool()


def make():
    filter = TemporalFilter(WIDTH, WINDOW, 3).double()
    torch.nn.init.normal_(filter.coefficients_KD)
    torch.nn.init.normal_(filter.now_D)
    return lambda x, real, memory: filter(x, context(real), memory=memory)


def context(real_BT):
    return TokenContext(Transform(), torch.zeros(1), real_BT, None, None)


@pytest.fixture
def x_BTD():
    return torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)


def test_padding_anywhere_is_as_if_it_were_not_there(x_BTD):
    run = make()
    found = run(x_BTD, MASK, None)
    for row in range(ROWS):
        alone = run(x_BTD[row, MASK[row]][None], None, None)[0]
        torch.testing.assert_close(found[row, MASK[row]], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunks", [[1] * TOKENS, [5, 1, 1, 2, 3], [2, 10], [TOKENS]], ids=str)
def test_pieces_give_what_the_whole_gives(chunks, x_BTD):
    """Rows change places halfway, as beams do."""
    run, memory, order = make(), LayerState(Shelf()), torch.arange(ROWS)
    whole, start = run(x_BTD, MASK, None), 0
    for n, size in enumerate(chunks):
        part = slice(start, start + size)
        found = run(x_BTD[order, part], MASK[order, part], memory)
        torch.testing.assert_close(found[MASK[order, part]], whole[order, part][MASK[order, part]], atol=1e-12, rtol=0)
        start += size
        if n == len(chunks) // 2:
            order = torch.tensor([2, 0, 1])
            memory.reorder_cache(order)


def test_a_step_writes_where_the_one_before_wrote(x_BTD):
    run, shelf = make(), Shelf()
    memory = LayerState(shelf)
    with torch.no_grad():
        run(x_BTD[:, :5], MASK[:, :5], memory)
        place, moves = memory.get("temporal").data_ptr(), shelf.moves
        for t in range(5, TOKENS):
            run(x_BTD[:, t : t + 1], MASK[:, t : t + 1], memory)
    assert (memory.get("temporal").data_ptr(), shelf.moves) == (place, moves)
    assert memory.get("temporal").shape == (ROWS, WINDOW - 1, WIDTH)


def test_the_filter_starts_as_the_identity_and_learns_from_the_first_step(x_BTD):
    filter = TemporalFilter(WIDTH, WINDOW, 2).double()
    y_BTD = filter(x_BTD, context(None))
    assert torch.equal(y_BTD, x_BTD)
    (y_BTD * torch.randn_like(y_BTD)).sum().backward()
    assert (filter.now_D.grad != 0).all() and (filter.coefficients_KD.grad != 0).all()


def test_taps_are_the_coefficients_spectrum_and_the_token_now(x_BTD):
    filter = TemporalFilter(WIDTH, WINDOW, 2).double()
    torch.nn.init.normal_(filter.coefficients_KD)
    taps_WD = filter.basis_WK @ filter.coefficients_KD
    taps_WD[0] += filter.now_D
    torch.testing.assert_close(filter(x_BTD, context(None)), naive_temporal_filter(x_BTD, taps_WD))


def test_everywhere_adds_nothing_at_first():
    changes = {"norm_position": "pre", "dropout": 0.0}
    torch.manual_seed(0)
    plain = ChiarForCausalLM(presets.get("baseline-tiny", **changes)).eval()
    more = ChiarForCausalLM(presets.get("baseline-tiny", temporal_everywhere=True, **changes)).eval()
    missing = more.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert len(missing) == 4 * len(plain.model.layers) and all(".everywhere." in name for name in missing)
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(plain(ids).logits, more(ids).logits)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temporal_window": 1}, "temporal_window must be at least 2, got 1"),
        ({"temporal_coefficients": 17}, "temporal_coefficients=17 is more than temporal_window=16"),
        ({"temporal_coefficients": 0}, "temporal_coefficients must be a positive"),
        ({"operators": ["temporal", "spectral", "attention"]}, "is not supported"),
        ({"operators": ["attention"]}, "is not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes, reason):
    with pytest.raises(InputError, match=reason):
        presets.get("v3-tiny", **changes)


def test_a_temporal_layer_1_has_the_gate_and_static_layers_the_light_operator():
    kinds = ["temporal", "routed", "routed", "attention"]
    config = presets.get("v3-tiny", layer_types=kinds, operators=["temporal", "attention"], router="static")
    assert config.meta_router and config.static_operators == ["attention", "temporal"]


def test_filters_do_not_decay():
    model = ChiarForCausalLM(presets.get("baseline-tiny", temporal_everywhere=True))
    matrices, others = make_optimizer(model, TrainSettings(data=["corpus"]), torch.device("cpu")).param_groups
    filters = {id(p) for name, p in model.named_parameters() if ".filter." in name}
    assert len(filters) == 2 * len(model.model.layers) and filters <= {id(p) for p in others["params"]}
    assert matrices["weight_decay"] > others["weight_decay"] == 0


def test_a_shut_gate_still_remembers(lively):
    """Layer 1 is skipped for some tokens; those after them look back on these too."""
    model = lively({"gate_skip_below": 0.5, "temporal_everywhere": True})
    ids, cache, found = torch.arange(60, 74)[None], None, []
    with torch.no_grad():
        whole = model(ids)
        for t in range(ids.shape[1]):
            done = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            found.append(done.logits)
        gates = model(ids, output_routing=True).routing.layers[0].gate_BT[0]
    assert 0 < (gates == 0).sum() < len(gates)
    assert (torch.cat(found, 1) - whole.logits).abs().max() < 2e-4
