"""Looking back: over real tokens only, in one pass or many, in a place that does not move."""

import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.ragged import Shelf
from chiar.layers.temporal import TemporalFilter
from chiar.model.cache import LayerState
from chiar.training.settings import TrainSettings
from chiar.training.trainer import make_optimizer
from helpers import fed_logits, small_config

ROWS, TOKENS, WIDTH, WINDOW = 3, 12, 6, 4
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 12, [0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0]]).bool()


def make():
    sizes = {"hidden_size": WIDTH, "temporal_window": WINDOW, "temporal_coefficients": 3}
    filter = TemporalFilter(small_config(num_attention_heads=1, **sizes)).double()
    torch.nn.init.normal_(filter.coefficients_KD)
    torch.nn.init.normal_(filter.now_D)
    return lambda x, real, memory: filter(x, TokenContext(Transform(), torch.zeros(1), real, None, None), None, memory)


@pytest.fixture
def x_BTD():
    return torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("chunks", [[1] * TOKENS, [5, 1, 1, 2, 3], [2, 10]], ids=str)
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


def test_everywhere_adds_nothing_at_first_and_learns_from_the_first_step():
    changes = {"norm_position": "pre", "dropout": 0.0}
    torch.manual_seed(0)
    plain = ChiarForCausalLM(presets.get("baseline-tiny", **changes)).eval()
    more = ChiarForCausalLM(presets.get("baseline-tiny", temporal_everywhere=True, **changes)).eval()
    missing = more.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert len(missing) == 4 * len(plain.model.layers) and all(".everywhere." in name for name in missing)
    ids = torch.arange(24).view(2, 12)
    output = more(ids, labels=ids)
    torch.testing.assert_close(plain(ids).logits, output.logits)
    output.loss.backward()
    filters = [layer.everywhere.filter for layer in more.model.layers]
    assert all((p.grad != 0).all() for filter in filters for p in (filter.now_D, filter.coefficients_KD))


def test_filters_do_not_decay():
    model = ChiarForCausalLM(presets.get("baseline-tiny", temporal_everywhere=True))
    matrices, others = make_optimizer(model, TrainSettings(data=["corpus"]), torch.device("cpu")).param_groups
    filters = {id(p) for name, p in model.named_parameters() if ".filter." in name}
    assert len(filters) == 2 * len(model.model.layers) and filters <= {id(p) for p in others["params"]}
    assert matrices["weight_decay"] > others["weight_decay"] == 0


def test_a_shut_gate_still_remembers(lively):
    """Layer 1 is skipped for some tokens; those after them look back on these too."""
    model, ids = lively({"gate_skip_below": 0.5, "temporal_everywhere": True}), torch.arange(60, 74)[None]
    with torch.no_grad():
        whole = model(ids, output_routing=True)
    found, _ = fed_logits(model, ids, [1] * ids.shape[1])
    gates = whole.routing.layers[0].gate_BT[0]
    assert 0 < (gates == 0).sum() < len(gates)
    # A step sums in another order than the whole pass, in fp32, and logits reach 25.
    assert (found - whole.logits).abs().max() < 2e-4
