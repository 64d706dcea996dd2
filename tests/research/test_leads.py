"""Experimental routers, and one set of weights at many f."""

import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from chiar import ChiarForCausalLM, check_router, presets
from chiar.layers import dark
from helpers import randomise, token_ids
from research import dial
from small_corpora import measured_corpus, save, tiny_model

pytestmark = pytest.mark.usefixtures("leads")


@pytest.mark.parametrize("router", ["half_rise", "dial", "space_or_entropy", "benefit", "forecast_rise"])
def test_routers_on_trial_are_causal_and_agree_with_their_cache(router):
    check_router(router, layer_types=["attention", "dark", "attention"])


def test_no_gap_is_longer_and_later_tokens_change_no_choice(leads):
    model = randomise(ChiarForCausalLM(presets.get("v5-tiny", router="rise_or_gap", target_fraction=0.1))).eval()
    model.model.set_thresholds(0.4)
    ids = token_ids(4, 60)
    (route,) = model.model(ids, output_routes=True).routes
    for row, score in zip(route.choice_BT.tolist(), route.score_BT, strict=True):
        since = 0
        for choice, high in zip(row, (score > 0.4).tolist(), strict=True):
            since += 1
            assert choice == (high or since == leads.GAP)
            since = 0 if choice else since
    (first,) = model.model(ids[:, :31], output_routes=True).routes
    assert torch.equal(first.choice_BT, route.choice_BT[:, :31]) and 0.125 < route.choice_BT.float().mean() < 0.6


@pytest.mark.parametrize("texts", [False, True])
def test_a_pooled_stack_is_the_same_packed(texts, monkeypatch):
    monkeypatch.setattr(dark, "has_flash", lambda x: texts)
    model = randomise(ChiarForCausalLM(presets.get("v5-tiny", router="pooled_rise", target_fraction=0.4)).double())
    ids, found = token_ids(3, 12), {}
    for model.config.execution in ("dense", "sparse"):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found[model.config.execution] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert model.model.dark_stacks[0].pool.weight.grad.abs().max() > 0
    torch.testing.assert_close(found["sparse"], found["dense"])


def test_a_dial_draws_another_share_for_every_pass_in_training(leads):
    model = ChiarForCausalLM(presets.get("v5-tiny", router="dial")).train()
    passes = [model.model(token_ids(4, 100), output_routes=True).routes[0].choice_BT for _ in range(5)]
    shares = {float(choice_BT.float().mean()) for choice_BT in passes}
    assert len(shares) == 5 and all(leads.LEAST - 0.01 <= share <= leads.MOST for share in shares)


def test_a_model_is_measured_at_many_shares_beside_random_ones(tmp_path):
    corpus = measured_corpus(tmp_path / "text")
    model = save(tiny_model("v5-tiny"), tmp_path / "model", corpus.tokenizer())
    app = Typer()
    app.command()(dial.main)
    asked = [
        str(model),
        str(corpus.folder),
        "--out",
        str(tmp_path / "dial"),
        "--fractions",
        "0.1,0.5",
        "--device",
        "cpu",
    ]
    assert CliRunner().invoke(app, asked).exit_code == 0
    found = json.loads((tmp_path / "dial" / "dial.json").read_text())
    assert [row["asked"] for row in found] == [0.1, 0.5]
    for row in found:
        # Calibrated on a hundred bytes, measured on others.
        assert row["own"]["fraction"] == pytest.approx(row["asked"], abs=0.2) and row["random"]["bits"] > 0
    assert found[0]["own"]["flops"] < found[1]["own"]["flops"]
    assert CliRunner().invoke(app, asked).exit_code != 0, "nothing is overwritten"


def test_forecasts_learn_their_own_targets():
    targets, ids = {}, token_ids(2, 12)
    for router in ("forecast", "forecast_rise", "benefit"):
        torch.manual_seed(0)
        model = ChiarForCausalLM(presets.get("v5-tiny", router=router)).double().train()
        (stack,) = model.model.dark_stacks
        read = model.model(ids, output_routes=True)
        logits_BTV = model.lm_head(read.last_hidden_state)
        early_BTV = stack.early(read.stacks[0].router_input_BTD)
        targets[router] = stack.forecast_target(read.stacks[0], logits_BTV)
    entropy_BT = targets["forecast"]
    torch.testing.assert_close(targets["forecast_rise"].cumsum(1), entropy_BT)
    kl_BT = torch.nn.functional.kl_div(
        early_BTV.log_softmax(-1), logits_BTV.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(targets["benefit"], kl_BT / torch.tensor(float(logits_BTV.shape[-1])).double().log())
    assert kl_BT.min() > 0
