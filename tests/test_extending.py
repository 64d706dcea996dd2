"""The custom routers, operator and corpus of docs/extending.md, run as printed there."""

import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from chiar import ChiarForCausalLM, check_operator, check_router, presets, register_operator, register_router, registry
from chiar.data.shards import Corpus
from chiar.errors import InputError
from chiar.explore.steering import ways_to_steer, why_not
from chiar.layers import sparse
from chiar.layers.operator import Operator
from chiar.layers.routers import ChoiceRouter, Route
from chiar.model.coordinates import to_spectral_coordinates
from chiar.model.plugin_checks import STACK
from chiar.routing.flops import count_flops, operator_shares
from chiar.routing.tables import flop_records
from chiar.training import tasks
from commands import run
from helpers import fed_logits, feed, refused

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    """Nothing a test registers outlives it."""
    monkeypatch.setenv(registry.PLUGINS, "")
    yield
    forget()


def forget():
    for kinds in (registry.ROUTERS, registry.OPERATORS):
        for name in [name for name, kind in kinds.items() if not registry.built_in(kind)]:
            del kinds[name]
    for name in [name for name in sys.modules if name.startswith("chiar_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, code in BLOCKS:
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words():
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def build(vocab_size=61, **changes):
    torch.manual_seed(0)
    return ChiarForCausalLM(presets.get("v3-tiny", vocab_size=vocab_size, dropout=0.0, **changes)).double().eval()


@pytest.mark.parametrize("room", [False, True], ids=["exact", "with room"])
@pytest.mark.parametrize(("norm_position", "light_ffn"), [("pre", True), ("pre", False), ("post", False)])
def test_custom_ones_are_equal_dense_sparse_and_cached(files, norm_position, light_ffn, room, monkeypatch):
    if room:
        monkeypatch.setattr(sparse, "host_sees_routes", lambda device: False)
    registry.add_plugins(["words.py", "scale.py"])
    design = {"norm_position": norm_position, "light_ffn": light_ffn, "keys": "routed", "gate_pool": "causal"}
    model = build(router="frequent", operators=["scale", "attention"], **design)
    found, ids = {}, words()
    for execution in ("dense", "sparse"):
        model.config.execution = execution
        model.zero_grad()
        result = model(ids, labels=ids, output_routing=True)
        result.loss.backward()
        found[execution] = result.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
    # float64 sums in another order.
    torch.testing.assert_close(found["sparse"], found["dense"], rtol=1e-8, atol=1e-10)
    for layer in model.config.routed_layers:
        assert torch.equal(result.routing.layers[layer].choice_BT, (ids >= 61 * layer // 8).long())
    assert model.model.layers[1].operators["scale"].weight.grad.abs().sum() > 0
    steps, _ = fed_logits(model, ids, [1] * ids.shape[1])
    torch.testing.assert_close(steps, found["dense"][0])


class Even(ChoiceRouter):
    """Every other token goes to attention."""

    def choose(self, x_BTD, entropy_BT, context):
        return context.positions_BT.expand(x_BTD.shape[:2]) % 2


BUILT_IN = {
    "entropy": {},
    "entropy, three": {"operators": ["temporal", "rbf", "attention"]},
    "entropy, followed": {"target_fraction": 0.4},
    "learned": {},
    "learned, soft": {"routing": "soft"},
    "random": {},
    "random, position": {"random_key": "position"},
    "static": {},
    "random, in a stack": {"layer_types": STACK},
    "learned, in a stack": {"layer_types": STACK},
    **{name: {} for name, kind in registry.ROUTERS.items() if not kind.of_layers},
    "space": {"vocab_size": 256},
    "predictive, windows": {"window": 3, "temporal_everywhere": True, "temporal_window": 4, "carry": "smoothed"},
}


@pytest.mark.parametrize("case", BUILT_IN)
def test_built_in_routers_pass_the_checks(case):
    check_router(case.split(",")[0], **BUILT_IN[case])


@pytest.mark.parametrize("operator", [name for name, kind in registry.OPERATORS.items() if not kind.of_stacks])
def test_built_in_operators_pass_the_checks(operator):
    check_operator(operator)


class Before(Operator):
    """The mean of the last three tokens' inputs, which `context.past` keeps."""

    def __init__(self, config):
        super().__init__()

    def forward(self, x_BTD, context, *_):
        return context.past("x", x_BTD, 3).mean(2)


class Pairs(ChoiceRouter):
    """Reads states, not ids, under a name that an operator of the same layer uses too."""

    def choose(self, x_BTD, entropy_BT, context):
        # After the same word the states are equal up to rounding, which must not decide the comparison.
        return (context.past("x", x_BTD[..., 0], 2).sum(2) > 0.7 * x_BTD[..., 0]).long()


def test_custom_ones_pass_the_checks(files):
    registry.add_plugins(["words.py", "repeats.py", "scale.py"])
    check_router("frequent")
    check_router("repeats")
    for router in ("frequent", "repeats", lambda config, layer: Pairs(2)):
        check_router(router, layer_types=STACK)
    check_operator("scale")
    check_operator(Before)
    register_operator("before", Before)
    check_router(lambda config, layer: Pairs(2), operators=["before", "attention"])


def router_from(choose):
    """A router with this `choose`."""
    router = type("Mine", (ChoiceRouter,), {"choose": lambda self, x_BTD, _, context: choose(x_BTD, context)})
    return lambda config, layer: router(2)


def shifted(context, by):
    return (context.token_ids_BT.roll(by, 1) < 5).long()


def operator_from(function):
    """An operator that applies this function."""
    operator = type("Mine", (torch.nn.Module,), {"forward": lambda self, x: function(x)})
    return lambda config: operator()


FAULTY_ROUTERS = {
    "sees later tokens": (lambda x, context: shifted(context, -1), "not causal"),
    "sees the length": (lambda x, context: torch.full(x.shape[:2], x.shape[1] % 2), "not causal"),
    "sees other rows": (lambda x, context: (x[..., 0] > x[..., 0].mean(0)).long(), "mixes rows"),
    "sees padding": (lambda x, context: torch.full(x.shape[:2], int(context.real_BT is None)), "padding"),
    "forgets": (lambda x, context: context.token_ids_BT.cumsum(1) % 2, "in pieces"),
    "is random": (lambda x, context: torch.randint(2, x.shape[:2]), "each time"),
    "too large": (lambda x, context: context.token_ids_BT % 3, r"chose operator 2, but a layer has 0\.\.1"),
    "negative": (lambda x, context: -(context.token_ids_BT % 2), "chose operator -1"),
    "bool": (lambda x, context: x[..., 0] > 0, r"chose bool \(3, 20\), expected int64 \(3, 20\)"),
    "states": (lambda x, context: x.long(), r"chose int64 \(3, 20, 32\), expected int64 \(3, 20\)"),
    "nothing": (lambda x, context: None, "chose NoneType"),
    "breaks": (lambda x, context: x @ x, "failed: "),
}
FAULTY_OPERATORS = {
    "sees later tokens": (lambda x: x.flip(-2), "not causal"),
    "forgets": (lambda x: x.cumsum(-2), "in pieces"),
    "wrong shape": (lambda x: x[..., :3], r"made \(3, 20, 3\) of \(3, 20, 32\)"),
    "nothing": (lambda x: None, "made NoneType"),
    "not finite": (lambda x: x / 0, "not finite"),
}


@pytest.mark.parametrize(("choose", "message"), FAULTY_ROUTERS.values(), ids=FAULTY_ROUTERS.keys())
def test_faulty_routers_are_refused(choose, message):
    refused(message, check_router, router_from(choose))
    refused(message, check_router, router_from(choose), layer_types=STACK)


@pytest.mark.parametrize(("function", "message"), FAULTY_OPERATORS.values(), ids=FAULTY_OPERATORS.keys())
def test_faulty_operators_are_refused(function, message):
    refused(message, check_operator, operator_from(function))


def test_unknown_names_and_non_modules_are_refused():
    refused("unknown router 'rare'", check_router, "rare")
    refused("unknown operator 'scale'", check_operator, "scale")
    refused("was built as NoneType", check_router, lambda config, layer: None)
    assert "checked" not in registry.ROUTERS


def test_a_model_refuses_an_invalid_route():
    """However it was made."""
    register_router("three", router_from(lambda x, context: context.token_ids_BT % 3))
    refused("chose operator 2", build(router="three", gate_pool="causal"), words())

    class Direct(torch.nn.Module):
        def forward(self, x_BTD, entropy_BT, context, forced_BT):
            return self.route(torch.zeros(x_BTD.shape[:2], dtype=torch.long))

    register_router("direct", lambda config, layer: Direct(), has_gradient=True)
    model = build(router="direct", gate_pool="causal")
    for Direct.route, message in (
        (lambda _, choice_BT: choice_BT, "returned Tensor, expected a Route"),
        (lambda _, choice_BT: Route(choice_BT[0], torch.ones(2, 24, 2)), r"chose int64 \(24,\)"),
        (lambda _, choice_BT: Route(choice_BT, torch.ones(2, 24)), r"gave weights \(2, 24\), expected \(2, 24, 2\)"),
    ):
        refused(message, model, words())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fixed_step_keeps_the_past_in_place(files, compiled, monkeypatch):
    """Also if rows are reordered, or others join."""
    registry.add_plugins(["repeats.py"])
    model = build(9, router="repeats", gate_pool="causal", keys="routed")
    ids = words() % 9
    with torch.no_grad():
        expected = model(ids).logits
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))
    model.enable_fast_decoding(compile=compiled)
    (_,), cache = feed(model, ids[:1], [8])
    (_,), other = feed(model, ids[1:], [8])
    cache.join(other, 1, 1)
    cache.reorder_cache(torch.tensor([1, 0]))
    found, moves = [], None
    for t in range(8, 24):
        found.append(fed_logits(model, ids.flip(0), [1], cache=cache, start=t)[0])
        assert moves in (None, cache.shelf.moves)
        moves = cache.shelf.moves
    assert model.fast_decoder.steps == 16
    torch.testing.assert_close(torch.cat(found, 1), expected.flip(0)[:, 8:])


def test_every_router_works_with_every_operator():
    """Built-in or custom. The operator's name is in those of its weights."""
    register_router("even", lambda config, layer: Even(len(config.operators)))
    register_operator("halve", lambda config: torch.nn.Linear(config.hidden_size, config.hidden_size))
    lights = [name for name, kind in registry.OPERATORS.items() if kind.light and not kind.of_stacks]
    routers = [name for name, kind in registry.ROUTERS.items() if kind.of_layers]
    for router, light in itertools.product(routers, lights):
        model = build(router=router, operators=[light, "attention"], gate_pool="causal")
        assert list(model.model.layers[1].operators) == [light, "attention"]
        assert any(name.startswith(f"model.layers.1.operators.{light}.") for name in model.state_dict())
        assert model(words()).logits.isfinite().all()
    for router in [name for name, kind in registry.ROUTERS.items() if kind.of_stacks]:
        model = build(256, router=router, layer_types=STACK, norm_position="pre")
        assert model(words()).logits.isfinite().all()


def test_flops_are_those_declared(files):
    registry.add_plugins(["scale.py"])
    register_router("even", lambda config, layer: Even(2), flops=lambda config: 7.0)
    config = presets.get("v3-tiny", router="even", operators=["scale", "attention"])
    counted = count_flops(config, 16, operator_shares(config, 0.25))
    assert counted.part("router") == 7.0 * len(config.routed_layers)
    assert "scale" in flop_records(config, [16], 0.25)[0]["chiar"]
    assert counted.part("scale") == 0.75 * config.hidden_size * len(config.routed_layers)


def test_entropy_and_normed_states_reach_a_router_that_reads_them():
    inputs = []

    class Reader(ChoiceRouter):
        def choose(self, x_BTD, entropy_BT, context):
            inputs.append((x_BTD, entropy_BT))
            return torch.zeros(x_BTD.shape[:2], dtype=torch.long)

    design = {"norm_position": "pre", "norm": "rmsnorm", "gate_pool": "causal"}
    for name, reads in (("blind", False), ("reader", True)):
        register_router(name, lambda config, layer: Reader(2), reads_entropy=reads, reads_state=reads)
        build(router=name, **design)(words())
    blind, reader = inputs[0], inputs[2]
    assert blind[1] is None and reader[1].shape == (2, 24)
    roots = reader[0].square().mean(-1)
    torch.testing.assert_close(roots, torch.ones_like(roots), atol=1e-3, rtol=0)


def test_commands_accept_a_plugin(files, tmp_path):
    changes = ["--set", "router=frequent", "--set", "gate_pool=causal", "--set", "dropout=0.0"]
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text\n\n" for n in range(60)))
    code, output = run("data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "corpus")
    assert code == 0, output
    code, output = run(
        "--plugin", "words.py", "train", "v3-tiny", "--data", "corpus", "--out", "run", "--steps", "2", "--batch", "2",
        "--micro-batch", "2", "--length", "16", "--no-compile", *changes,
    )  # fmt: skip
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["router"] == "frequent"
    code, output = run("--plugin", "words.py", "trace", "run/final", "--prompt", "abc")
    assert code == 0 and "attention" in output
    forget()
    code, output = run("trace", "run/final", "--prompt", "abc")
    assert code == 2 and "unknown router 'frequent'" in output and "--plugin" in output


def test_the_explore_page_shows_them_and_cannot_steer(files):
    registry.add_plugins(["words.py", "scale.py"])
    model = build(256, router="frequent", operators=["scale", "attention"], gate_pool="causal").float()
    model.save_pretrained("model")
    code, output = run("explore", "model", "--prompt", "abc", "--out", "report.html")
    assert code == 0, output
    page = (files / "report.html").read_text()
    assert '"scale"' in page
    assert "a router of your own" in why_not(model.config) and ways_to_steer(model.config) == []
    changes = {"norm_position": "pre", "norm": "rmsnorm", "filter_gamma": False}
    with pytest.raises(InputError, match="operator of your own"):
        to_spectral_coordinates(build(operators=["scale", "attention"], **changes))


def test_custom_weights_are_initialised_in_training_and_kept_in_loading(files, tmp_path):
    registry.add_plugins(["scale.py"])
    config = presets.get("v3-tiny", vocab_size=61, dropout=0.0, operators=["scale", "attention"], gate_pool="causal")
    model = tasks.materialise(tasks.outline(config, {}), 0).language
    scales = [model.model.layers[layer].operators["scale"].weight for layer in config.routed_layers]
    assert all((weight == 0.5).all() for weight in scales)
    torch.nn.init.constant_(scales[0], 3.0)
    model.save_pretrained(tmp_path / "model")
    again = ChiarForCausalLM.from_pretrained(tmp_path / "model")
    assert again.state_dict()["model.layers.1.operators.scale.weight"].tolist() == [3.0] * config.hidden_size
    torch.testing.assert_close(again.eval()(words()).logits, model.eval()(words()).logits)


@pytest.mark.parametrize(("persistent", "message"), [(True, "reset_parameters"), (False, "persistent=True")])
def test_tensors_that_cannot_be_initialised_or_loaded_are_refused(persistent, message):
    module = torch.nn.Module()
    module.register_buffer("table", torch.ones(3), persistent=persistent)
    register_operator("mine", lambda config: module)
    with pytest.raises(InputError, match=message):
        build(operators=["mine", "attention"])


def test_plugins_with_the_same_file_name_dataclasses_and_subprocesses(tmp_path, monkeypatch):
    """A dataclass looks up its module while that is being imported."""
    for folder in ("a", "b"):
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom chiar import register_router\n"
            f"@dataclass\nclass Options:\n    share: float = 0.5\nregister_router('{folder}', lambda *_: None)\n"
        )
        monkeypatch.chdir(path.parent)
        registry.add_plugins(["mine.py"])
    assert {"a", "b"} <= set(registry.ROUTERS)
    forget()
    monkeypatch.chdir("/")
    registry.load_plugins()
    assert {"a", "b"} <= set(registry.ROUTERS)


def test_the_corpus_is_prepared(files):
    assert [name for name, _ in BLOCKS] == ["words.py", "repeats.py", "scale.py", "diary.py"]
    folder = files / "diary"
    folder.mkdir()
    for day in range(1, 29):
        (folder / f"2026-02-{day:02}.txt").write_text(f"Day {day}: it rained again, and I read.")
    exec(compile(dict(BLOCKS)["diary.py"], "diary.py", "exec"), {"__name__": "__main__"})
    corpus = Corpus.open(files / "corpus")
    assert corpus.name == "diary" and sum(corpus.split(name).documents for name in corpus.splits) == 28


def test_invalid_names_and_plugins_are_refused(tmp_path):
    for name in ("attention", "routed", "ffn"):
        with pytest.raises(InputError, match="built-in name"):
            register_operator(name, lambda *_: None)
    with pytest.raises(InputError, match="built-in name"):
        register_router("entropy", lambda *_: None)
    with pytest.raises(InputError, match="letters, digits"):
        register_router("my router", lambda *_: None)
    path = tmp_path / "mine.py"
    for code, message in (
        (None, "there is no plugin"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("1 +", "cannot be imported: SyntaxError"),
    ):
        if code:
            path.write_text(code)
        exit_code, output = run("--plugin", str(path), "models")
        assert exit_code == 2 and message in output
