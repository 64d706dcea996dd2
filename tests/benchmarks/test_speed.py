"""The speed benchmark on a CPU: every contender builds, is checked, and is measured."""

import csv
import math
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import contenders
import lap
import parity
import peers
import rows
import speed
import timed
import timing
from chiar.layers.attention import CausalAttention
from chiar.layers.ragged import BLOCK, ROOM, RaggedStore

SMALL = ["--device", "cpu", "--size", "tiny", "--lengths", "32", "--fractions", "0.25", "--tokens", "64"]
QUICK = [*SMALL, "--turns", "1", "--steps", "2", "--no-compile"]
SETTING = timed.Setting("tiny", None, 32, 0.25)
STYLES = {"mod": peers.MixtureOfDepthsBlock, "dtrnet": peers.BypassBlock}


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """All contenders in training: the exit code, the rows and the folder."""
    folder = tmp_path_factory.mktemp("speed")
    code = speed.main([*QUICK, "--csv", str(folder / "speed.csv"), "--picture", str(folder / "speed.svg")])
    return code, read(folder / "speed.csv"), folder


def test_every_contender_has_a_row_with_all_columns(measured):
    code, found, _ = measured
    assert code == 0
    assert [row["contender"] for row in found] == list(contenders.REGISTRY)
    assert list(found[0]) == rows.COLUMNS
    for row in found:
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["realised"]) == pytest.approx(float(row["speedup"]) / float(row["bound"]), rel=1e-4)
        assert row["torch"] == torch.__version__
        assert row["hardware"] and row["python"]
        assert float(row["parity_error"]) < parity.GRADIENT_LIMIT
        fixed = ("baseline", "baseline-pre", "half-layers")
        assert row["fraction"] == ("" if row["contender"] in fixed else "0.25")


def test_nothing_is_overwritten(measured, capsys):
    _, found, folder = measured
    assert speed.main([*QUICK, "--csv", str(folder / "speed.csv")]) == 2
    assert "exists" in capsys.readouterr().err
    assert read(folder / "speed.csv") == found


def test_the_picture_has_a_line_for_each_contender_and_its_bound(measured):
    picture = (measured[2] / "speed.svg").read_text()
    others = len(contenders.REGISTRY) - 1
    assert "f = 0.25" in picture and others > 0
    for name in contenders.REGISTRY:
        assert name == "baseline" or f">{name}</text>" in picture


class Wrong(timed.TimedChiar):
    """As dense execution, except that the states are a little too large."""

    factor = 1.001

    def states(self, ids_BT, routes):
        states_BTD, read = super().states(ids_BT, routes)
        return states_BTD * self.factor, read


class TooWrong(Wrong):
    factor = 1.05


def instead(kind):
    """The best design, with `kind` as its sparse execution."""

    def build(setting, execution, whole):
        config = contenders.REGISTRY["routed"].build(setting, "dense", whole).config
        return (kind if execution == "sparse" else timed.TimedChiar)(config, whole)

    return contenders.Contender("wrong", "differs", build, "sparse")


def test_a_contender_with_broken_parity_gets_no_row(tmp_path, capsys):
    registry = {name: contenders.REGISTRY[name] for name in ("baseline", "routed")} | {"wrong": instead(Wrong)}
    code = speed.main([*QUICK, "--csv", str(tmp_path / "speed.csv")], registry)
    assert code == 1
    assert "wrong f 0.25: PARITY FAILED" in capsys.readouterr().out
    assert [row["contender"] for row in read(tmp_path / "speed.csv")] == ["baseline", "routed"]


def test_a_wrong_gradient_alone_is_found():
    class Detached(timed.TimedChiar):
        def states(self, ids_BT, routes):
            states_BTD, read = super().states(ids_BT, routes)
            return states_BTD.detach() + (states_BTD - states_BTD.detach()) * 1.001, read

    verdict = parity.Parity(instead(Detached), SETTING, "cpu", compile=False, decode=False).check(0.25)
    assert not verdict.passed
    assert "gradient" in verdict.message


def test_bf16_is_judged_by_what_dense_execution_loses_in_it():
    cases = {name: contenders.REGISTRY[name] for name in contenders.REGISTRY} | {"wrong": instead(TooWrong)}
    for name, contender in cases.items():
        asked = parity.Parity(contender, SETTING, "cpu", compile=False, decode=False)
        asked.bf16 = True
        verdict = asked.check(0.25)
        assert verdict.passed == (name != "wrong"), (name, verdict)
        assert verdict.error > 1e-3, name


def test_a_contender_that_breaks_costs_the_others_nothing(tmp_path, capsys):
    def build(setting, execution, whole):
        raise ValueError("no such thing")

    registry = {
        "baseline": contenders.REGISTRY["baseline"],
        "broken": contenders.Contender("broken", "", build),
        "routed": contenders.REGISTRY["routed"],
    }
    assert speed.main([*QUICK, "--csv", str(tmp_path / "speed.csv")], registry) == 1
    assert "ValueError: no such thing" in capsys.readouterr().out
    assert [row["contender"] for row in read(tmp_path / "speed.csv")] == ["baseline", "routed"]


def test_prefill_and_decode(tmp_path):
    for mode in ("prefill", "decode"):
        path = tmp_path / f"{mode}.csv"
        arguments = [*QUICK, "--mode", mode, "--csv", str(path), "--only", "routed", "mod", "v3"]
        assert speed.main(arguments) == 0
        found = {row["contender"]: row for row in read(path)}
        assert set(found) == {"baseline", "routed", "v3"} | ({"mod"} if mode == "prefill" else set())
        assert all(bool(row["bound"]) == (mode == "prefill") for row in found.values())
    layers, width, batch = 4, 32, 2
    entries = 32 + ROOM  # as allocated, whatever is in use
    lengths = layers * batch * 8
    assert int(found["baseline"]["cache_bytes"]) == layers * 2 * batch * entries * width * 4 + lengths
    assert float(found["routed"]["cache_share"]) < 0.8


def test_apart_each_model_has_the_device_to_itself(tmp_path, monkeypatch):
    alone = []
    interleave = lap.interleave
    monkeypatch.setattr(lap, "interleave", lambda jobs, *rest: alone.append(len(jobs)) or interleave(jobs, *rest))
    path = tmp_path / "apart.csv"
    assert speed.main([*QUICK, "--mode", "decode", "--apart", "--csv", str(path), "--only", "routed"]) == 0
    baseline, routed = read(path)
    assert alone == [1, 1]
    assert float(routed["baseline_p50_ms"]) == float(baseline["p50_ms"]) > 0
    assert 0 < float(routed["cache_share"]) < 0.8


def test_a_model_that_routes_itself_is_near_the_fraction(tmp_path, capsys):
    path = tmp_path / "own.csv"
    asked = ["--mode", "decode", "--own-routes", "--fractions", "0.5,0.25", "--steps", "40"]
    assert speed.main([*QUICK, *asked, "--only", "routed", "routed-all-keys", "--csv", str(path)]) == 0
    baseline, half, quarter, *all_keys = read(path)
    assert float(half["chosen"]) == pytest.approx(0.5, abs=0.12)
    assert float(quarter["chosen"]) == pytest.approx(0.25, abs=0.12)
    assert {row["chosen"] for row in (baseline, *all_keys)} == {""}, "where every token is a key, keys do not tell"
    assert speed.main([*QUICK, "--own-routes"]) == 2
    assert "--own-routes needs --mode decode" in capsys.readouterr().err


def test_the_cache_of_routed_keys_is_counted_as_it_is_stored(tmp_path):
    """Four layers, two of them routed at f = 0.25, one without keys: as many entries, and some room."""
    path = tmp_path / "decode.csv"
    longer = ["--mode", "decode", "--lengths", "512", "--tokens", "1024", "--only", "routed", "routed-all-keys"]
    assert speed.main([*QUICK, *longer, "--csv", str(path)]) == 0
    shares = {row["contender"]: float(row["cache_share"]) for row in read(path)}
    assert (2 * 0.25 + 1) / 4 < shares["routed"] < (2 * (0.25 + (BLOCK + ROOM) / 512) + 1 + (BLOCK + ROOM) / 512) / 4
    assert shares["routed-all-keys"] == pytest.approx(3 / 4, rel=1e-3)


def test_decoding_is_timed_and_compared_by_its_fast_step(monkeypatch):
    """What only its attention gets wrong is found: the definition shares none of it."""
    contender = contenders.REGISTRY["routed"]
    asked = parity.Parity(contender, SETTING, "cpu", compile=False, decode=True)
    assert asked.check(0.25).passed
    attend, calls = RaggedStore.attend, []

    def wrong(store, *arguments):
        calls.append(1)
        return 1.001 * attend(store, *arguments)

    monkeypatch.setattr(RaggedStore, "attend", wrong)
    verdict = asked.check(0.25)
    assert calls and not verdict.passed and "decoded logits" in verdict.message


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "routd"], "Did you mean 'routed'"),
        (["--layers", "2"], "too few"),
        (["--steps", "0"], "at least 1"),
        (["--csv", "nowhere/speed.csv"], "not a folder"),
        (["--peer", "nowhere"], "has no peer.py"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, sentence, capsys):
    assert speed.main([*SMALL, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_peer_by_folder(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "sizes.py").write_text("FACTOR = 2\n")
    (folder / "peer.py").write_text(
        "from torch import nn\nfrom sizes import FACTOR\n\n"
        "class Table(nn.Module):\n"
        "    def __init__(self, vocab, width):\n"
        "        super().__init__()\n"
        "        self.embed, self.out = nn.Embedding(vocab, FACTOR * width), nn.Linear(FACTOR * width, vocab)\n\n"
        "    def forward(self, ids):\n"
        "        return self.out(self.embed(ids)), None\n\n"
        "def build(vocab, width, heads, layers, length):\n"
        "    return Table(vocab, width)\n"
    )
    path = tmp_path / "speed.csv"
    assert speed.main([*QUICK, "--peer", str(folder), "--only", "tables", "--csv", str(path)]) == 0
    row = read(path)[1]
    assert (row["contender"], row["bound"], row["fraction"]) == ("tables", "", "")
    assert float(row["speedup"]) > 0


def test_routes_are_exact_and_the_same_for_a_layer_in_any_company():
    found = timed.exact_routes(3, 40, 10, [1, 2, 5], "cpu")
    assert all((choice_BT.sum(1) == 10).all() for choice_BT in found.values())
    assert not torch.equal(found[1], found[2])
    assert torch.equal(found[5], timed.exact_routes(3, 40, 10, [5], "cpu")[5])


@pytest.mark.parametrize("name", [n for n, c in contenders.REGISTRY.items() if n not in STYLES and c.takes_fraction])
def test_forced_routes_still_pay_for_the_entropy(name):
    """Compiled, H is an output, so that no compiler drops it; it is the mean over the routed layers."""
    model = contenders.REGISTRY[name].build(SETTING, contenders.REGISTRY[name].execution, True)
    ids_BT = torch.arange(64).view(2, 32)
    routes = timed.exact_routes(2, 32, 8, model.routed_layers, "cpu")
    _, read = model(ids_BT, ids_BT, routes)
    trace = model.language.model(ids_BT, forced_routes=routes, output_routing=True).routing
    expected = [trace.layers[layer].entropy_BT.mean() for layer in model.config.routed_layers]
    torch.testing.assert_close(read, torch.stack(expected).mean())
    assert 0 < float(read) < 1


def test_the_compiler_keeps_the_entropy_of_routed_layers_only():
    """After the compiler has dropped what nobody reads. H is two logarithms or one operator of its own."""
    model = contenders.REGISTRY["routed-dense"].build(SETTING, "dense", True)
    entropies = []

    def count(graph, _):
        graph.graph.eliminate_dead_code()
        names = [str(node.target) for node in graph.graph.nodes]
        entropies.append(names.count("aten.log.default") / 2 + sum("spectral_entropy" in name for name in names))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    ids_BT = torch.arange(64).view(2, 32)
    for attending in (8, 16):  # another split is no other graph
        loss, read = compiled(ids_BT, ids_BT, timed.exact_routes(2, 32, attending, model.routed_layers, "cpu"))
    assert entropies == [len(model.routed_layers)] == [2]
    assert math.isfinite(float(loss.detach())) and read is not None


def lively(name, execution="sparse"):
    torch.manual_seed(0)
    model = peers.PeerModel(STYLES[name], SETTING, execution).eval()
    parity.enliven(model)
    return model


@pytest.mark.parametrize("name", STYLES)
def test_only_the_capacity_runs(name):
    """The packed attention gets exactly f·T tokens of each row, whatever the routes."""
    model, sizes = lively(name), []
    layer = model.layers[1]
    inner = layer.block.operators["attention"] if name == "mod" else layer.query_key
    assert isinstance(inner, CausalAttention | nn.Linear)
    inner.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    ids_BT = torch.arange(64).view(2, 32)
    states_BTD, _ = model.states(ids_BT, timed.exact_routes(2, 32, 8, model.routed_layers, "cpu"))
    assert states_BTD.shape == (2, 32, 32)
    assert sizes == [(2, SETTING.attending, 32)] == [(2, 8, 32)]


def test_mixture_of_depths_leaves_other_tokens_alone():
    model = lively("mod")
    ids_BT = torch.arange(64).view(2, 32)
    routes = timed.exact_routes(2, 32, 8, model.routed_layers, "cpu")
    seen = {}
    model.layers[1].register_forward_hook(lambda _, inputs, output: seen.update(before=inputs[0], after=output))
    model.states(ids_BT, routes)
    changed_BT = (seen["before"] != seen["after"]).any(-1)
    assert torch.equal(changed_BT, routes[1] == 1)


@pytest.mark.parametrize("execution", ["sparse", "dense"])
@pytest.mark.parametrize(
    ("name", "forced", "causal"),
    # The top-k of Mixture-of-Depths is taken over the whole row: published so, and not causal.
    [("mod", True, True), ("dtrnet", True, True), ("dtrnet", False, True), ("mod", False, False)],
)
def test_causality(name, forced, causal, execution):
    model = lively(name, execution)
    routes = timed.exact_routes(2, 32, 8, model.routed_layers, "cpu") if forced else None
    ids_BT = torch.arange(64).view(2, 32)
    other_BT = ids_BT.clone()
    other_BT[:, 20:] += 100
    with torch.no_grad():
        before, after = model.states(ids_BT, routes)[0], model.states(other_BT, routes)[0]
    assert not torch.allclose(before[:, 20:], after[:, 20:])
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5) == causal


@pytest.mark.parametrize("name", STYLES)
def test_every_parameter_of_a_peer_learns(name):
    model = lively(name).train()
    ids_BT = torch.arange(64).view(2, 32)
    loss, _ = model(ids_BT, ids_BT.roll(-1, 1), timed.exact_routes(2, 32, 8, model.routed_layers, "cpu"))
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, parameter_name


def test_bounds_of_the_peers_count_what_they_run():
    """With every token attending both are the baseline and a router; fewer tokens cost less."""
    baseline = contenders.REGISTRY["baseline"].build(SETTING, "dense", False).work(SETTING)
    for kind in STYLES.values():
        every = replace(SETTING, fraction=1.0)
        full = peers.PeerModel(kind, every, "sparse").work(every)
        assert full.logits == baseline.logits
        assert 0 <= full.layers / baseline.layers - 1 < 0.01
        assert peers.PeerModel(kind, SETTING, "sparse").work(SETTING).layers < baseline.layers


def test_times():
    times = timing.Times(steps=[float(n) for n in range(1, 12)])
    assert times.percentiles() == (3.0, 6.0, 9.0)
    slow, fast = timing.Times(turns=[2.0, 4.0, 100.0]), timing.Times(turns=[1.0, 2.0, 2.0])
    assert timing.speedup(slow, fast) == 2.0


def test_storage_shared_by_views_is_counted_once():
    whole = torch.zeros(10)
    job = timing.DecodeJob(
        nn.Module(), None, whole, {}, "cpu", cache={"a": [whole[:5], whole[5:]], "b": (torch.ones(3),)}
    )
    assert job.cache_bytes() == 52
