"""Studies as data: those that come with the package, users' files, and what is wrong with them."""

from pathlib import Path

import pytest

from chiar import presets
from chiar.errors import InputError
from chiar.model.load import count_parameters
from chiar.studies import toml_file
from chiar.studies.catalog import DECLARED, find
from chiar.studies.plan import changed, chosen, make_plan, plain_config
from chiar.studies.table import costs_of
from commands import run


@pytest.mark.parametrize("name", DECLARED)
def test_every_variant_of_a_declared_study_can_be_built_and_counted(name):
    study = find(name)
    assert study.name == name
    length = study.settings["length"]
    for variant in study.variants:
        parameters, costs, _ = costs_of(study, variant, None, length)
        assert parameters > 0
        assert costs["forward"] == pytest.approx(costs["layers"] + costs["logits"])
        assert costs["training"] >= 2.9 * costs["forward"]


def test_routers40m_has_every_control_and_both_ways_of_the_candidates():
    study = find("routers40m")
    configs = {variant.name: plain_config(study, variant) for variant in study.variants}
    controls = {variant.name for variant in study.variants if variant.role == "control"}
    assert {"dense", "dense-post", "dense-9", "dense-6", "dense-w256", "static", "hash", "position", "soft"} <= controls
    dense = configs["dense"]
    assert 40e6 < count_parameters(dense) < 41e6
    assert (dense.hidden_size, dense.head_size, dense.num_hidden_layers) == (384, 64, 12)
    assert all(config.dropout == 0 and config.head_size == 64 for config in configs.values())
    candidates = {v.name: configs[v.name] for v in study.variants if v.role == "candidate"}
    for router in ("learned", "entropy"):
        ways = {(c.keys, c.light_ffn) for c in candidates.values() if c.router == router}
        assert ways >= {("routed", True), ("routed", False)}, "with and without the light FFN"
    for config in candidates.values():  # nobody gets more attention than half of the tokens on average
        assert sum(config.layer_fractions()) / len(config.routed_layers) <= 0.5
    assert {c.operators[0] for c in candidates.values()} == {"spectral", "temporal", "skip", "bypass"}
    assert {c.signal for c in candidates.values()} == {"features", "temporal"}


@pytest.mark.parametrize("name", ["routers40m_even", "routers40m_long"])
def test_v4_is_what_was_studied(name):
    study = find(name)
    studied = plain_config(study, study.variant("deep-eighth")).to_dict()
    size = {key: studied[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "layer_types")}
    preset = presets.get("v4-16m", **size, intermediate_size=studied["intermediate_size"]).to_dict()
    differ = {key for key in preset if preset[key] != studied[key]}
    assert differ <= {"max_position_embeddings", "vocab_size"}


def test_half_the_layers_switched_off_cost_what_half_the_layers_cost():
    study = find("routers40m")
    forward = {
        name: costs_of(study, study.variant(name), None, 256)[1] for name in ("static-lean", "dense-6", "learned-both")
    }
    assert forward["static-lean"]["forward"] == forward["dense-6"]["forward"]
    # Straight-through over both operators trains on all of them, whatever it chooses.
    assert forward["learned-both"]["training"] == pytest.approx(
        3 * costs_of(study, study.variant("soft"), None, 256)[1]["forward"]
    )


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("tokens = 390", "token = 390"), "unknown field of study 'token'. Did you mean 'tokens'?"),
        (("tokens = 390", ""), "must say either epochs or tokens"),
        (("tokens = 390", "tokens = 390\nepochs = 1"), "must say either epochs or tokens"),
        (("tokens = 390", 'tokens = "all"'), "tokens of study must be a whole number, got 'all'"),
        (('baseline = "dense"', 'baseline = "dens"'), "unknown baseline variant 'dens'. Did you mean 'dense'?"),
        (('baseline = "dense"', 'baseline = "learned"'), "must be a control"),
        (('baseline = "dense"', ""), "the study says no baseline"),
        (('role = "candidate"', 'role = "winner"'), "unknown role of variant learned 'winner'"),
        (('role = "candidate"', ""), "variant learned says no role"),
        (("seeds = [1]", "seeds = [1, 1]"), "seeds must be different whole numbers"),
        (("seeds = [1]", 'seeds = ["a"]'), "seeds of variant learned must be a list of whole numbers"),
        (("rank = 2", "settings = { batch = 2 }"), "variant learned cannot set batch"),
        (("rank = 2", "fraction = 2"), "fraction must lie between 0 and 1"),
        (("rank = 2", "first = true"), "unknown field of variant learned 'first'"),
        (("[variants.learned]", '[variants."a/b"]'), "becomes a folder"),
        (("rank = 2", "rank = "), "is not TOML"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_gets_one_sentence(toml, replaced, message):
    path = toml(replaced)
    code, output = run("study", "show", path)
    assert code == 2
    assert message in output and str(path) in output
    assert "\n" not in output.strip()


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("rank = 2", "settings = { recalibrate_every = 2 }"), "variant learned: recalibrate_every needs"),
        (("rank = 2", "settings = { ratee = 2 }"), "variant learned: unknown training setting 'ratee'"),
        (("light_ffn = false", "light_fnn = false"), "variant learned: unknown"),
        (('router = "learned"', 'router = "lerned"'), "unknown router 'lerned'"),
        (("tokens = 390", "tokens = 39"), "39 tokens is less than one step of 4 × 16 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(toml, corpus, tmp_path, replaced, message):
    code, output = run("study", "run", toml(replaced), "--data", corpus, "--out", tmp_path / "out")
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "lerned"], "unknown variant 'lerned'. Did you mean 'learned'?"),
        (["--set", "steps=3"], "--set cannot set steps"),
        (["--set", "widht=3"], "unknown training setting or configuration field 'widht'"),
        (["--seeds", "0,x"], "--seeds takes whole numbers"),
        (["--seeds", "0,0"], "seeds must be different"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(toml, corpus, tmp_path, more, message):
    code, output = run("study", "run", toml(), "--data", corpus, "--out", tmp_path / "out", *more)
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_a_study_that_is_not_there(tmp_path):
    assert "unknown study 'routers40'. Did you mean 'routers40m'?" in run("study", "show", "routers40")[1]
    assert run("study", "show", tmp_path / "none.toml")[0] == 2
    code, output = run("study", "table", tmp_path)
    assert code == 2 and "is not a study" in output


def test_a_file_can_extend_a_declared_study(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "tiny"\ntokens = 2048\nsettings = { batch = 4 }\n'
        '[variants.mine]\nrole = "candidate"\nconfig = { keys = "routed" }\n'
        '[variants.hash]\nrole = "control"\nconfig = { router = "random", random_fraction = 0.1 }\n'
    )
    base, study = find("tiny"), find(str(path))
    assert (study.name, study.tokens, study.settings) == ("mine", 2048, {**base.settings, "batch": 4})
    assert [v.name for v in study.variants] == [*(v.name for v in base.variants), "mine"]
    assert study.variant("hash").config["random_fraction"] == 0.1
    assert study.variant("dense") == base.variant("dense")


def test_runs_are_ordered_by_rank_and_seed_and_read_the_same_tokens(toml, corpus):
    plan = make_plan(find(str(toml())), corpus)
    assert [run.name for run in plan.runs] == ["dense-s0", "hash-s0", "dense-s1", "hash-s1", "learned-s1"]
    assert plan.steps == 6
    for one in plan.runs:
        assert (one.settings.batch, one.settings.length, one.settings.steps) == (4, 16, 6)
    three = make_plan(find(str(toml())), corpus, only=["learned", "d*"], seeds=[3])
    assert [run.name for run in three.runs] == ["dense-s3", "learned-s3"]


def test_an_epoch_is_every_row_once(toml, corpus):
    plan = make_plan(find(str(toml(("tokens = 390", "epochs = 2")))), corpus)
    rows = (plan.corpus.split("train").tokens - 1) // 16
    assert plan.steps == 2 * rows // 4


def test_what_all_share_can_be_changed_but_not_what_a_variant_says():
    study = changed(find("tiny"), 1024, {"batch": 4, "keys": "all", "hidden_size": 64})
    assert (study.tokens, study.settings["batch"], study.settings["micro_batch"]) == (1024, 4, 4)
    assert plain_config(study, study.variant("entropy")).keys == "routed"
    assert plain_config(study, study.variant("hash")).hidden_size == 64
    with pytest.raises(InputError, match="unknown variant"):
        chosen(study, ["nothing*"])


def test_show_counts_before_any_run(toml, corpus):
    code, output = run("study", "show", toml(), "--data", corpus)
    assert code == 0
    assert "384 tokens in 6 steps" in output and "257 token ids" in output
    row = next(line.split() for line in output.splitlines() if " hash " in line)
    assert row[:4] == ["1", "hash", "control", "0,"] and "0.250" in row
    assert run("study", "list")[1].count("\n") == len(DECLARED) + 1


def test_the_file_shown_in_the_documentation_is_a_study(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    shown = text.split("```toml\n")[1].split("```")[0]
    (tmp_path / "shown.toml").write_text(shown)
    study = find(str(tmp_path / "shown.toml"))
    assert study.name == "routers40m" and study.variant("learned-f25").seeds == (0, 1, 2)
    costs_of(study, study.variant("learned-f25"), None, 256)
    documented = toml_file.__doc__.split("\n\n", 1)[1].split("\n\nWith `extends")[0]
    (tmp_path / "documented.toml").write_text(documented)
    assert [v.name for v in find(str(tmp_path / "documented.toml")).variants] == ["dense", "routed-keys"]
