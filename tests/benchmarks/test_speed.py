"""The speed benchmark on a CPU: every contender can be built, checked and timed."""

import csv
from dataclasses import replace

import pytest
import torch

import contenders
import models
import parity
import peers
import rows
import speed
from chiar.layers.ragged import BLOCK, ROOM, RaggedStore

SMALL = ["--device", "cpu", "--size", "tiny", "--lengths", "32", "--fractions", "0.25", "--tokens", "64"]
QUICK = [*SMALL, "--turns", "1", "--steps", "2", "--no-compile"]
SETTING = models.Setting("tiny", None, 32, 0.25)
STYLES = {"mod": peers.MixtureOfDepthsBlock, "dtrnet": peers.BypassBlock}
IDS_BT = torch.arange(64).view(2, 32)


def run(path, *more, registry=contenders.REGISTRY):
    code = speed.main([*QUICK, *more, "--csv", str(path)], registry)
    with path.open(newline="") as file:
        return code, list(csv.DictReader(file))


@pytest.mark.slow
def test_every_contender_has_a_row_and_a_line_and_nothing_is_overwritten(tmp_path, capsys):
    path, picture = tmp_path / "speed.csv", tmp_path / "speed.svg"
    code, found = run(path, "--picture", str(picture))
    assert code == 0
    assert [row["contender"] for row in found] == list(contenders.REGISTRY)
    assert list(found[0]) == rows.COLUMNS
    for row in found:
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["realised"]) == pytest.approx(float(row["speedup"]) / float(row["bound"]), rel=1e-4)
        assert float(row["parity_error"]) < parity.GRADIENT_LIMIT
        fixed = ("baseline", "baseline-pre", "half-layers")
        assert row["fraction"] == ("" if row["contender"] in fixed else "0.25")
    drawn = picture.read_text()
    assert all(drawn.count(f'id="line-{name}"') == 2 * (name != "baseline") for name in contenders.REGISTRY)
    before = path.read_text()
    assert speed.main([*QUICK, "--csv", str(path)]) == 2
    assert "exists" in capsys.readouterr().err and path.read_text() == before


def faulty_contender(change):
    """The best design, with slightly wrong states in sparse execution: `change` of the right ones."""

    class Faulty(models.TimedChiar):
        def states(self, ids_BT, routes):
            states_BTD, entropy = super().states(ids_BT, routes)
            return change(states_BTD), entropy

    def build(setting, execution, whole):
        config = contenders.REGISTRY["routed"].build(setting, "dense", whole).config
        return (Faulty if execution == "sparse" else models.TimedChiar)(config, whole)

    return contenders.Contender("wrong", "differs", build, "sparse")


def test_contenders_that_differ_or_fail_get_no_row_and_others_do(tmp_path, capsys):
    def build(setting, execution, whole):
        raise ValueError("no such thing")

    registry = {name: contenders.REGISTRY[name] for name in ("baseline", "routed")}
    others = {"wrong": faulty_contender(lambda x: 1.001 * x), "broken": contenders.Contender("broken", "", build)}
    code, found = run(tmp_path / "speed.csv", registry={**others, **registry})
    output = capsys.readouterr().out
    assert code == 1 and [row["contender"] for row in found] == ["baseline", "routed"]
    assert "wrong f 0.25: PARITY FAILED" in output and "ValueError: no such thing" in output


@pytest.mark.parametrize(
    ("name", "bf16", "message"),
    [("routed", True, ""), ("mod", True, ""), ("states", True, ""), ("gradient alone", False, "gradient")],
)
def test_errors_are_found_and_bf16_may_lose_what_dense_execution_loses(name, bf16, message):
    wrong = {"states": lambda x: 1.05 * x, "gradient alone": lambda x: x.detach() + (x - x.detach()) * 1.001}
    contender = faulty_contender(wrong[name]) if name in wrong else contenders.REGISTRY[name]
    checked = parity.Parity(contender, SETTING, "cpu", compile=False, decode=False)
    checked.bf16 = bf16
    verdict = checked.check(0.25)
    assert verdict.passed == (name not in wrong) and message in verdict.message
    assert verdict.error > (1e-3 if bf16 else 0)


@pytest.mark.slow
def test_decode_counts_the_cache_as_it_is_stored(tmp_path):
    """Four layers, two of them routed at f = 0.25 and one without keys: so many entries, and some room."""
    longer = ["--mode", "decode", "--lengths", "512", "--tokens", "1024"]
    code, table = run(tmp_path / "decode.csv", *longer, "--only", "routed", "routed-all-keys", "mod", "v3")
    found = {row["contender"]: row for row in table}
    assert code == 0 and set(found) == {"baseline", "routed", "routed-all-keys", "v3"}, "mod cannot decode"
    layers, width, batch, entries = 4, 32, 2, 512 + ROOM  # as allocated, in use or not
    assert int(found["baseline"]["cache_bytes"]) == layers * 2 * batch * entries * width * 4 + layers * batch * 8
    share, room = float(found["routed"]["cache_share"]), (BLOCK + ROOM) / 512
    assert (2 * 0.25 + 1) / 4 < share < (2 * (0.25 + room) + 1 + room) / 4
    assert float(found["routed-all-keys"]["cache_share"]) == pytest.approx(3 / 4, rel=1e-3)
    assert not any(row["bound"] for row in table), "decoding is bound by memory"


def test_errors_of_the_decoding_step_alone_are_found(monkeypatch):
    checked = parity.Parity(contenders.REGISTRY["routed"], SETTING, "cpu", compile=False, decode=True)
    assert checked.check(0.25).passed
    attend = RaggedStore.attend
    monkeypatch.setattr(RaggedStore, "attend", lambda store, *arguments: 1.001 * attend(store, *arguments))
    verdict = checked.check(0.25)
    assert not verdict.passed and "decoded logits" in verdict.message


def test_bad_input_gets_one_sentence(capsys):
    for arguments, message in (
        (["--only", "routd"], "Did you mean 'routed'"),
        (["--layers", "2"], "too few"),
        (["--own-routes"], "--own-routes needs --mode decode"),
        (["--csv", "nowhere/speed.csv"], "not a folder"),
        (["--peer", "nowhere"], "has no peer.py"),
    ):
        assert speed.main([*SMALL, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_prefill_of_a_peer_from_a_folder(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "sizes.py").write_text("FACTOR = 2\n")
    (folder / "peer.py").write_text(
        "from torch import nn\nfrom sizes import FACTOR\n\n"
        "def build(vocab, width, heads, layers, length):\n"
        "    return nn.Sequential(nn.Embedding(vocab, FACTOR * width), nn.Linear(FACTOR * width, vocab))\n"
    )
    code, (_, row) = run(tmp_path / "speed.csv", "--mode", "prefill", "--peer", str(folder), "--only", "tables")
    assert (code, row["contender"], row["bound"], row["fraction"]) == (0, "tables", "", "")


def test_forced_routes_still_pay_for_the_entropy():
    """For compilation as a whole, H of the routed layers is an output, so that it is not eliminated."""
    model = contenders.REGISTRY["routed"].build(SETTING, "sparse", True)
    routes = models.exact_routes(2, 32, 8, model.routed_layers, "cpu")
    _, entropy = model(IDS_BT, IDS_BT, routes)
    trace = model.language.model(IDS_BT, forced_routes=routes, output_routing=True).routing
    expected = torch.stack([trace.layers[i].entropy_BT.mean() for i in model.routed_layers]).mean()
    torch.testing.assert_close(entropy, expected)


def randomised_peer(name):
    model = peers.PeerModel(STYLES[name], SETTING, "sparse").eval()
    parity.randomise(model)
    return model, models.exact_routes(2, 32, 8, model.routed_layers, "cpu")


@pytest.mark.parametrize("name", STYLES)
def test_peers_run_their_capacity_only_and_every_parameter_learns(name):
    """Packed attention gets exactly f·T tokens of each row; tokens that skip a block are unchanged."""
    (model, routes), sizes, seen = randomised_peer(name), [], {}
    assert all((choice_BT.sum(1) == 8).all() for choice_BT in routes.values())
    layer = model.layers[1]
    inner = layer.block.operators["attention"] if name == "mod" else layer.query_key
    inner.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    layer.register_forward_hook(lambda _, inputs, output: seen.update(before=inputs[0], after=output))
    loss, _ = model.train()(IDS_BT, IDS_BT.roll(-1, 1), routes)
    assert sizes == [(2, SETTING.attending, 32)] == [(2, 8, 32)]
    assert name != "mod" or torch.equal((seen["before"] != seen["after"]).any(-1), routes[1] == 1)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("name", STYLES)
def test_causality_of_the_peers(name, forced):
    """The top-k of Mixture-of-Depths spans the whole row: as published, and not causal."""
    model, routes = randomised_peer(name)
    other_BT = IDS_BT.clone()
    other_BT[:, 20:] += 100
    with torch.no_grad():
        before, after = (model.states(ids_BT, routes if forced else None)[0] for ids_BT in (IDS_BT, other_BT))
    assert not torch.allclose(before[:, 20:], after[:, 20:])
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5) == (forced or name != "mod")


def test_flops_of_the_peers_count_what_they_run():
    """If every token attends, both cost the baseline and a router; fewer tokens cost less."""
    baseline = contenders.REGISTRY["baseline"].build(SETTING, "dense", False).flops(SETTING)
    for kind in STYLES.values():
        settings = replace(SETTING, fraction=1.0), SETTING
        full, some = (peers.PeerModel(kind, setting, "sparse").flops(setting) for setting in settings)
        assert full.logits == baseline.logits and 0 <= full.layers / baseline.layers - 1 < 0.01
        assert some.layers < baseline.layers
